"""`python -m quark.onnx.tools.convert_resize_fs_to_pof2s`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import convert_resize_fs_to_pof2s, pos2scale, scale2pos

__all__ = ["convert_resize_fs_to_pof2s", "pos2scale", "scale2pos"]

if __name__ == "__main__":
    run_tool("convert_resize_fs_to_pof2s")
