"""Tensors that a checkpoint holds in another form than the model: experts one by one, queries with keys, transposed.

    tensors of the model  --(a conversion of transformers, the other way round)-->  tensors of the file

A form is taken from the source folder: what it holds as the model does stays so. Where no folder is known it is that of
published checkpoints, which `save_pretrained` writes, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quark.base.libraries.transformers import conversions, merged_as, mergers, order_of_parts
from quark.torch.model.names.in_model import converted_as
from quark.torch.model.names.published import published_names


@dataclass(frozen=True)
class OtherForm:
    """Tensors of a model of which a file holds others.

    Attributes:
        members: Their names in the model.
        files: Name in the file -> name that renamings alone, without the conversion, make of it.
        convert: Makes the tensors of the file, by their names there, of those of the model, in the order of `members`.
    """

    members: tuple[str, ...]
    files: Mapping[str, str]
    convert: Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]

    @property
    def of_weights(self) -> bool:
        """True where the file has weights of layers in their place."""
        return all(file.endswith(".weight") for file in self.files)


def other_forms(
    model: Any, coded: Iterable[str] = (), shape_in_file: Callable[[str], tuple[int, ...] | None] | None = None
) -> list[OtherForm]:
    """The other forms of the tensors of a model, where all that belong together are there.

    Args:
        model: With weights or without; experts that were taken apart are tensors of their own.
        coded: Names of layers whose tensors are stored in codes: what belongs to one of them has the model's form.
        shape_in_file: The shape in the source folder of a tensor by the name that renamings make of its own, None for
            one that is not there. Default: the folder is not known.
    """
    own, layers, find = model.state_dict(), set(coded), converted_as(model, model.state_dict())
    found = []
    for first, parts in _grouped(model, own).items():
        names = {part.name for part in parts}
        if not layers.isdisjoint(name.rpartition(".")[0] for name in names):
            continue
        form = _form(model, own, first, parts, shape_in_file)
        made = [find(file) for file in form.files] if form is not None else []
        if form is not None and all(each is not None and set(each.targets) == names for each in made):
            found.append(form)
    return found


@dataclass(frozen=True)
class Turned:
    """A tensor of a model, the reversed conversion that takes it, and the pattern by which that knows it."""

    name: str
    rule: Any
    pattern: str


def _grouped(model: Any, own: Mapping[str, torch.Tensor]) -> dict[str, list[Turned]]:
    """The tensors that reversed conversions take, those together that one takes at once, where all are there."""
    rules = mergers(conversions(model))
    if not rules:
        return {}
    reverse = [rule.reverse_transform() for rule in reversed(rules)]
    by_pattern = {pattern: rule for rule in reverse for pattern in rule.source_patterns}
    groups: dict[str, list[Turned]] = {}
    for name in sorted(own, key=order_of_parts):
        first, pattern = merged_as(name, reverse)
        if pattern is not None:
            groups.setdefault(first, []).append(Turned(name, by_pattern[pattern], pattern))
    return {
        first: parts
        for first, parts in groups.items()
        if {part.pattern for part in parts} == set(parts[0].rule.source_patterns)
    }


def _form(
    model: Any,
    own: Mapping[str, torch.Tensor],
    first: str,
    parts: list[Turned],
    shape_in_file: Callable[[str], tuple[int, ...] | None] | None,
) -> OtherForm | None:
    """The form by a reversed rule; None where the source folder has another, or the rule has no way back."""
    for turned in (False, True):
        convert = _converter(model, first, parts, turned)
        try:
            like = convert([own[part.name].detach().to("meta") for part in parts])
        except (RuntimeError, ValueError, KeyError, AttributeError, IndexError, TypeError, NotImplementedError):
            return None
        if shape_in_file is None or _has_shapes(like, shape_in_file):
            break
    else:
        return None
    same = _has_shapes(like, lambda name: tuple(own[name].shape) if name in own else None)
    if same and all(getattr(operation, "check_dims", False) for operation in parts[0].rule.operations):
        return None  # which is the model's own
    members = tuple(part.name for part in parts)
    publish = published_names(model)
    files = {publish(name): name for name in like}
    back = {name: file for file, name in files.items()}
    return OtherForm(members, files, lambda tensors: {back[name]: x for name, x in convert(tensors).items()})


def _has_shapes(like: Mapping[str, torch.Tensor], of: Callable[[str], tuple[int, ...] | None]) -> bool:
    return all(of(name) == tuple(x.shape) for name, x in like.items())


def _converter(
    model: Any, first: str, parts: list[Turned], turned: bool
) -> Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """The reversed conversion of the tensors of a group, with names that renamings would make of those in the file.

    Args:
        model, first, parts: The group.
        turned: Transpose what it would transpose only for another shape than the model has.
    """

    def converted(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        one = copy.deepcopy(parts[0].rule)
        for operation in one.operations:
            if turned and hasattr(operation, "check_dims"):
                operation.check_dims = False
        for part, tensor in zip(parts, tensors, strict=True):
            one.add_tensor(first, part.name, part.pattern, tensor)
        made = one.convert(first, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    return converted


def names_of_files(model: Any, names: Iterable[str], forms: Iterable[OtherForm]) -> list[str]:
    """Under which names a checkpoint holds these tensors of a model, in these other forms."""
    publish, wanted = published_names(model), list(names)
    apart = {name: form for form in forms for name in form.members}
    plain = [publish(name) for name in wanted if name not in apart]
    return [*plain, *dict.fromkeys(file for name in wanted if name in apart for file in apart[name].files)]
