"""The tensors of a GGUF file of a denoiser, as tools/convert.py of ComfyUI-GGUF lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.base.progress import progress
from quark.core.checks import naming
from quark.core.spec import block_spec
from quark.errors import NonFiniteError, NotSupportedError
from quark.gguf import MIXES
from quark.gguf.types import FLOAT_TYPES
from quark.gguf.writer import DenoiserHeader, GgufTensor, create_file, header_bytes
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.safetensors_file import ByteRange, write_tensor
from quark.torch.writers.comfyui.names import OriginalTensor
from quark.torch.writers.comfyui.plan import SMALL, PlannedLayer, file_shape
from quark.torch.writers.comfyui.solved import SolvedDenoiser, weight_of
from quark.torch.writers.comfyui.source import DenoiserSource
from quark.torch.writers.gguf.format import GgufLayout

LONGEST_NAME = 127


def write_denoiser(
    source: DenoiserSource,
    mix: str,
    plan: Mapping[str, PlannedLayer],
    file: Path,
    overwrite: bool,
    solved: SolvedDenoiser | None = None,
) -> None:
    """Write a GGUF file; it appears when all of it is written.

    Args:
        source: The denoiser.
        mix: Which the file says it is.
        plan: See `plan_blocks`.
        file: The file to make.
        overwrite: Replace the file if it is there.
        solved: The same, after algorithms, where data were read.

    Raises:
        NotSupportedError: A name is too long for the readers.
        NonFiniteError: A value is no number, or too large for its type; names the tensor.
    """
    tensors = [_tensor(source, tensor, plan) for tensor in source.tensors]
    real = {tensor.name: tuple(source.like(tensor).shape) for tensor in source.tensors}
    shapes = {tensor.name: real[tensor.name] for tensor in tensors if tensor.shape != real[tensor.name]}
    with atomic_file(file, overwrite) as temporary:
        header = DenoiserHeader(source.kind.gguf, MIXES[mix], shapes)
        begins = create_file(temporary, header_bytes(header, tensors), tensors)
        for original, tensor in progress(zip(source.tensors, tensors, strict=True), "write", total=len(tensors)):
            stored = _stored(source, original, tensor.kind, tensor.shape, solved)
            write_tensor(stored, ByteRange(temporary, begins[tensor.name], tensor.size))
    logger.info("Exported to %s.", file)


def _tensor(source: DenoiserSource, tensor: OriginalTensor, plan: Mapping[str, PlannedLayer]) -> GgufTensor:
    if len(tensor.name) > LONGEST_NAME:
        raise NotSupportedError(f"{tensor.name}: names of ComfyUI-GGUF have at most {LONGEST_NAME} letters.")
    layer = plan.get(tensor.name.removesuffix(".weight"))
    if layer is not None and layer.tensor is tensor:
        kind, shape = str(layer.what).upper(), layer.shape
    else:
        kind, shape = _float_type(source, tensor), file_shape(source, tensor)
    return GgufTensor(tensor.name, kind, shape)


def _float_type(source: DenoiserSource, tensor: OriginalTensor) -> str:
    like = source.like(tensor)
    single = any(part in tensor.name for part in source.kind.single)
    if like.dtype == torch.float16:
        return "F16"
    # Of five dimensions: as tools/fix_5d_tensors.py adds them.
    if like.ndim < 2 or like.ndim > 4 or like.numel() <= SMALL or single:
        return "F32"
    return FLOAT_TYPES[torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float16]


def _stored(
    source: DenoiserSource, tensor: OriginalTensor, kind: str, shape: tuple[int, ...], solved: SolvedDenoiser | None
) -> torch.Tensor:
    """The values as they lie in the file."""
    is_block = kind not in FLOAT_TYPES.values()
    layer = None if solved is None or not is_block else solved.layers.get(tensor.name.removesuffix(".weight"))
    if layer is not None:
        x, params, frozen = weight_of(layer)
        return GgufLayout(block_spec(kind.lower()), x.dtype).store(x, params, frozen)[""]
    x = (source.read(tensor) if solved is None else solved.value(source, tensor)).reshape(shape)
    with naming(tensor.name):
        if is_block:
            spec = block_spec(kind.lower())
            return GgufLayout(spec, x.dtype).store(x, tensor_qparams(x, spec))[""]
        x = x.to({name: dtype for dtype, name in FLOAT_TYPES.items()}[kind])
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError(f"values are NaN or infinite as {kind}.")
        return x
