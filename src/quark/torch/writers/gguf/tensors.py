"""The tensors that a GGUF file of a quantized model has, and the file."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.gguf.architectures.architecture import Architecture
from quark.gguf.architectures.rope import rope_tensors
from quark.gguf.architectures.table import architecture_of
from quark.gguf.names import expert_of, part_name
from quark.gguf.types import FLOAT_TYPES, block_type
from quark.gguf.writer import GgufTensor, Header, bytes_before, write_file
from quark.torch.checkpoint.shards import entries
from quark.torch.checkpoint.stored_types import source_folder, stored_plain
from quark.torch.formats.layout import Tensors
from quark.torch.layers import QuantLayer
from quark.torch.layers.replace import quantized_layers
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.further_tokens import further_layers
from quark.torch.writers.gguf.of_model import is_conv1d, tensor_names, tied_weights


def write_gguf(model: Any, file: Path, tokenizer_path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write the file; it appears when all of it is written.

    Args:
        model: A quantized transformers model of one of `ARCHITECTURES`.
        file: The file to make.
        tokenizer_path: Folder that holds the tokenizer.
        overwrite: Replace the file if it is there.
    """
    architecture = architecture_of(getattr(model, "config", None))
    tensors = list(file_tensors(model, architecture))
    write_file(file, _header(model, architecture, Path(tokenizer_path)), tensors, overwrite)
    logger.info("Exported to %s.", file)


def _header(model: Any, architecture: Architecture, tokenizer_path: Path) -> Header:
    return Header(model.config, architecture, tokenizer_path, _stops(model))


def _stops(model: Any) -> list[int]:
    """Tokens that end a generated text, as the model's settings have them."""
    settings = getattr(model, "generation_config", None) or model.config
    found = getattr(settings, "eos_token_id", None)
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]


def bytes_around(model: Any, layers: Iterable[str], tokenizer_path: Path | None) -> int:
    """Bytes of a file beside those of the weights of some layers: reads no value.

    Args:
        model: A float model, on any device.
        layers: Full names.
        tokenizer_path: Folder that holds the tokenizer; None: tensors alone are counted.
    """
    architecture = architecture_of(getattr(model, "config", None))
    chosen = {f"{layer}.weight" for layer in layers}
    size = sum(item.size for name, item in _items_of_layers(model, architecture) if name not in chosen)
    if tokenizer_path is None:
        return size
    tensors = list(file_tensors(model, architecture))
    return size + bytes_before(_header(model, architecture, tokenizer_path), tensors)


def file_tensors(model: nn.Module, architecture: Architecture) -> Iterator[GgufTensor]:
    """The tensors of the file, experts of a block as one. Raises NotSupportedError for one that has no name there."""
    experts: dict[str, list[GgufTensor]] = defaultdict(list)
    for name, item in _items_of_layers(model, architecture):
        if expert_of(name) is None:
            yield item
        else:
            experts[item.name].append(item)
    for name, items in experts.items():
        if len({(item.kind, item.shape) for item in items}) > 1:
            raise NotSupportedError(f"{name}: GGUF holds all experts of a block in one type; here {_kinds(items)}.")
        yield GgufTensor(name, items[0].kind, (len(items), *items[0].shape), partial(_stacked, items))


def _kinds(items: list[GgufTensor]) -> str:
    return ", ".join(sorted({item.kind for item in items}))


def _stacked(items: list[GgufTensor]) -> torch.Tensor:
    return torch.stack([item.make() for item in items])


def _items_of_layers(model: Any, architecture: Architecture) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors under their names in the model, each expert's by itself; those of further layers behind them."""
    layers, left_out = quantized_layers(model), _left_out(model)
    further = further_layers(model, architecture, getattr(model, "quant_plan", None))
    file_name = tensor_names(model, architecture, further.count)
    specs = {name: layer.spec.weight for name, layer in layers.items()} | {**further.specs}
    whole = {name: tuple(layer.float_weight.shape) for name, layer in layers.items()} | {**further.shapes}
    floats = stored_plain(model, source_folder(model), narrow=False)
    own = entries(model, "reorder", True, GgufFormat(), plain=floats)
    for name, make, shapes in itertools.chain((entry for entry in own if entry[0] != left_out), further.entries):
        parent, _, leaf = name.rpartition(".")
        spec = specs.get(parent) if leaf == "weight" else None
        shape = whole[parent] if spec else tuple(shapes[""].shape)
        flipped = is_conv1d(model, name)
        item = _item(model.config, architecture, name, file_name(name), spec, shape, shapes[""].dtype)
        change = _change(architecture, name, model, flipped)
        item = replace(item, shape=item.shape[::-1] if flipped else item.shape, make=partial(_made, make, change))
        for part in _parts(item, [part_name(name, part) for part in architecture.parts(name, model.config)]):
            yield name, part
    for stored, make_factors, size in rope_tensors(model.config):
        yield stored, GgufTensor(stored, "F32", (size,), make_factors)


def _item(
    config: Any,
    architecture: Architecture,
    name: str,
    stored: str | None,
    spec: TensorSpec | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> GgufTensor:
    """A tensor of the file, but for how it is made. Raises NotSupportedError where it has no name or type there."""
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
    return GgufTensor(stored, kind, shape, torch.Tensor)


def _parts(item: GgufTensor, names: list[str]) -> Iterator[GgufTensor]:
    """The tensor, or those that its rows become."""
    if not names:
        yield item
    shape = (item.shape[0] // max(1, len(names)), *item.shape[1:])
    for index, name in enumerate(names):
        yield GgufTensor(name, item.kind, shape, partial(_part, item.make, index, len(names)))


def _part(make: Callable[[], torch.Tensor], index: int, count: int) -> torch.Tensor:
    return make().chunk(count)[index].contiguous()


def _left_out(model: Any) -> str | None:
    """Name of the weight of a tied head that is quantized as the embeddings are: readers compute it with those."""
    tied = tied_weights(model)
    layers = [] if tied is None else [model.get_submodule(name.removesuffix(".weight")) for name in tied]
    if tied is None or not all(isinstance(layer, QuantLayer) for layer in layers):
        return None
    head, embeddings = layers
    same = head.spec.weight == embeddings.spec.weight and torch.equal(head.weight, embeddings.weight)
    return tied[0] if same else None


def _made(make: Callable[[], Tensors], change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return change(make()[""])


def _change(architecture: Architecture, name: str, model: Any, flipped: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What happens to a tensor on its way into the file."""
    order, changed = architecture.row_order(name, model.config), architecture.change(name)
    if order is not None:
        return lambda x: x[order]
    if changed is not None:
        return lambda x: changed.write(x.float(), model.config)
    if architecture.adds_one(name):
        return lambda x: x.float() + 1
    return lambda x: x.t().contiguous() if flipped else x
