"""Which tensor of a checkpoint belongs to which tensor of a model, and whether it can be that: none is taken on trust.

Names, shapes and dtypes are in the header of the file. Of the values only scales and zero points are read, which are
small: a weight stays in its file until it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from quark.base.libraries.transformers import tied_weights
from quark.core.scales import QParams, flaw
from quark.errors import FormatError
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.checkpoint.sources.origins import Parts
from quark.torch.checkpoint.sources.source import check_finite
from quark.torch.formats import Format
from quark.torch.formats.layout import Tensors
from quark.torch.layers import ROLES
from quark.torch.layers.attention.cache_view import CacheQuantize
from quark.torch.layers.attention.heads import holds
from quark.torch.layers.attention.probabilities import attention_quantizers
from quark.torch.layers.base import EXTRA_SUFFIXES
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.layers.online_rotation import BUFFER
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.names import dropped_names, names_in, published_names

HALF = (torch.float16, torch.bfloat16)
_CACHE_SCALE = ".output_quantizer.scale"
_RECOMPUTED = ("rotary_emb.inv_freq", "position_ids")
"""Endings of tensors that old checkpoints hold and models compute."""


def stored_tensors(
    model: nn.Module,
    form: Format,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    partial: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by their names in the model, all of them checked.

    Args:
        model: Its quantized layers hold tensors of the shapes and dtypes that the format stores.
        form: The format.
        tensors: Names in the file and tensors.
        dtype: The dtype of the float model that was quantized, where the checkpoint says it.
        partial: The model may be a part of the one that was saved, or have a head that was not; what is missing or
            left over outside its quantized layers is not looked at.

    Raises:
        FormatError: A tensor is missing, belongs nowhere, comes twice, has another shape or dtype than the format
            stores, or is a scale or zero point that cannot be one. Names it.
    """
    own = dict(model.state_dict(keep_vars=True))
    joint = _joint_scales(model, own)
    find, parts = _finder(model, own, joint), Parts(model, own)
    loaded: dict[str, torch.Tensor] = {}
    left: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for stored, value in tensors:
        if (said := form.said_shape(stored, value)) is not None:
            shapes[find(said[0]) or said[0]] = said[1]
        received = form.received(stored, value)
        if received is None or parts.take(*received):
            continue
        name = find(received[0])
        if name is None:
            left.append(stored)
            continue
        if name in loaded and name in joint.values():
            if not torch.equal(loaded[name], _as_wanted(name, received[1], own[name])):
                raise FormatError(
                    f"{stored} differs from the scale of keys, and {name.removesuffix(_CACHE_SCALE)} makes both: they "
                    "have one scale here."
                )
            continue
        if name in loaded:
            raise FormatError(f"{stored} comes twice in the checkpoint, under two names.")
        loaded[name] = _as_wanted(name, received[1], own[name])
        _check_tensor(stored, loaded[name], own[name], dtype)
    # Where transformers loads the rest, it puts them together itself.
    for name, joined in () if partial else parts.joined():
        loaded[name] = joined
        _check_tensor(name, joined, own[name], dtype)
    _refuse_missing(model, own, loaded, partial)
    _refuse_left(model, left, partial)
    _refuse_other_shapes(model, shapes)
    for tensor, wrong in _flaws(model, loaded):
        raise FormatError(f"{tensor} cannot be read: its {wrong}.")
    return loaded


def _joint_scales(model: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names that the scales of keys and of values would have -> that of the one scale of the layer that makes both."""
    joint: dict[str, str] = {}
    for name in (name for name in own if name.endswith(_CACHE_SCALE)):
        attention, _, leaf = name.removesuffix(_CACHE_SCALE).rpartition(".")
        if holds(leaf) == "kv" and isinstance(model.get_submodule(name.rpartition(".")[0]), CacheQuantize):
            joint |= {f"{attention}.{part}_proj{_CACHE_SCALE}": name for part in "kv"}
    return joint


def name_in(model: nn.Module) -> Callable[[str], str | None]:
    """The function from the name of a tensor in a quark folder to that in a model that holds its layers."""
    own = dict(model.state_dict(keep_vars=True))
    return _finder(model, own, _joint_scales(model, own))


def _finder(model: nn.Module, own: Mapping[str, torch.Tensor], joint: Mapping[str, str]) -> Callable[[str], str | None]:
    """The function from a name in the file to one in the model: its own or its published one, with or without the
    prefix by which transformers tells a model with a head from one without, or that of a composite around it.
    """
    publish, prefix, renamed = published_names(model), getattr(model, "base_model_prefix", ""), names_in(model)
    names = {name: name for name in own} | {publish(name): name for name in own}
    # Other programs store a scale of keys and one of values, whichever layer makes them.
    names |= {form: to for name, to in joint.items() for form in (name, publish(name))}

    def find(stored: str) -> str | None:
        around = (stored.removeprefix(f"{prefix}."), f"{prefix}.{stored}") if prefix else ()
        forms = (stored, *around, renamed(stored))
        return next(filter(None, (_module_name(form, names) for form in forms)), None)

    return find


def _module_name(stored: str, names: Mapping[str, str]) -> str | None:
    """Where a tensor of the file belongs: `weight_scale` is `weight_quantizer.scale` of the module."""
    if stored in names:
        return names[stored]
    for role in (*ROLES, "prob_output"):
        for kind in ("scale", "zero_point"):
            parent, found, rest = stored.rpartition(f".{role}_{kind}")
            candidate = f"{parent}.{role}_quantizer.{kind}"
            if found and not rest and candidate in names:
                return names[candidate]
    return None


def _as_wanted(name: str, stored: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A stored tensor; one scale or zero point in the shape that the model has for it, and integers in its dtype.

    Programs write the one scale of a tensor as a scalar, as a vector or as a matrix of one value, and zero points as
    int32 where the codes are int8.
    """
    leaf = name.rpartition(".")[2]
    integers = not (stored.is_floating_point() or wanted.is_floating_point())
    wider = integers and stored.dtype.itemsize > wanted.dtype.itemsize
    if leaf == "zero_point" and wider and not stored.is_meta:
        narrow = stored.to(wanted.dtype)
        stored = narrow if torch.equal(narrow.to(stored.dtype), stored) else stored
    return stored.reshape(wanted.shape) if leaf != "weight" and stored.numel() == wanted.numel() == 1 else stored


def _check_tensor(name: str, stored: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Check the shape and the dtype of a tensor of the file."""
    if stored.shape != wanted.shape:
        raise FormatError(
            f"{name} has shape {tuple(stored.shape)} in the checkpoint; the model needs {tuple(wanted.shape)}."
        )
    if _fits(stored.dtype, wanted.dtype, dtype):
        return
    if not is_wide(stored.dtype) and is_wide(wanted.dtype) and name.endswith(".weight"):
        raise FormatError(f"{name} holds codes ({stored.dtype}), and the checkpoint has no scale for them.")
    raise FormatError(f"{name} is {stored.dtype} in the checkpoint; {wanted.dtype} is needed.")


def _fits(stored: torch.dtype, wanted: torch.dtype, dtype: torch.dtype | None) -> bool:
    """Return True where a tensor of a file fits a model: in the type it has there, or a float at least as wide.

    Of the two half types only that which the model was saved in: bits of one read as the other are other numbers.
    """
    if stored == wanted or not (is_wide(stored) and is_wide(wanted)):
        return stored == wanted
    return stored not in HALF or dtype is None or stored == dtype or dtype not in HALF


def is_wide(dtype: torch.dtype) -> bool:
    """Return True where a float type holds values, not codes."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _refuse_missing(
    model: nn.Module, own: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor], partial: bool
) -> None:
    # Tied parameters are one, of which one name is enough.
    there = {id(own[name]) for name in loaded} | {_place(own[name]) for name in loaded}
    absent = [name for name, x in own.items() if name not in loaded and id(x) not in there and _place(x) not in there]
    if partial:
        tied = tied_weights(model)
        holders = tuple(f"{name}." for name in quantized_layers(model))
        holders += tuple(f"{name}_quantizer." for name in attention_quantizers(model))
        absent = [name for name in absent if name not in tied and name.startswith(holders)]
    if absent:
        ends = ("_quantizer.scale", "_scale"), ("_quantizer.zero_point", "_zero_point")
        names = [name.replace(*ends[0]).replace(*ends[1]) for name in absent]
        raise FormatError(f"The checkpoint lacks {len(names)} tensors of the model: {', '.join(names[:5])}.")


def _place(x: torch.Tensor) -> tuple[str, int]:
    """Where the values of a tensor lie; a place of its own for one without values."""
    return ("memory", x.data_ptr()) if x.data_ptr() else ("object", id(x))


def _refuse_other_shapes(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse codes beside which the file says another shape than the model's weight has."""
    for name, layer in quantized_layers(model).items():
        stored_as, said = layer.quantizer("weight"), shapes.get(f"{name}.weight")
        if isinstance(stored_as, StoredTensor) and said not in (None, tuple(stored_as.shape)):
            raise FormatError(
                f"{name}.weight is said to have shape {said} beside its codes; the model needs "
                f"{tuple(stored_as.shape)}."
            )


def _refuse_left(model: nn.Module, left: list[str], partial: bool) -> None:
    """Refuse tensors that nothing takes, but those that the class of the model leaves out by design."""
    by_design = set(dropped_names(model, left))
    names = [name for name in left if name not in by_design and not name.endswith(_RECOMPUTED)]
    if partial:
        modules, renamed = {name for name, _ in model.named_modules() if name}, names_in(model)
        names = [name for name in names if not modules.isdisjoint({_layer_of(name), _layer_of(renamed(name))})]
    if names:
        raise FormatError(f"The checkpoint holds {len(names)} tensors that nothing takes: {', '.join(names[:5])}.")


def _layer_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _flaws(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Tensors whose stored parameters cannot be such, and what is wrong with them."""
    quantizers: dict[str, nn.Module | None] = dict(attention_quantizers(model))
    for name, layer in quantized_layers(model).items():
        quantizers |= {f"{name}.{role}": layer.quantizer(role) for role in ROLES}
    for name, quantizer in quantizers.items():
        places = {"": name, "scale": f"{name}_quantizer.scale", "zero_point": f"{name}_quantizer.zero_point"}
        places |= {suffix: f"{name}_{suffix}" for suffix in EXTRA_SUFFIXES}
        found = {suffix: loaded[place] for suffix, place in places.items() if place in loaded}
        if isinstance(quantizer, StoredTensor):
            wrong = quantizer.layout.flaw(found, quantizer.shape)
        elif isinstance(quantizer, FakeQuantize) and found.keys() - {""}:
            wrong = _flaw_of_activation(found, quantizer)
        else:
            continue
        if wrong:
            yield name, wrong
    for name, tensor in loaded.items():
        if name.endswith(f".{BUFFER}") and not _is_rotation(tensor):
            yield name, "rows are not orthogonal, as those of a rotation are"
        else:
            check_finite(name, tensor)


def _flaw_of_activation(found: Tensors, quantizer: FakeQuantize) -> str | None:
    """Scales of live tensors are stored as they are."""
    spec = quantizer.spec
    second = QParams(found["scale_2"].float()) if "scale_2" in found else None
    if "scale" not in found:
        return flaw(second, spec.scale_spec) if second and spec.scale_spec else None
    zero = found.get("zero_point")
    return flaw(QParams(found["scale"].float(), zero if zero is None else zero.float(), second), spec)


def _is_rotation(stored: torch.Tensor) -> bool:
    """Return True where the rows of a matrix are orthogonal and of one length, by what M M^T makes of a vector."""
    matrix = stored.double()
    probe = torch.linspace(1, 2, len(matrix), dtype=torch.float64, device=matrix.device)
    scaled = matrix @ (matrix.T @ probe) / matrix[0].square().sum()
    # 2^-7: what bfloat16 leaves of the entries, where a writer rounded them.
    return bool(((scaled - probe).abs() <= 2**-7 * probe.abs()).all())
