"""Comparison of result folders; a package, so that both `...tools.evaluate` and `...tools.evaluate.py` run."""

from quark.onnx.converters.functions import calculate_psnr
from quark.onnx.converters.functions import compare_result_folders as main
from quark.onnx.evaluation.compare_folders import compare_folders

__all__ = ["calculate_psnr", "compare_folders", "main"]
