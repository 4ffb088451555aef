"""Documented names whose features are not part of this version: using one says so."""

from __future__ import annotations

from typing import Any

from quark.errors import NotSupportedError


class ModelPruner:
    """Pruning; not in this version."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotSupportedError("ModelPruner: pruning is not part of this version; quark quantizes.")


def export_llama_cpp_gguf(*args: Any, **options: Any) -> None:
    """A folder in AMD Quark's format as a GGUF file of llama.cpp's block types; not in this version."""
    raise NotSupportedError(
        "export_llama_cpp_gguf is not part of this version. Possible: `quark quantize MODEL --for llama.cpp`, or "
        "export_gguf for a model of 4 bits in groups of 32."
    )


def list_llama_cpp_export_formats() -> list[str]:
    """The block types of export_llama_cpp_gguf; not in this version."""
    export_llama_cpp_gguf()
    return []


class TPDeviceManager:
    """Tensor parallelism of an evaluation under torchrun; not in this version."""

    @staticmethod
    def tp_mesh_init(*args: Any, **options: Any) -> None:
        """Start the group of devices; not in this version."""
        raise NotSupportedError("TPDeviceManager: tensor parallelism (--use_tp) is not part of this version.")


def _move_quantizer_to_dict(model: object) -> None:
    """Hide the quantizers of a model from tensor parallelism; not in this version."""
    raise NotSupportedError("_move_quantizer_to_dict: tensor parallelism (--use_tp) is not part of this version.")
