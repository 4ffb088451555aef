"""StoredWeight: how the codes of a loaded layer look from outside, as the float tensor that they stand for.

layer.weight.shape, .dtype   of the float tensor
layer.weight + x             the codes are decoded, and nothing is kept of that
layer.weight.data += x       decoded, added, and quantized again into the layer
layer.weight[0].zero_()      likewise, the whole weight with this row
layer.weight.to(device)      the codes there; the tables of a module take them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from quark.base.libraries.transformers import has_values

aten: Any = torch.ops.aten


class Holder(Protocol):
    """A layer that holds codes."""

    def codes(self, role: str) -> torch.Tensor:
        """The codes of its weight or bias."""

    def decoded(self, role: str) -> torch.Tensor:
        """The float tensor that they stand for."""

    def write(self, role: str, values: torch.Tensor) -> None:
        """Quantize new values into the place of the codes."""


class Decoded(torch.Tensor):
    """A tensor without memory, whose values are those that the codes of a layer stand for now. It has no gradient."""

    layer: Holder
    role: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on what is decoded; what it writes is quantized again."""
        options = dict(kwargs or {})
        shared = _shared(func, args, options)
        return _run(func, args, options) if shared is None else shared

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The place of this tensor in the weight or bias of the layer, which is contiguous."""
        return whole.as_strided(self.size(), self.stride(), self.storage_offset())

    def dequantize(self) -> torch.Tensor:
        """The float tensor."""
        return self.within(self.layer.decoded(self.role).contiguous())

    def numpy(self, *, force: bool = False) -> Any:
        """The float values."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The float values."""
        return self.dequantize().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """The float values: a copy belongs to no layer."""
        return self.dequantize().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the float values."""
        return self.dequantize().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class StoredPart(Decoded):
    """A view of the weight or bias of a layer: rows of it, its transpose.

    Args:
        like: A tensor of this shape, at this place of a tensor that is as the whole.
        device: Of the layer.
        layer, role: As for StoredWeight.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, layer: Holder, role: str) -> StoredPart:
        """A tensor without memory; torch asks for one that is made here."""
        made: StoredPart = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=device, requires_grad=False
        )
        made.layer, made.role = layer, role
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """As the float values."""
        return repr(self.dequantize())


class StoredWeight(Decoded):
    """The weight or bias of a layer that holds codes.

    Args:
        like: A tensor of the shape and dtype that is decoded.
        layer: That holds the codes.
        role: "weight" or "bias".
        coded: The codes, where they lie on another device than those of the layer, for whoever moves its tensors one by
            one.
    """

    # torch and PEFT take it for a parameter, as the weight of a layer is.
    _is_param = True
    coded: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor, layer: Holder, role: str, coded: torch.Tensor | None = None) -> StoredWeight:
        """A tensor without memory; torch asks for one that is made here."""
        coded = layer.codes(role) if coded is None else coded
        made: StoredWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=coded.device, requires_grad=False
        )
        made.layer, made.role, made.coded = layer, role, coded
        has_values(made)  # transformers draws values for what has none
        return made

    def dequantize(self) -> torch.Tensor:
        """The float tensor."""
        return self.layer.decoded(self.role)

    @property
    def data(self) -> StoredWeight:
        """Itself: what is written into it reaches the layer. Assigned values are quantized into the layer."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not (isinstance(values, StoredWeight) and values.layer is self.layer and values.role == self.role):
            self.layer.write(self.role, values)
            self.coded = self.layer.codes(self.role)

    def data_ptr(self) -> int:
        """Of the codes: whoever compares memory means theirs."""
        return self.coded.data_ptr()

    def requires_grad_(self, requires_grad: bool = True) -> StoredWeight:
        """Nothing: codes have no gradient, and are not trained."""
        return self

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """The float values: a copy belongs to no layer."""
        return torch.nn.Parameter(self.dequantize().clone(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the float values."""
        return torch.nn.Parameter(self.dequantize(), requires_grad=False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"StoredWeight({tuple(self.shape)}, {self.dtype}, stored as {self.coded.dtype})"


_UNCHANGED: frozenset[Callable[..., Any]] = frozenset({aten.detach.default, aten._to_copy.default})


def _shared(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """A result that stands for codes as the first argument does: a view of it, or itself elsewhere. Else None."""
    first = args[0] if args else None
    if not isinstance(first, Decoded) or func._schema.is_mutable:
        return None
    if isinstance(first, StoredWeight) and func in _UNCHANGED:
        coded = first.coded if func is aten.detach.default else _moved(first, options)
        return None if coded is None else StoredWeight(first, first.layer, first.role, coded)
    if any(each.alias_info for each in func._schema.returns):
        return _view(first, func, args, options)
    return None


def _view(whole: Decoded, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The result of an operator that gives a view, or several, of its first argument; None for one of another dtype."""
    last = sum((n - 1) * step for n, step in zip(whole.size(), whole.stride(), strict=True))
    bare = torch.empty(whole.storage_offset() + max(last, 0) + 1, dtype=whole.dtype, device="meta")
    views = func(whole.within(bare), *args[1:], **options)
    parts = (views,) if isinstance(views, torch.Tensor) else views
    if any(part.dtype != whole.dtype for part in parts):
        return None
    made = [StoredPart(part, whole.device, whole.layer, whole.role) for part in parts]
    return made[0] if isinstance(views, torch.Tensor) else made


def _run(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """The result of an operator on decoded tensors; those that it writes are quantized into their layers."""
    wholes: dict[tuple[int, str], torch.Tensor] = {}

    def decoded(each: Decoded) -> torch.Tensor:
        place = (id(each.layer), each.role)
        if place not in wholes:
            whole = each.layer.decoded(each.role).contiguous()
            wholes[place] = whole.clone() if func._schema.is_mutable else whole
        return each.within(wholes[place])

    plain, named = tree_map_only(Decoded, decoded, (args, dict(options)))
    result = func(*plain, **named)
    written = _written(func, args, options)
    for each in written:
        each.layer.write(each.role, wholes[id(each.layer), each.role])
        if isinstance(each, StoredWeight):
            each.coded = each.layer.codes(each.role)
    return written[0] if written and isinstance(result, torch.Tensor) else result


def _written(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Decoded]:
    """The arguments of an operator that it writes."""
    if not func._schema.is_mutable:
        return []
    given = dict(options) | {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)}
    names = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    found = [given[name] for name in names if name in given]
    leaves = [leaf for each in found for leaf in (each if isinstance(each, (list, tuple)) else (each,))]
    return [leaf for leaf in leaves if isinstance(leaf, Decoded)]


def _moved(weight: StoredWeight, options: Mapping[str, Any]) -> torch.Tensor | None:
    """The codes on another device, where no other dtype is asked for."""
    device, same = options.get("device"), options.get("dtype") in (None, weight.dtype)
    return weight.coded.to(device) if same and device is not None and device != weight.device else None
