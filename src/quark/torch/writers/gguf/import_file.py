"""Reads a GGUF file back into a float model of the same architecture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.core.array import row_chunks
from quark.core.blocks.block_types import BLOCK_TYPES
from quark.core.spec import LayerSpec, TensorSpec
from quark.core.spec import spec as make_spec
from quark.errors import FormatError, NonFiniteError
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.rope import rope_tensors
from quark.gguf.architectures.table import architecture_of
from quark.gguf.block_bytes import halves_of
from quark.gguf.hyperparameters import refuse_other_config
from quark.gguf.names import block_of, expert_of, import_gguf, part_name
from quark.gguf.reader import open_gguf, release_pages
from quark.gguf.types import CASTS, SPECS
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.importer import load_stored
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats import Stored
from quark.torch.formats.format import Named
from quark.torch.layers import layer_class
from quark.torch.model.blocks.offloading import with_weights
from quark.torch.model.passes import undo
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.writers.gguf.format import GgufFormat, GgufLayout
from quark.torch.writers.gguf.of_model import is_conv1d_weight, tensor_names, tied_weights

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def import_model_from_gguf(model: nn.Module, file: str | os.PathLike[str]) -> nn.Module:
    """Load a GGUF file of `export_gguf` (or of another program) into the float model that it is of.

    Args:
        model: The float transformers model; its layers are replaced in place, and on any error it is as it was.
        file: The file.

    Returns:
        The model, computing with the blocks of the file.

    Raises:
        FormatError: The file is no GGUF file, is of another model, or holds a block type that is not known here.
        NotSupportedError: The architecture has no row in `ARCHITECTURES`.
    """
    path = Path(file)
    return import_opened(model, path, open_gguf(path))


@own_arithmetic()
@with_weights
def import_opened(model: nn.Module, path: Path, reader: Any) -> nn.Module:
    """The model with the values of a GGUF file that is open, its layers quantized as the file has them."""
    config, values = _contents(model, path, reader)
    load_stored(model, GgufFormat(), Stored(config), ((value.name, value.read()) for value in values))
    return model


def import_lazily(model: nn.Module, file: Path) -> dict[str, InGguf]:
    """Let a float model without weights have the layers of a GGUF file; matrices stay in the file.

    Each tensor is read once, so that what is wrong with it is known. Raises as `import_model_from_gguf`.

    Returns:
        Name of a tensor of the model that is left on the meta device -> where it lies.
    """
    reader = open_gguf(file)
    config, values = _contents(model, file, reader)
    left: dict[str, InGguf] = {}

    def tensors() -> Iterator[Named]:
        own = set(model.state_dict())  # with the layers of the file: they are there when the first tensor is asked for
        for value in values:
            x = value.read()
            if x.ndim > 1 and value.name in own:
                left[value.name] = InGguf(value, reader)
                x = x.to("meta")
                release_pages(reader)
            yield value.name, x

    load_stored(model, GgufFormat(), Stored(config), tensors())
    return left


@dataclass(frozen=True)
class InGguf:
    """A tensor that lies in a GGUF file, which is mapped."""

    value: TensorReader
    reader: Any

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """Its values or blocks, as a model that was loaded at once has them."""
        return self.value.read()

    def release(self) -> None:
        """Give back the memory of what was read of the file."""
        release_pages(self.reader)


def _contents(model: nn.Module, path: Path, reader: Any) -> tuple[QConfig, list[TensorReader]]:
    """Return the config of the layers of a model in a file, and the file's tensors."""
    architecture = architecture_of(getattr(model, "config", None))
    named = named_tensors(path, reader, model, architecture)
    refuse_other_config(path, reader, model.config, "of the model. Possible: the float model that the file is of.")
    config = _config(model, named)
    # The values are made while the model changes: what they depend on is known before.
    return config, [
        TensorReader(model, architecture, name, tensor, coded=is_coded(name, config)) for name, tensor in named.items()
    ]


def is_coded(name: str, config: QConfig) -> bool:
    """True for a tensor of a model that is a weight which a config quantizes."""
    parent, _, leaf = name.rpartition(".")
    return leaf == "weight" and parent in config.layer_quant_config


def named_tensors(file: Path, reader: Any, model: Any, architecture: Architecture) -> dict[str, Any]:
    """Name in the model, in which each expert has its own, -> the tensor of the file that holds it, of its shape."""
    field = reader.get_field("general.architecture")
    if (found := field.contents() if field else None) != architecture.arch:
        raise FormatError(f"{file} has the architecture {found!r}, but the model needs {architecture.arch!r}.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = _linear_shapes(model)
    name_of = tensor_names(model, architecture)
    # Not every parameter has a name there: a head that is always tied has none.
    names = {name: name_of(name) for name in shapes}
    if tied := tied_weights(model):
        head, embeddings = tied
        if names.get(head) not in tensors:  # the head is computed with the embeddings
            names[head] = names[embeddings]
    named = {}
    for name, stored in names.items():
        if stored in tensors:
            parts = [part_name(name, part) for part in architecture.parts(name, model.config)]
            named[name] = _joined(name, [tensors.get(part) for part in parts]) if parts else tensors[stored]
    _refuse_unread(file, model, names, tensors, architecture)
    for name, tensor in named.items():
        change, expected = architecture.change(name), shapes[name]
        if change is not None:
            expected = tuple(change.write(torch.empty(expected, device="meta"), model.config).shape)
        _check_shape(file, tensor, name, expected)
    return named


def _linear_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, each expert's by its own name, and weights of Conv1D (O, I) as those of Linear."""
    originals = unfuse_experts(model, lambda name: True)
    try:
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return {name: shape[::-1] if is_conv1d_weight(model, name) else shape for name, shape in shapes.items()}
    finally:
        undo(model, originals)


def _check_shape(file: Path, tensor: Any, name: str, expected: tuple[int, ...]) -> None:
    """Raise FormatError for a tensor of another shape than the model's; a single row may be a vector."""
    stored = tuple(int(size) for size in reversed(tensor.shape))
    expert = expert_of(name)
    one = stored if expert is None else stored[1:] if expert < stored[0] else ()
    if one != expected and (1, *one) != expected:
        raise FormatError(f"{file}: {tensor.name} has the shape {stored}, and {name} of the model {expected}.")


def _refuse_unread(
    file: Path, model: Any, names: Mapping[str, str | None], tensors: Mapping[str, Any], architecture: Architecture
) -> None:
    """Raise FormatError for tensors that the model has no place for: it would compute something else."""
    read = {*names.values(), *(name for name, _, _ in rope_tensors(model.config))}
    for name in names:
        read |= {part_name(name, part) for part in architecture.parts(name, model.config)}
    # Blocks after the last one predict further tokens; the model itself does without.
    blocks = model.config.num_hidden_layers
    unread = [name for name in tensors if name not in read and (block_of(name) or 0) < blocks]
    if unread:
        raise FormatError(
            f"{file} holds {len(unread)} tensors that this {model.config.model_type} model has no place for, "
            f"{unread[0]} the first: its config differs from that of the file."
        )


class TensorReader:
    """One tensor of the file, read under the model's name, with what the architecture changes undone.

    Args:
        model: Of transformers, with its experts apart; without weights, too.
        architecture: Its Architecture.
        name: Of the tensor in the model.
        tensor: Of the file.
        coded: Whether the bytes of blocks are wanted, and not their values.
    """

    def __init__(self, model: Any, architecture: Architecture, name: str, tensor: Any, coded: bool = False) -> None:
        self.name = name
        self.tensor = tensor
        self.adds_one, self.change = architecture.adds_one(name), architecture.change(name)
        self.order = architecture.row_order(name, model.config)
        self.flipped = not coded and is_conv1d_weight(model, name)
        self.expert = expert_of(name)
        # What is left in float of an expert, its biases, has the dtype of all: it is in one tensor with others here.
        value = None if coded or self.expert is not None else value_of(model, name)
        self.dtype = None if coded else model.dtype if value is None else value.dtype
        self.shape: tuple[int, ...] | None = None
        if value is not None:  # a row of its own may be a vector in the file
            stored = tuple(int(size) for size in reversed(tensor.shape))
            equal = self.change is not None and math.prod(stored) == value.numel()
            self.shape = tuple(value.shape) if equal or (1, *stored) == tuple(value.shape) else stored

    @property
    def is_exact(self) -> bool:
        """True where the values that a model had are read back to the bit."""
        return self.change is None or self.change.exact

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor: values in a dtype, by default that of the model; or the bytes of a coded weight.

        Raises:
            FormatError: The type of its blocks is not known.
            NonFiniteError: A value, or the scale of a block, is NaN or infinite.
        """
        dtype, kind, value = dtype or self.dtype, self.tensor.tensor_type.name, self._stored()
        if self.dtype is not None and kind not in DTYPES:
            assert dtype is not None
            try:
                value = decoded_rows(value, kind, dtype)
            except FormatError as error:
                raise FormatError(f"{self.tensor.name} of the file: {error}") from None
        if self.adds_one:
            value = value - 1
        if self.change is not None:
            value = self.change.read(value)
        if self.shape is not None:
            value = value.reshape(self.shape)
        if self.dtype is not None:
            value = value.to(dtype)
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError(f"{self.tensor.name} of the file has values that no {dtype} holds.")
        return value.t().contiguous() if self.flipped else value

    def _stored(self) -> torch.Tensor:
        """The numbers of the file, or bytes of blocks, with rows in the order of the model. Raises NonFiniteError."""
        parts = self.tensor.parts if isinstance(self.tensor, _Joined) else [self.tensor]
        data = [part.data if self.expert is None else part.data[self.expert] for part in parts]
        value = torch.from_numpy((data[0] if len(data) == 1 else np.concatenate(data)).copy())
        kind = self.tensor.tensor_type.name
        if kind == "BF16":
            value = value.view(torch.bfloat16)
        if kind in (*DTYPES, *SPECS) and not _is_finite(value, kind):
            raise NonFiniteError(
                f"{self.tensor.name} of the file, {self.name} of the model, has NaN or infinite values."
            )
        return value if self.order is None else value[torch.argsort(self.order)]


PIECE = 1 << 22
"""Values that are decoded at once, in float32."""


def decoded_rows(stored: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The values of blocks, each rounded once, from float32 to a dtype.

    Args:
        stored: uint8 (..., bytes of a row).
        kind: Name of the type.
        dtype: Of the result.

    Raises:
        FormatError: The type is not known.
    """
    gguf = import_gguf()
    which = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[which]
    rows = stored.reshape(-1, stored.shape[-1])
    columns = rows.shape[1] // int(size) * int(block)
    out = torch.empty(rows.shape[0], columns, dtype=dtype)
    for piece in row_chunks(rows.shape[0], columns, PIECE):
        some = rows[piece]
        if kind in SPECS:
            values = GgufLayout(SPECS[kind], torch.float32).load({"": some}, (some.shape[0], columns))
        else:
            try:
                with np.errstate(all="ignore"):  # what is no number is refused by those who ask
                    values = torch.from_numpy(gguf.quants.dequantize(some.numpy(), which))
            except NotImplementedError:
                raise FormatError(f"Blocks of the type {kind} cannot be decoded.") from None
        out[piece] = values.to(dtype)
    return out.reshape(*stored.shape[:-1], columns)


def _is_finite(value: torch.Tensor, kind: str) -> bool:
    """Return True where a tensor's values are numbers, as far as its bytes alone tell: scales of blocks are."""
    if kind in DTYPES:
        return bool(torch.isfinite(value).all())
    size = int(import_gguf().GGML_QUANT_SIZES[import_gguf().GGMLQuantizationType[kind]][1])
    blocks = value.reshape(-1, size)
    if kind == "MXFP4":
        return not bool((blocks[:, 0] == 255).any())
    starts = halves_of(BLOCK_TYPES[kind.lower()])
    return all(bool(torch.isfinite(blocks[:, at : at + 2].contiguous().view(torch.float16)).all()) for at in starts)


def value_of(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer of a model."""
    parent, _, leaf = name.rpartition(".")
    value: torch.Tensor = getattr(model.get_submodule(parent), leaf)
    return value


@dataclass(frozen=True)
class _Joined:
    """Tensors of a file whose rows are one tensor in the model, as one of gguf.ReaderTensor."""

    name: str
    parts: list[Any]
    tensor_type: Any
    shape: Any


def _joined(name: str, parts: list[Any]) -> _Joined:
    rows = -1 if expert_of(name) is None else -2  # shapes are from the last axis to the first, that of experts
    kinds, shapes = [], []
    for part in parts:
        shape = [] if part is None else part.shape.tolist()
        kinds.append(None if part is None else (part.tensor_type, *shape[:rows], *shape[len(shape) + rows + 1 :]))
        shapes.append(shape)
    if None in kinds or len(set(kinds)) > 1:
        raise FormatError(
            f"{name} needs {len(parts)} tensors of the file. One of them is missing, or has another type or shape."
        )
    whole = list(shapes[0])
    whole[rows] = sum(int(shape[rows]) for shape in shapes)
    return _Joined(name, parts, parts[0].tensor_type, whole)


def _config(model: nn.Module, named: dict[str, Any]) -> QConfig:
    """Each layer with the spec of its block type."""
    layers = {}
    for name, tensor in named.items():
        parent, _, leaf = name.rpartition(".")
        kind = tensor.tensor_type.name
        # Blocks are in a layer whatever its class: a Conv1D becomes one while the model is prepared.
        plain = (
            kind in DTYPES
            and expert_of(name) is None
            and (
                kind == "F32"
                or DTYPES[kind] == value_of(model, name).dtype
                or not layer_class(model.get_submodule(parent))
            )
        )
        known = expert_of(name) is not None or is_conv1d_weight(model, name) or layer_class(model.get_submodule(parent))
        if kind not in DTYPES and (leaf != "weight" or not known):
            raise FormatError(f"{tensor.name} has the type {kind}, and the model has {name} in float alone.")
        if leaf != "weight" or plain:
            continue
        layers[parent] = config_of_layer(LayerSpec(weight=_spec(name, kind)))
    return QConfig(global_quant_config=config_of_layer(LayerSpec()), layer_quant_config=layers)


def _spec(name: str, kind: str) -> TensorSpec:
    casts = {gguf_name: dtype for dtype, gguf_name in CASTS.items()}
    if kind in casts:
        return make_spec(casts[kind], observer="placeholder")
    if kind not in SPECS:
        raise FormatError(f"{name} has the block type {kind}, which cannot be imported; possible: {', '.join(SPECS)}.")
    return SPECS[kind]
