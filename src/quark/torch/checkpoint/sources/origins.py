"""Where each tensor of a model lies in a checkpoint folder, and how it is made of what lies there.

A tensor is one of the folder; or, as transformers' conversions say, several of them merged; or a part of a fused tensor
of experts that a pass has taken apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from quark.base.libraries.transformers import order_of_parts
from quark.torch.checkpoint.sources.source import Source
from quark.torch.model.names import Converted, converted_as
from quark.torch.model.passes.unfuse_experts import UnfusedExperts, is_transposed


@dataclass(frozen=True)
class Origin:
    """The origin of one tensor.

    Attributes:
        names: Of the float tensors of the folder that it is made of.
        shape: Of what they make; None: that of the tensor itself.
        merge: Makes one tensor of those of `names`, in their order; None: there is one.
        index: Which entry of the first axis it is taken from; None: from all.
        take: What is taken.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    merge: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
    index: int | None = None
    take: Callable[[torch.Tensor], torch.Tensor] | None = None

    def read(self, source: Source, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, of this dtype and shape. Raises as `Source.read`."""
        if self.merge is None:
            x = source.read(self.names[0], dtype, self.shape or shape, self.index)
        else:
            x = self.merge([source.read(name, dtype, source.shape(name)) for name in self.names])
            x = x if self.index is None else x[self.index]
        return x if self.take is None else self.take(x)

    def release(self, source: Source) -> None:
        """Give back the memory of what `read` mapped."""
        for name in self.names:
            source.release(name)


class Origins:
    """The origins of the tensors of a model.

    Args:
        model: A skeleton as transformers builds it, before any pass.
        direct: Name in the model -> name of a float tensor of the folder, as renamings alone find it.
    """

    def __init__(self, model: Any, direct: Mapping[str, str]) -> None:
        self.whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._origins = _merged(model, [name for target, name in direct.items() if target not in self.whole])
        self._origins |= {target: Origin((name,)) for target, name in direct.items()}

    def of(self, model: Any) -> dict[str, Origin]:
        """Name in the model, passes done -> origin; and what the folder holds under other names.

        A tensor that has no origin lies in no file.
        """
        found = dict(self._origins)
        for block, module in model.named_modules():
            if hasattr(module, "stands_for") and (name := f"{block}.weight") in found:
                found[name] = replace(found[name], shape=self.whole[name], take=torch.t)  # files have it of a Conv1D
            if not isinstance(module, UnfusedExperts):
                continue
            for name in module.state_dict():
                full, (fused, index, take) = f"{block}.{name}", part_of(module, name)
                origin = self._origins.get(f"{block}.{fused}")
                if full not in found and origin is not None:
                    found[full] = replace(origin, shape=self.whole[f"{block}.{fused}"], index=index, take=take)
        return found


def _merged(model: Any, stored: list[str]) -> dict[str, Origin]:
    """The tensors that transformers makes of several stored ones, or of one in another form."""
    find = converted_as(model, model.state_dict())
    parts: dict[str, list[tuple[str, Converted]]] = {}
    for name in sorted(stored, key=order_of_parts):
        if (made := find(name)) is not None:
            parts.setdefault(made.first, []).append((name, made))
    return {
        target: Origin(
            tuple(name for name, _ in pieces), merge=_merge_of(model, target, [piece for _, piece in pieces])
        )
        for pieces in parts.values()
        for target in pieces[0][1].targets
    }


def _merge_of(model: Any, target: str, parts: list[Converted]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The function from the parts of a tensor of the model, in the order of the file, to the tensor."""
    rule, first = parts[0].rule, parts[0].first

    def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
        one = copy.deepcopy(rule)
        for part, tensor in zip(parts, tensors, strict=True):
            one.add_tensor(first, first, part.pattern, lambda tensor=tensor: tensor)
        made = one.convert(first, model=model, config=model.config)[target]
        return made[0] if isinstance(made, list) else made

    return merge


class Parts:
    """Float tensors of a folder of which the tensors of a model are made: experts one by one, for one.

    Args:
        model: Of any class; of one that is not of transformers there are none.
        own: Its state dict, those of layers in codes among it.
    """

    def __init__(self, model: Any, own: Mapping[str, torch.Tensor]) -> None:
        self._model, self._own, self._find = model, own, converted_as(model, own)
        self._parts: dict[str, list[tuple[str, Converted, torch.Tensor]]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True where a tensor is such a part; it is kept then."""
        made = self._find(name)
        if made is None or (name in self._own and self._own[name].shape == tensor.shape):
            return False
        self._parts.setdefault(made.first, []).append((name, made, tensor))
        return True

    def joined(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the model, by their names there."""
        for pieces in self._parts.values():
            pieces.sort(key=lambda piece: order_of_parts(piece[0]))
            for target in pieces[0][1].targets:
                yield target, _merge_of(self._model, target, [made for _, made, _ in pieces])([x for *_, x in pieces])


def part_of(block: UnfusedExperts, name: str) -> tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Where a tensor of a block lies in the fused one: whose name, which expert, and how it is taken of that expert's.

    Args:
        block: Unfused experts.
        name: "3.gate_proj.weight".
    """
    index, leaf, kind = name.split(".", 2)
    gate, _, down = block.names
    flip, half = kind == "weight" and is_transposed(block.origin[0]), 0 if gate is None or leaf == down else 2

    def take(x: torch.Tensor) -> torch.Tensor:
        rows = x.t() if flip else x
        return rows.chunk(half)[leaf != gate] if half else rows

    return (block.first if leaf != down else "down_proj") + ("_bias" if kind == "bias" else ""), int(index), take


def names_of(origins: Mapping[str, Origin], tensors: Iterable[str]) -> set[str]:
    """The tensors of the folder that these tensors of the model are made of."""
    return {name for tensor in tensors if tensor in origins for name in origins[tensor].names}
