"""The tensors of a quantized model under their names in a checkpoint, and folders of safetensors shards.

Names: `<layer>.weight`, then `.weight_scale`, `.weight_zero_point`, `.weight_scale_2`, ..., and the same of input,
output and bias. Shards are planned from shapes alone, and each is filled, written and released before the next, so
memory holds one shard beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quark.core.solvers.hadamard import Rotation
from quark.core.spec import LayerSpec
from quark.errors import FormatError
from quark.log import progress
from quark.torch.attention import probability_quantizers
from quark.torch.fake_quant import FakeQuantize, Mode
from quark.torch.formats import FORMATS, Format
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.formats.quark import QuarkLayout
from quark.torch.layers import ROLES, QuantLayer
from quark.torch.loading import empty_params
from quark.torch.online import BUFFER, input_rotations, stored_matrix
from quark.torch.plan import Plan
from quark.torch.quantizer import quantized_layers

INDEX = "model.safetensors.index.json"
Entry = tuple[str, Callable[[], Tensors], Tensors]
"""Name of a source tensor, how to make its stored tensors, and what they will be (on the meta device)."""


def entries(model: nn.Module, pack_method: str, real: bool, form: Format = FORMATS["quark"]) -> Iterator[Entry]:
    """Everything that a checkpoint of the model holds, made when asked for. Tied tensors appear once.

    Args:
        model: A quantized model.
        pack_method: Order of 4-bit codes in a word.
        real: Store codes; False stores float values that were quantized.
        form: The format.
    """
    layers = quantized_layers(model)
    probabilities = probability_quantizers(model)
    quantizer_names = tuple(f"{name}.{role}_quantizer." for name in layers for role in ROLES)
    quantizer_names += tuple(f"{name}_quantizer." for name in probabilities)
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.startswith(quantizer_names):
            continue
        parent, _, leaf = name.rpartition(".")
        layer = layers.get(parent)
        quantizer = layer.quantizer(leaf) if layer is not None and leaf in ("weight", "bias") else None
        if isinstance(quantizer, FakeQuantize) and layer is not None:
            layout = form.make_layout(quantizer.spec, layer.spec, tensor.dtype, pack_method, real)
            yield _quantized_entry(name, tensor.detach(), quantizer, layout)
            continue
        key = (tensor.data_ptr(), tensor.shape)
        if not tensor.is_meta and tensor.numel() and key in seen:
            continue
        seen[key] = name
        yield plain_entry(name, tensor.detach())
    for name, layer in layers.items():
        yield from _activation_entries(name, layer, form)
    for name, quantizer in probabilities.items():
        assert quantizer.params is not None
        layout = form.make_layout(quantizer.spec, LayerSpec(), torch.float32, "reorder", True)
        yield _entry(name, layout.store_params(quantizer.params))
    for name, rotation in input_rotations(model):
        yield _rotation_entry(f"{name}.{BUFFER}", rotation)


def plain_entry(name: str, tensor: torch.Tensor) -> Entry:
    """A tensor that is stored as it is."""
    return _entry(name, {"": tensor})


def _entry(name: str, tensors: Tensors) -> Entry:
    return name, lambda: tensors, {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}


def _quantized_entry(name: str, x: torch.Tensor, quantizer: FakeQuantize, layout: Layout) -> Entry:
    def make() -> Tensors:
        return layout.store(x, quantizer.params, baked=quantizer.mode is Mode.baked)

    return name, make, layout.store(x.to("meta"), empty_params(quantizer.spec, tuple(x.shape)))


def _rotation_entry(name: str, rotation: Rotation) -> Entry:
    return name, lambda: {"": stored_matrix(rotation)}, {"": stored_matrix(rotation, "meta")}


def _activation_entries(name: str, layer: QuantLayer, form: Format) -> Iterator[Entry]:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    for role in ("input", "output"):
        quantizer = layer.quantizer(role)
        if not isinstance(quantizer, FakeQuantize) or not quantizer.spec.needs_calibration:
            continue
        layout = form.make_layout(quantizer.spec, layer.spec, weight.dtype, "reorder", True)
        if quantizer.spec.dynamic:
            assert quantizer.scale_2 is not None
            tensors = layout.store_second(quantizer.scale_2)
        else:
            assert quantizer.params is not None
            tensors = layout.store_params(quantizer.params)
        yield _entry(f"{name}.{role}", tensors)


def predicted_bytes(model: nn.Module, plan: Plan | None) -> int:
    """Bytes of all tensors of the checkpoint that the plan gives (None: of the float model). Reads no value."""
    specs = plan.layers if plan else {}
    total = 0
    for name, parameter in model.named_parameters():
        parent, _, leaf = name.rpartition(".")
        spec = getattr(specs.get(parent, LayerSpec()), leaf, None) if leaf in ("weight", "bias") else None
        tensors: Tensors = {"": parameter}
        if spec is not None:
            params = empty_params(spec, tuple(parameter.shape))
            tensors = QuarkLayout(spec, parameter.dtype).store(parameter.detach().to("meta"), params)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return total


def stored_name(source: str, suffix: str) -> str:
    """Name in the file: "layer.weight" and "scale" give "layer.weight_scale"."""
    return f"{source}_{suffix}" if suffix else source


def write_shards(
    folder: Path, items: list[Entry], max_shard_size: str = "5GB", named: Callable[[str, str], str] = stored_name
) -> int:
    """Write the entries as model.safetensors, or as shards with an index; return the bytes of all tensors.

    Args:
        folder: Where to.
        items: The entries.
        max_shard_size: Largest file.
        named: Name in the file of a source and a suffix.
    """
    # transformers brings huggingface_hub; it is imported when a checkpoint is really written.
    from huggingface_hub import split_torch_state_dict_into_shards

    meta = {named(name, suffix): t for name, _, shapes in items for suffix, t in shapes.items()}
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    where = {name: file for file, names in split.filename_to_tensors.items() for name in names}
    makers = {named(name, suffix): (name, suffix, make) for name, make, shapes in items for suffix in shapes}
    leftover: Tensors = {}
    for file, names in progress(split.filename_to_tensors.items(), "write", total=len(split.filename_to_tensors)):
        shard = {}
        for stored in names:
            if stored not in leftover:
                source, _, make = makers[stored]
                leftover |= {named(source, suffix): t for suffix, t in make().items()}
            shard[stored] = leftover.pop(stored)
        save_tensors(shard, folder / file)
    total = sum(t.numel() * t.element_size() for t in meta.values())
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def save_tensors(tensors: Tensors, file: Path) -> None:
    """Write one safetensors file. Raises OSError, also where safetensors has an error class of its own."""
    try:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises FormatError if there are none or one is absent."""
    index = folder / INDEX
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise FormatError(f"{folder} holds neither model.safetensors nor {INDEX}.")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"{index} is not a safetensors index: {error}.") from None
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FormatError(f"{index} names {missing[0]}, which is not there.")
    return [folder / name for name in names]


def read_names(files: list[Path]) -> Iterator[str]:
    """Name of everything in the files. Raises FormatError for a corrupt file."""
    for file in files:
        with _opened(file) as handle:
            yield from handle.keys()


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the files, one at a time. Raises FormatError for a corrupt file."""
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                yield name, handle.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file} is corrupt or truncated: {error}.") from None
