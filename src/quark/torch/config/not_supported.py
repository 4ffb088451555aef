"""Documented names whose features are not part of this version: using one says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quark.errors import NotSupportedError


@dataclass(frozen=True)
class RuntimeOptions:
    """Which native kernels a frozen model would use; `ModelQuantizer.freeze` refuses it in this version.

    Attributes:
        native_linear_mode: "auto", "fp8_per_tensor", "mxfp4", "flydsl_a8w4" or "flydsl_svdquant".
        use_preshuffle: Reorder weights for the kernels beforehand.
        svdquant_overlap_streams: Run the low-rank branch beside the main one.
    """

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False


class ModelPruner:
    """Pruning; not in this version."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotSupportedError("ModelPruner: pruning is not part of this version; quark quantizes.")


def enable_native_inference(*args: Any, **options: Any) -> None:
    """Native kernels; not in this version."""
    raise NotSupportedError("enable_native_inference: native kernels are not part of this version.")


def disable_native_inference(*args: Any, **options: Any) -> None:
    """Native kernels; not in this version."""
    raise NotSupportedError("disable_native_inference: native kernels are not part of this version.")


class TPDeviceManager:
    """Tensor parallelism of an evaluation under torchrun; not in this version."""

    @staticmethod
    def tp_mesh_init(*args: Any, **options: Any) -> None:
        """Start the group of devices; not in this version."""
        raise NotSupportedError("TPDeviceManager: tensor parallelism (--use_tp) is not part of this version.")


def _move_quantizer_to_dict(model: object) -> None:
    """Hide the quantizers of a model from tensor parallelism; not in this version."""
    raise NotSupportedError("_move_quantizer_to_dict: tensor parallelism (--use_tp) is not part of this version.")
