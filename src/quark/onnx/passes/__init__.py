"""Graph passes before quantization. A new one is a file here and a line below; each keeps the model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quark.onnx.passes.fold_batch_norm import fold_batch_norm

if TYPE_CHECKING:
    import onnx_ir as ir

PASSES: dict[str, Callable[[ir.Model], int]] = {"fold_batch_norm": fold_batch_norm}
"""Name of the Settings field -> pass; it returns how many places it changed."""

__all__ = ["PASSES"]
