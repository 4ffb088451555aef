"""Writes a denoiser as a safetensors file for ComfyUI, a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.base.progress import progress
from quark.core.checks import naming
from quark.core.spec import LayerSpec
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.safetensors_file import create_file, write_tensor
from quark.torch.writers.comfyui.names import OriginalTensor
from quark.torch.writers.comfyui.plan import PlannedLayer
from quark.torch.writers.comfyui.scaled_layers import is_static, likes, names_of, padded, stored
from quark.torch.writers.comfyui.solved import SolvedDenoiser, input_scale, weight_of
from quark.torch.writers.comfyui.source import DenoiserSource


def write_scaled(
    source: DenoiserSource,
    plan: Mapping[str, PlannedLayer],
    file: Path,
    overwrite: bool,
    solved: SolvedDenoiser | None = None,
) -> None:
    """Write a safetensors file with scales and markers; it appears when all of it is written.

    Args:
        source: The denoiser.
        plan: See `plan_scaled`.
        file: The file to make.
        overwrite: Replace the file if it is there.
        solved: The same, calibrated, where data were read.
    """
    work = [_Written(source, tensor, plan, solved) for tensor in source.tensors]
    made = {name: like for each in work for name, like in each.likes().items()}
    with atomic_file(file, overwrite) as temporary:
        places = create_file(temporary, made)
        for each in progress(work, "tensors", total=len(work)):
            for stored_name, value in each.tensors().items():
                write_tensor(value, places[stored_name])
            source.release(each.tensor)
    logger.info("Exported to %s.", file)


class _Written:
    """A tensor of a source, as a file with scales has it."""

    def __init__(
        self,
        source: DenoiserSource,
        tensor: OriginalTensor,
        plan: Mapping[str, PlannedLayer],
        solved: SolvedDenoiser | None,
    ) -> None:
        self.source, self.tensor, self.solved = source, tensor, solved
        self.name = tensor.name.removesuffix(".weight")
        layer = plan.get(self.name)
        self.layer = None if solved is None else solved.layers.get(self.name)
        what = layer.what if layer is not None and layer.tensor is tensor else None
        assert not isinstance(what, str)
        self.spec: LayerSpec | None = what
        if self.spec is not None and self.layer is None and is_static(self.spec):
            self.spec = replace(self.spec, input=None)  # no layer of the model, whose input nobody measured

    def likes(self) -> dict[str, torch.Tensor]:
        like = self.source.like(self.tensor)
        if self.spec is None:
            return {self.tensor.name: like}
        calibrated = self.layer is not None and input_scale(self.layer) is not None
        return names_of(self.name, likes(tuple(like.shape), self.spec, like.dtype, calibrated))

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.spec is not None and self.layer is not None:
            x, params, frozen = weight_of(self.layer)
            return names_of(self.name, stored(x, params, self.spec, frozen, input_scale(self.layer)))
        x = self.source.read(self.tensor) if self.solved is None else self.solved.value(self.source, self.tensor)
        if self.spec is None:
            return {self.tensor.name: x}
        assert self.spec.weight is not None
        with naming(self.tensor.name):
            x = padded(x, self.spec)
            return names_of(self.name, stored(x, tensor_qparams(x, self.spec.weight), self.spec))
