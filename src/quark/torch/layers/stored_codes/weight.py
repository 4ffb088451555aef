"""StoredWeight: how the codes of a loaded layer look from outside, as the float tensor that they stand for.

layer.weight.shape, .dtype   of the float tensor
layer.weight + x             the codes are decoded, and nothing is kept of that
layer.weight.data += x       decoded, added, and quantized again into the layer
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


class StoredWeight(torch.Tensor):
    """The weight or bias of a layer that holds codes. It has no memory of its own, and never asks for gradients.

    Args:
        like: A tensor of the shape and dtype that is decoded.
        layer: That holds the codes.
        role: "weight" or "bias".
        coded: The codes, where they lie on another device than those of the layer, for whoever moves its tensors one by
            one.
    """

    # torch and PEFT take it for a parameter, as the weight of a layer is.
    _is_param = True
    layer: Holder
    role: str
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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on what is decoded; what it writes into the first argument is quantized again."""
        first, options = args[0] if args else None, dict(kwargs or {})
        if isinstance(first, StoredWeight) and func in _UNCHANGED:
            coded = first.coded if func is aten.detach.default else _moved(first, options)
            if coded is not None:
                return StoredWeight(first, first.layer, first.role, coded)
        known: dict[int, torch.Tensor] = {}

        def decoded(each: StoredWeight) -> torch.Tensor:
            return known.setdefault(id(each), each.dequantize())

        plain, named = tree_map_only(StoredWeight, decoded, (args, options))
        result = func(*plain, **named)
        if isinstance(first, StoredWeight) and func._schema.is_mutable:
            first.layer.write(first.role, plain[0])
            first.coded = first.layer.codes(first.role)
            return first
        return result

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


def _moved(weight: StoredWeight, options: Mapping[str, Any]) -> torch.Tensor | None:
    """The codes on another device, where no other dtype is asked for."""
    device, same = options.get("device"), options.get("dtype") in (None, weight.dtype)
    return weight.coded.to(device) if same and device is not None and device != weight.device else None
