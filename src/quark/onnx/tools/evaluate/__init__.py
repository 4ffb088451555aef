"""Comparison of result folders; a package, so that both `...tools.evaluate` and `...tools.evaluate.py` run."""

from quark.onnx.evaluation.compare_folders import compare_folders

__all__ = ["compare_folders"]
