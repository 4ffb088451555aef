"""The tensors of a quantized model under their names in a checkpoint, and folders of safetensors shards.

Names: `<layer>.weight`, then `.weight_scale`, `.weight_zero_point`, `.weight_scale_2`, ..., and the same of input,
output and bias. Shards are planned from shapes alone, and each is filled, written and released before the next, so
memory holds one shard beside the model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.libraries.diffusers import is_network
from quark.core.solvers.hadamard import Rotation
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import NotSupportedError
from quark.torch.checkpoint.loading import (
    StoredTensor,
    empty_activation,
    empty_scale,
    float_dtype,
    stored_like,
    stored_on_meta,
)
from quark.torch.checkpoint.safetensors_file import ByteRange, TensorFile, create_file, write_tensor
from quark.torch.diffusion.component import STEM
from quark.torch.formats import FORMATS, FolderFormat, Format
from quark.torch.formats.format import OF_VALUES
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.layers import ROLES, QuantLayer
from quark.torch.layers.attention.cache_view import CacheQuantize
from quark.torch.layers.attention.heads import holds
from quark.torch.layers.attention.probabilities import attention_quantizers
from quark.torch.layers.base import EXTRA_SUFFIXES
from quark.torch.layers.fake_quant import Extras, FakeQuantize, Mode
from quark.torch.layers.online_rotation import BUFFER, input_rotations, stored_matrix
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.names import OtherForm, published_names
from quark.torch.plan import Plan

Entry = tuple[str, Callable[[], Tensors], Tensors]
"""Name of a source tensor, how to make its stored tensors, and what they will be (on the meta device)."""
Plain = Callable[[str, torch.Tensor], Entry]
"""Makes the entry of a tensor of the model that is not quantized."""
MakeLayout = Callable[[TensorSpec, LayerSpec, torch.dtype], Layout]
"""How a format stores a weight of a layer of such a spec, in a model of such a dtype."""
Naming = Callable[[str, str], str]
"""Name in the file of a source tensor and a suffix."""

EXTRAS = tuple(f"{role}_{suffix}" for role in ROLES for suffix in EXTRA_SUFFIXES)
"""Names of the buffers in which loaded layers hold what is stored beside scales and zero points."""


def entries(
    model: nn.Module,
    pack_method: str,
    real: bool,
    form: Format = FORMATS["quark"],
    only: Container[str] | None = None,
    plain: Plain | None = None,
    forms: Sequence[OtherForm] = (),
) -> Iterator[Entry]:
    """Everything that a checkpoint of the model holds, made when asked for. Tied tensors appear once, but for
    biases of quantized layers.

    Args:
        model: A quantized model.
        pack_method: Order of 4-bit codes in a word.
        real: Store codes; False stores float values that were quantized.
        form: The format.
        only: Names of the source tensors to make entries for, where not all are wanted.
        plain: Makes the entries of tensors that are not quantized; default: of the model's values.
        forms: What of these a file holds in other tensors: one entry for each, under the name of its first member, with
            the names in the file in the place of suffixes.
    """
    layers, inside, plain = quantized_layers(model), attention_quantizers(model), plain or plain_entry
    seen = set[Any]()
    for name, tensor in _outside_quantizers(model, (*layers, *inside), only, forms):
        parent, _, leaf = name.rpartition(".")
        if parent not in layers:
            if not _is_shared(tensor, seen):
                yield plain(name, tensor.detach())
        elif leaf not in EXTRAS:  # of a loaded layer: stored with the tensor that it belongs to
            entry = _coded_entry(
                name, tensor, layers[parent], partial(form.make_layout, pack_method=pack_method, real=real)
            )
            # A float bias is written, shared or not: such a head's config no longer says that it shares.
            yield plain(name, tensor.detach()) if entry is None else entry
    activations = (entry for name, layer in layers.items() for entry in _activation_entries(name, layer, form))
    converted = _converted_entries(model, forms, plain)
    for entry in itertools.chain(converted, activations, _probability_entries(inside, form)):
        if only is None or entry[0] in only:
            yield entry
    for name, rotation in input_rotations(model) if only is None else ():
        yield _rotation_entry(f"{name}.{BUFFER}", rotation)


def _outside_quantizers(
    model: nn.Module, quantized: Iterable[str], only: Container[str] | None, forms: Iterable[OtherForm]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are asked for, but for those of quantizers, which are stored with what these quantize, and for
    those that a file holds in another form.
    """
    apart = {name for form in forms for name in form.members}
    roles = ("", *(f".{role}" for role in ROLES))
    quantizers = {f"{name}{role}_quantizer" for name in quantized for role in roles}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in apart and quantizers.isdisjoint(_modules_around(name)) and (only is None or name in only):
            yield name, tensor


def _modules_around(name: str) -> Iterator[str]:
    """The names of the modules that a tensor lies in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _is_shared(tensor: torch.Tensor, seen: set[Any]) -> bool:
    """Return True where a tensor was seen before; else it is from now on."""
    key = (id(tensor) if tensor.is_meta else tensor.data_ptr(), tensor.shape, tensor.stride())
    is_shared = tensor.numel() > 0 and key in seen
    seen.add(key)
    return is_shared


def plain_entry(name: str, tensor: torch.Tensor) -> Entry:
    """A tensor that is stored as it is."""
    return _entry(name, {"": tensor})


def _entry(name: str, tensors: Tensors) -> Entry:
    return name, lambda: tensors, {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}


def _converted_entries(model: nn.Module, forms: Sequence[OtherForm], plain: Plain) -> Iterator[Entry]:
    """Tensors of a model as the others that a file holds of them."""
    own = model.state_dict(keep_vars=True) if forms else {}
    for form in forms:
        yield _converted_entry(form, [own[name].detach() for name in form.members], plain)


def _converted_entry(form: OtherForm, tensors: list[torch.Tensor], plain: Plain) -> Entry:
    def made(of: list[torch.Tensor]) -> Iterator[tuple[str, Entry]]:
        for file, part in form.convert(of).items():
            yield file, plain(form.files[file], part)

    def make() -> Tensors:
        return {file: entry[1]()[""] for file, entry in made(tensors)}

    shapes = {file: entry[2][""] for file, entry in made([tensor.to("meta") for tensor in tensors])}
    return form.members[0], make, shapes


def _coded_entry(name: str, tensor: torch.Tensor, layer: QuantLayer, make_layout: MakeLayout) -> Entry | None:
    """The weight or bias of a layer, where it is quantized, or is stored in codes already."""
    role, x = name.rpartition(".")[2], tensor.detach()
    quantizer = layer.quantizer(role) if role in ("weight", "bias") else None
    if isinstance(quantizer, FakeQuantize):
        made = make_layout(quantizer.spec, layer.spec, tensor.dtype)
        shapes = dict(stored_on_meta(made, quantizer.spec, tuple(x.shape), x.dtype))
        return name, lambda: made.store(x, quantizer.params, frozen=quantizer.mode is Mode.frozen), shapes
    if isinstance(quantizer, StoredTensor):
        layout = make_layout(quantizer.spec, layer.spec, quantizer.layout.model_dtype)
        return _stored_entry(name, x, quantizer, layer.extras(role), layout)
    return None


def _stored_entry(name: str, x: torch.Tensor, quantizer: StoredTensor, extras: Extras, layout: Layout) -> Entry:
    """A tensor of a loaded checkpoint, stored anew: what is written decodes to the very values that it has now."""

    def make() -> Tensors:
        values = quantizer(x, extras)
        try:
            params = quantizer.params(extras, x)
        except NotSupportedError as error:
            raise NotSupportedError(f"{name}: {error}") from None
        stored = layout.store(values, params, frozen=True)
        if not torch.equal(layout.load(stored, quantizer.shape), values):
            raise NotSupportedError(
                f"{name} ({quantizer.spec}) would not keep its values to the bit: the new format rounds its scales or "
                "zero points. Possible: the quark format, or to quantize the values again (quark convert --requantize)."
            )
        return stored

    return name, make, stored_like(layout, quantizer.spec, quantizer.float_like)


def _probability_entries(quantizers: Mapping[str, FakeQuantize], form: Format) -> Iterator[Entry]:
    """The scales of what attention computes inside, in no layer."""
    for name, quantizer in quantizers.items():
        layout = form.make_layout(quantizer.spec, LayerSpec(), torch.float32, "reorder", True)
        params = quantizer.params
        yield _entry(name, empty_scale(layout) if params is None else layout.store_params(params))


def _rotation_entry(name: str, rotation: Rotation) -> Entry:
    return name, lambda: {"": stored_matrix(rotation)}, {"": stored_matrix(rotation, "meta")}


def _activation_entries(name: str, layer: QuantLayer, form: Format) -> Iterator[Entry]:
    dtype = float_dtype(layer, layer.weight)  # type: ignore[arg-type]
    for role in ("input", "output"):
        quantizer = layer.quantizer(role)
        if not isinstance(quantizer, FakeQuantize) or not quantizer.spec.needs_calibration:
            continue
        layout = form.make_layout(quantizer.spec, layer.spec, dtype, "reorder", True)
        second = quantizer.scale_2 if quantizer.scale_2 is not None else layer.extras(role).get("scale_2")
        if quantizer.spec.dynamic:
            tensors = layout.store_second(torch.empty((), device="meta") if second is None else second)
        elif quantizer.needs_range:
            tensors = empty_activation(layer, role, layout)
        else:
            params, wanted = quantizer.params, empty_activation(layer, role, layout)
            assert params is not None
            # In the shapes of the format. Some store no zero points for symmetric types, which others do.
            if params.zero_point is None and "zero_point" in wanted:
                params = replace(params, zero_point=torch.zeros_like(params.scale))
            tensors = {suffix: x.reshape(wanted[suffix].shape) for suffix, x in layout.store_params(params).items()}
        if form.cache_apart and isinstance(quantizer, CacheQuantize) and holds(name) == "kv":
            tensors = {**tensors, OF_VALUES: tensors["scale"].clone()}
        yield _entry(f"{name}.{role}", tensors)


def predicted_bytes(model: nn.Module, plan: Plan | None, form: Format = FORMATS["quark"]) -> int:
    """Bytes of all tensors of the checkpoint that the plan gives (None: of the float model). Reads no value."""
    specs = plan.layers if plan else {}
    total = 0
    for name, parameter in model.named_parameters():
        parent, _, leaf = name.rpartition(".")
        layer = specs.get(parent, LayerSpec())
        spec = getattr(layer, leaf, None) if leaf in ("weight", "bias") else None
        total += parameter.nbytes if spec is None else stored_bytes(parameter, spec, layer, form)
    return total


def stored_bytes(x: torch.Tensor, spec: TensorSpec, layer: LayerSpec, form: Format = FORMATS["quark"]) -> int:
    """Bytes of a tensor under a spec, with its scales and zero points, in a format. Reads no value."""
    return _bytes_of_shape(tuple(x.shape), x.dtype, spec, layer, form)


@lru_cache(maxsize=1024)
def _bytes_of_shape(
    shape: tuple[int, ...], dtype: torch.dtype, spec: TensorSpec, layer: LayerSpec, form: Format
) -> int:
    tensors = stored_on_meta(form.make_layout(spec, layer, dtype, "reorder", True), spec, shape, dtype)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def names_in_file(
    model: nn.Module,
    form: FolderFormat = FORMATS["quark"],
    specs: Mapping[str, LayerSpec] | None = None,
    as_they_are: Container[str] = (),
    forms: Iterable[OtherForm] = (),
) -> Naming:
    """The names in the file for the tensors of a model: those of its published checkpoints, as the format spells them.

    Args:
        model: The model.
        form: The format.
        specs: Full name of a layer -> what is quantized there; needed by formats other than quark's.
        as_they_are: Names that are no tensors of the model, and are those of the file.
        forms: As for `entries`.

    Raises (the function):
        NotSupportedError: A quantized tensor is published under a name that its scales cannot follow.
    """
    publish, of_layer = published_names(model), specs or {}
    apart = {form.members[0] for form in forms}

    def name_in_file(source: str, suffix: str) -> str:
        if source in apart:
            return suffix
        layer, _, leaf = source.rpartition(".")
        if source in as_they_are:
            return form.stored_name(source, suffix, of_layer.get(layer)) if suffix or layer in of_layer else source
        published = publish(source)
        if layer in of_layer and publish(f"{source}_scale") != f"{published}_scale":
            published = source  # which the loader takes as it is: it renames the weight alone, and not its scale
        if suffix and published.rpartition(".")[2] != leaf:
            raise NotSupportedError(
                f"{source} is {published} in checkpoints, a name beside which transformers finds no scales. Possible: "
                f"leave the layer in float (exclude, --exclude {layer})."
            )
        return form.stored_name(published, suffix, of_layer.get(layer))

    return name_in_file


def create_shards(
    folder: Path, tensors: Tensors, max_shard_size: str = "5GB", keep: bool = False, stem: str = "model"
) -> dict[str, ByteRange]:
    """Make model.safetensors, or shards with an index, for tensors like these; return where each is to be written.

    With `keep` the files are there already, partly filled. `stem` begins their names; see `stem_of`.
    """
    # transformers brings huggingface_hub; it is imported when a checkpoint is really written.
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{stem}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=max_shard_size)
    places: dict[str, ByteRange] = {}
    for file, names in split.filename_to_tensors.items():
        places |= create_file(folder / file, {name: tensors[name] for name in names}, keep)
    if split.is_sharded:
        where = {name: place.file.name for name, place in sorted(places.items())}
        index = {"metadata": {"total_size": sum(p.length for p in places.values())}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return places


def stem_of(model: nn.Module) -> str:
    """How the names of the weight files of a model begin: as its library looks for them."""
    return STEM if is_network(model) else "model"


def stored_shapes(items: Iterable[Entry], named: Naming) -> Tensors:
    """The tensors of the entries under their names in the file, on the meta device."""
    return {named(name, suffix): tensor for name, _, shapes in items for suffix, tensor in shapes.items()}


def write_entry(name: str, tensors: Tensors, places: Mapping[str, ByteRange], named: Naming) -> None:
    """Write the stored tensors of a source tensor to their places."""
    for suffix, tensor in tensors.items():
        write_tensor(tensor, places[named(name, suffix)])


def save_tensors(tensors: Tensors, file: Path, are_weights: bool = True) -> None:
    """Write one safetensors file. Raises OSError, and NonFiniteError as `write_tensor`.

    With `are_weights` False the values may be any: they are states of a run.
    """
    places = create_file(file, tensors)
    for name, tensor in tensors.items():
        write_tensor(tensor, places[name], are_weights)


def read_names(files: list[Path]) -> Iterator[str]:
    """Name of everything in the files. Raises FormatError for a corrupt file."""
    for path in files:
        yield from TensorFile(path).names


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the files, one at a time. Raises FormatError for a corrupt file."""
    for path in files:
        file = TensorFile(path)
        for name in file.names:
            yield name, file.read(name)
