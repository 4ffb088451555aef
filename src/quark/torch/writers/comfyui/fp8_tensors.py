"""Denoisers that are published as one file in FP8: read as the values that ComfyUI computes with.

    X.weight (float8_e4m3fn)                                     values = codes
    X.weight, X.scale_weight, X.scale_input; scaled_fp8          values = codes * scale_weight
    X.weight, X.weight_scale, X.input_scale, X.comfy_quant       values = codes * weight_scale

The product is computed in float32 and rounded once, to the type of the floats beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from quark.errors import NotSupportedError
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.checkpoint.sources.decode import require_finite
from quark.torch.diffusion.network import VALUES, common_dtype

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("scale_weight", "weight_scale")
BESIDE = (*SCALES, "scale_input", "input_scale", "comfy_quant")
"""Leaves that say something of a weight in FP8 of the same layer."""
MARKER = "scaled_fp8"
"""A tensor without values: the file has scales."""


@dataclass(frozen=True)
class Fp8Tensor:
    """A tensor in FP8 of a file.

    Attributes:
        scale: Name of its scale in the file; None: the codes are the values.
        dtype: In which it is read.
    """

    scale: str | None
    dtype: torch.dtype

    def decode(self, file: TensorFile, name: str) -> torch.Tensor:
        """The values of a tensor of a file. Raises FormatError for NaN or infinity among them."""
        codes = file.read(name)
        scale = None if self.scale is None else file.read(self.scale).float().reshape(())
        values = (codes if scale is None else codes.float().mul_(scale)).to(self.dtype)
        require_finite(name, values)
        return values


def fp8_tensors(file: TensorFile, own: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Fp8Tensor]]:
    """The tensors of a denoiser without what describes others, and how those in FP8 are decoded.

    Args:
        file: That holds it.
        own: Name of a tensor -> its name in the file.

    Raises:
        NotSupportedError: A weight has more than one scale.
    """
    metas = {name: file.meta(stored) for name, stored in own.items() if name.rpartition(".")[2] != MARKER}
    coded = [name for name, x in metas.items() if x.dtype in CODES]
    beside = _described(coded)
    dtype = _type_of_values(x for name, x in metas.items() if name not in beside)
    decoded = {name: Fp8Tensor(own.get(_scale_of(name, metas)), dtype) for name in coded}
    return {name: own[name] for name in metas if name not in beside}, decoded


def _described(coded: Iterable[str]) -> set[str]:
    """The names of what may say something of these tensors in FP8."""
    layers = [name.removesuffix("weight") for name in coded if name.endswith(".weight")]
    return {f"{layer}{leaf}" for layer in layers for leaf in BESIDE}


def _type_of_values(metas: Iterable[torch.Tensor]) -> torch.dtype:
    """The type of most floats among these tensors; bfloat16, in which such models compute, where there are none."""
    floats = [x for x in metas if x.dtype in VALUES]
    return common_dtype(floats) if floats else torch.bfloat16


def _scale_of(name: str, metas: Mapping[str, torch.Tensor]) -> str:
    """The name of the scale of a tensor in FP8; "" where it has none. Raises NotSupportedError as `fp8_tensors`."""
    layer = name.removesuffix("weight") if name.endswith(".weight") else None
    found = [] if layer is None else [f"{layer}{leaf}" for leaf in SCALES if f"{layer}{leaf}" in metas]
    for scale in found:
        if len(found) > 1 or metas[scale].numel() != 1 or metas[scale].dtype not in VALUES:
            raise NotSupportedError(
                f"{name} is {metas[name].dtype} with {scale}, {metas[scale].dtype} of shape "
                f"{tuple(metas[scale].shape)}. Possible: one float scale for each tensor, or none; or the float model."
            )
    return found[0] if found else ""
