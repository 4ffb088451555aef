"""The tensors that a GGUF file of a quantized model has, where each lies, and what becomes of its values on the way.

All of it follows from the class of the model and its plan, so that it is known before the first weight is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.rope import rope_tensors
from quark.gguf.architectures.table import architecture_of
from quark.gguf.names import expert_of, part_name
from quark.gguf.types import FLOAT_TYPES, block_type
from quark.gguf.writer import GgufTensor, Header, bytes_before
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import Entry, Plain, entries, plain_entry
from quark.torch.formats.layout import Tensors
from quark.torch.layers import QuantLayer
from quark.torch.layers.replace import quantized_layers
from quark.torch.plan import Plan
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.further_tokens import further_layers
from quark.torch.writers.gguf.of_model import is_conv1d_weight, tensor_names, tied_weights
from quark.torch.writers.writer import Move


@dataclass(frozen=True)
class Placed:
    """A tensor of the model, or all of what an expert has of it, in the file.

    Attributes:
        parts: The tensors of the file that its rows become, in equal shares; of an expert, its share of these.
        move: Its way there.
        expert: Which one of the block it is; None: it is of none.
    """

    parts: list[GgufTensor]
    move: Move
    expert: int | None = None


@dataclass
class FileTensors:
    """The tensors of the file that a model becomes.

    Args:
        model: Of transformers, with quantized layers or without; its weights may be elsewhere.
        plan: How layers beside the model are quantized.
        plain: Makes the entries of tensors that are not quantized.

    Attributes:
        architecture: Of the file.
        beside: Entries of what is written and lies outside the model.
        further: How many blocks of the file lie beside the model.
        left: Names of tensors beside the model that have no place in the file.
        moves: Name of each tensor of the model, and of the entries beside it -> what it is in the file.

    Raises:
        NotSupportedError: A tensor has no name, or no type, in such files.
    """

    model: Any
    plan: Plan | None = None
    plain: Plain = plain_entry
    architecture: Architecture = field(init=False)
    beside: list[Entry] = field(init=False)
    further: int = field(init=False)
    left: tuple[str, ...] = field(init=False)
    moves: dict[str, Placed] = field(init=False)

    def __post_init__(self) -> None:
        self.architecture = architecture_of(getattr(self.model, "config", None))
        self._left_out = _left_out(self.model)
        further = further_layers(self.model, self.architecture, self.plan)
        self.beside, self.further, self.left = list(further.entries), further.count, further.left
        self.moves = {}
        layers = quantized_layers(self.model)
        specs = {name: layer.spec.weight for name, layer in layers.items()} | {**further.specs}
        whole = {name: tuple(layer.float_weight.shape) for name, layer in layers.items()} | {**further.shapes}
        file_name = tensor_names(self.model, self.architecture, further.count)
        experts: dict[str, int] = defaultdict(int)
        for name, _, shapes in (*self.entries(), *further.entries):
            parent, _, leaf = name.rpartition(".")
            spec = specs.get(parent) if leaf == "weight" else None
            shape = whole[parent] if spec else tuple(shapes[""].shape)
            item = _item(self.model.config, self.architecture, name, file_name(name), spec, shape, shapes[""].dtype)
            self.moves[name] = self._placed(name, item, shapes[""].dtype, experts)
        for stored, make, size in rope_tensors(self.model.config):
            self.beside.append((stored, partial(_alone, make), {"": torch.empty(size, device="meta")}))
            self.moves[stored] = Placed([GgufTensor(stored, "F32", (size,))], Move((stored,)))

    def entries(self, only: Container[str] | None = None) -> Iterator[Entry]:
        """Those of the model's tensors, or of these, that are in the file."""
        made = entries(self.model, "reorder", True, GgufFormat(), only, self.plain)
        return (entry for entry in made if entry[0] != self._left_out)

    def listed(self) -> list[GgufTensor]:
        """The tensors of the file in their order, experts of a block as one.

        Raises:
            NotSupportedError: The experts of a block have several types.
        """
        listed = [part for placed in self.moves.values() if placed.expert is None for part in placed.parts]
        experts: dict[str, list[GgufTensor]] = defaultdict(list)
        for placed in self.moves.values():
            for part in placed.parts if placed.expert is not None else ():
                experts[part.name].append(part)
        for name, items in experts.items():
            if len({(item.kind, item.shape) for item in items}) > 1:
                kinds = ", ".join(sorted({item.kind for item in items}))
                raise NotSupportedError(f"{name}: GGUF holds all experts of a block in one type; here {kinds}.")
            listed.append(GgufTensor(name, items[0].kind, (len(items), *items[0].shape)))
        return listed

    def places(self, file: Path, begins: Mapping[str, int]) -> dict[str, ByteRange]:
        """The place of each tensor, or of each expert's share of it.

        Args:
            file: It is in.
            begins: From `create_file`.
        """
        found = {}
        for placed in self.moves.values():
            for key, part in zip(placed.move.keys, placed.parts, strict=True):
                found[key] = ByteRange(file, begins[part.name] + (placed.expert or 0) * part.size, part.size)
        return found

    def _placed(self, name: str, whole: GgufTensor, dtype: torch.dtype, experts: dict[str, int]) -> Placed:
        """Return the form of a tensor in the file.

        Args:
            name: In the model.
            whole: All of it, under the name of its first part.
            dtype: Of what is stored of it in the model.
            experts: Name in the file -> how many experts of it are placed.
        """
        names = [part_name(name, part) for part in self.architecture.parts(name, self.model.config)]
        shape, expert = whole.shape, None
        change = self._change(name)
        if change is torch.t:
            shape = shape[::-1]
        if names:
            shape = (shape[0] // len(names), *shape[1:])
        parts = [GgufTensor(part, whole.kind, shape) for part in names or [whole.name]]
        keys = tuple(part.name for part in parts)
        if expert_of(name) is not None:
            expert, experts[whole.name] = experts[whole.name], experts[whole.name] + 1
            keys = tuple(f"{key}[{expert}]" for key in keys)
        if whole.kind == "F32" and dtype != torch.float32 and change is None:
            change = torch.Tensor.float
        return Placed(parts, Move(keys, self.architecture.row_order(name, self.model.config), change), expert)

    def _change(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the change of the values of a tensor; None where they stay."""
        config, changed = self.model.config, self.architecture.change(name)
        if changed is not None:
            return lambda x: changed.write(x.float(), config)
        if self.architecture.adds_one(name):
            return lambda x: x.float() + 1
        return torch.t if is_conv1d_weight(self.model, name) else None


def _alone(make: Callable[[], torch.Tensor]) -> Tensors:
    return {"": make()}


def header_of(model: Any, architecture: Architecture, tokenizer: Path) -> Header:
    """Return the metadata of a file of a model, with the tokenizer of a folder."""
    settings = getattr(model, "generation_config", None) or model.config
    stops = getattr(settings, "eos_token_id", None)
    listed = list(stops) if isinstance(stops, (list, tuple)) else [] if stops is None else [stops]
    return Header(model.config, architecture, tokenizer, listed)


def bytes_around(model: Any, layers: Iterable[str], tokenizer_path: Path | None) -> int:
    """Bytes of a file beside those of the weights of some layers: reads no value.

    Args:
        model: A float model, on any device.
        layers: Full names.
        tokenizer_path: Folder that holds the tokenizer; None: tensors alone are counted.
    """
    tensors = FileTensors(model, getattr(model, "quant_plan", None))
    chosen = {f"{layer}.weight" for layer in layers}
    size = sum(part.size for name, it in tensors.moves.items() if name not in chosen for part in it.parts)
    if tokenizer_path is None:
        return size
    return size + bytes_before(header_of(model, tensors.architecture, tokenizer_path), tensors.listed())


def _item(
    config: Any,
    architecture: Architecture,
    name: str,
    stored: str | None,
    spec: TensorSpec | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> GgufTensor:
    """A tensor of the model as the file has it. Raises NotSupportedError where it has no name or type there."""
    if spec:
        kind = block_type(spec)
    else:
        # Vectors are float32, as in the files that llama.cpp's own converter makes.
        # So is what chooses experts, of which that of a shared one, a single row, is a vector.
        routes = stored is not None and ".ffn_gate_inp" in stored
        shape = shape[1:] if routes and shape[0] == 1 else shape
        changed = architecture.change(name)
        if changed is not None:
            shape = tuple(changed.write(torch.empty(shape, device="meta"), config).shape)
        plain = len(shape) < 2 or routes or changed is not None
        kind = "F32" if plain else FLOAT_TYPES.get(dtype, "")
    if not kind or stored is None:
        what = "no name" if kind else f"no type for {dtype}"
        raise NotSupportedError(f"{name}: GGUF files of the architecture {architecture.arch!r} have {what}.")
    return GgufTensor(stored, kind, shape)


def _left_out(model: Any) -> str | None:
    """Name of the weight of a tied head that is quantized as the embeddings are: readers compute it with those."""
    tied = tied_weights(model)
    layers = [] if tied is None else [model.get_submodule(name.removesuffix(".weight")) for name in tied]
    if tied is None or not all(isinstance(layer, QuantLayer) for layer in layers):
        return None
    head, embeddings = layers
    # The plan says it, and of a model in memory that was solved its values.
    known = head.weight.is_meta or torch.equal(head.weight, embeddings.weight)
    return tied[0] if known and head.spec.weight == embeddings.spec.weight else None
