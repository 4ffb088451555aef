"""`python -m quark.onnx.tools.insert_clip_bfloat16_qdq`."""

from quark.onnx.converters.command_line import run_tool
from quark.onnx.converters.functions import insert_clip_bfloat16_qdq

__all__ = ["insert_clip_bfloat16_qdq"]

if __name__ == "__main__":
    run_tool("insert_clip_bfloat16_qdq")
