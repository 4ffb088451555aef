"""Writes a quantized model as one GGUF file. One tensor is in memory beside the model."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.base.progress import progress
from quark.core.array import to_numpy
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.torch.checkpoint.shards import entries
from quark.torch.checkpoint.stored_types import source_folder, stored_plain
from quark.torch.config.block_mixes import MIXES, Mix, place_of
from quark.torch.formats.layout import Tensors
from quark.torch.layers import QuantLayer
from quark.torch.layers.replace import quantized_layers
from quark.torch.writers.gguf.architectures.architecture import Architecture
from quark.torch.writers.gguf.architectures.metadata import write_hyperparameters
from quark.torch.writers.gguf.architectures.rope import rope_tensors
from quark.torch.writers.gguf.architectures.table import architecture_of
from quark.torch.writers.gguf.blocks import FLOAT_TYPES, GgufFormat, block_type
from quark.torch.writers.gguf.further_tokens import further_layers
from quark.torch.writers.gguf.names import block_of, expert_of, import_gguf, part_name, tensor_names
from quark.torch.writers.gguf.tokenizer import write_tokenizer

OTHER_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
"""Type of most values in the matrices of the blocks -> general.file_type, where it is not MOSTLY_ and the type."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: name, type, shape in values, and how its bytes are made."""

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_gguf(model: Any, file: Path, tokenizer_path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write the file; it appears when all of it is written.

    Args:
        model: A quantized transformers model of one of `ARCHITECTURES`.
        file: The file to make.
        tokenizer_path: Folder that holds the tokenizer.
        overwrite: Replace the file if it is there.
    """
    gguf = import_gguf()
    architecture = architecture_of(getattr(model, "config", None))
    items = list(file_items(model, architecture))
    with atomic_file(file, overwrite) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture.arch)
        try:
            _write_header(writer, model, architecture, items, Path(tokenizer_path))
            for item in progress(items, "write", total=len(items)):
                writer.write_tensor_data(_bytes(item))
        finally:
            writer.close()
    logger.info("Exported to %s.", file)


def bytes_around(model: Any, layers: Iterable[str], tokenizer_path: Path | None) -> int:
    """Bytes of a file beside those of the weights of some layers: reads no value.

    Args:
        model: A float model, on any device.
        layers: Full names.
        tokenizer_path: Folder that holds the tokenizer; None: tensors alone are counted.
    """
    gguf, architecture = import_gguf(), architecture_of(getattr(model, "config", None))
    chosen = {f"{layer}.weight" for layer in layers}
    size = sum(_size(item) for name, item in _items_of_layers(model, architecture) if name not in chosen)
    if tokenizer_path is None:
        return size
    items = list(file_items(model, architecture))
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "header.gguf", architecture.arch)
        try:
            _write_header(writer, model, architecture, items, tokenizer_path)
        finally:
            writer.close()
        # Each tensor begins at a multiple of the alignment, and so does the first.
        header = sum(file.stat().st_size for file in Path(folder).iterdir())
    return size + header + gguf.GGUF_DEFAULT_ALIGNMENT * (len(items) + 1)


def file_items(model: nn.Module, architecture: Architecture) -> Iterator[GgufTensor]:
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


def tied_weights(model: Any) -> tuple[str, str] | None:
    """Names of the weights of head and embeddings where the model ties them."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    names = {module: name for name, module in model.named_modules()}
    return f"{names[model.get_output_embeddings()]}.weight", f"{names[model.get_input_embeddings()]}.weight"


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


def is_conv1d(model: nn.Module, name: str) -> bool:
    """Whether a tensor is the weight of transformers' Conv1D, a linear layer whose weight is (I, O)."""
    parent, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return False
    try:
        return type(model.get_submodule(parent)).__name__ == "Conv1D"
    except AttributeError:  # a layer that lies beside the model
        return False


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


def _name(model: Any, folder: Path) -> str:
    """What a reader shows: the name of the folder or of the repository that the model came from."""
    source = str(getattr(model.config, "_name_or_path", "") or folder.resolve())
    return source.rstrip("/").rpartition("/")[2]


def _file_type(items: list[GgufTensor], config: Any) -> str:
    """The name in gguf.LlamaFileType: of the mix whose rules give these types, or of the main type."""
    main = _main_type(items)
    if main in OTHER_FILE_TYPES:
        return OTHER_FILE_TYPES[main]
    # Mixes of one base differ in what they make wider; the file has the name of the one that it is nearest to.
    alike = [mix for mix in MIXES.values() if mix.base.upper() == main]
    places = [(place_of(item.name, item.shape[-1], config), item.kind) for item in items if len(item.shape) == 2]

    def strange(mix: Mix) -> int:
        return sum((mix.type_of(place) or kind).upper() != kind for place, kind in places)

    return f"MOSTLY_{min(alike, key=strange).file_type if alike else main}"


def _main_type(items: list[GgufTensor]) -> str:
    """The type of most values in the matrices of the blocks."""
    counts = Counter[str]()
    for item in items:
        if len(item.shape) > 1 and item.name.startswith("blk."):
            counts[item.kind] += int(np.prod(item.shape))
    return max(counts, key=lambda kind: counts[kind])


def _write_header(
    writer: Any, model: Any, architecture: Architecture, items: list[GgufTensor], tokenizer_path: Path
) -> None:
    """All that comes before the bytes of the tensors."""
    gguf = import_gguf()
    writer.add_file_type(int(getattr(gguf.LlamaFileType, _file_type(items, model.config))))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    blocks = {block for item in items if (block := block_of(item.name)) is not None}
    write_hyperparameters(writer, architecture, model.config, sum(b >= model.config.num_hidden_layers for b in blocks))
    name = _name(model, tokenizer_path)
    write_tokenizer(writer, tokenizer_path, model.config.vocab_size, _stops(model), name)
    for item in items:
        kind = gguf.GGMLQuantizationType[item.kind]
        writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), _size(item), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _stops(model: Any) -> list[int]:
    """Tokens that end a generated text, as the model's settings have them."""
    settings = getattr(model, "generation_config", None) or model.config
    found = getattr(settings, "eos_token_id", None)
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]


def _size(item: GgufTensor) -> int:
    """Bytes of a tensor."""
    gguf = import_gguf()
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[item.kind]]
    return int(np.prod(item.shape)) // int(values) * int(size)


def _bytes(item: GgufTensor) -> np.ndarray[Any, Any]:
    tensor = item.make().detach().cpu()
    if item.kind == "F32":
        return to_numpy(tensor.float().contiguous())
    if item.kind == "BF16":
        tensor = tensor.contiguous().view(torch.uint8)
    return to_numpy(tensor.contiguous())
