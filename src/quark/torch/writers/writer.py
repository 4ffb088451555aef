"""The target of a quantized model: told its tensors by name, one at a time, in any order.

A model in memory, one that comes block by block and files that become files are written by the same writers, so that
what they write is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from quark.base.progress import progress
from quark.core.spec import LayerSpec, TensorSpec
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import ByteRange, write_across
from quark.torch.checkpoint.shards import Entry, Plain
from quark.torch.config.config import QConfig
from quark.torch.formats import Format
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.model.names import OtherForm
from quark.torch.plan import Plan
from quark.torch.writers.carried import Carried


@dataclass(frozen=True)
class Quantized:
    """A model whose layers are replaced, and where it came from.

    Attributes:
        model: With weights, or as a skeleton whose weights come and go.
        config, plan: Under which it is quantized.
        source: The folder of the float model, where that is known.
        plain: Makes the entries of tensors that are not quantized.
        published: Names of the layers in codes -> what published files hold in other tensors than the model.
        carried: A format, pack_method and whether codes are stored -> what the source folder holds beside the model.
        solved: Whether the algorithms of the config have run; else what they add is not there yet.
    """

    model: Any
    config: QConfig
    plan: Plan
    source: OpenedFolder | None
    plain: Plain
    published: Callable[[Iterable[str]], list[OtherForm]]
    carried: Callable[[Format, str, bool], Carried]
    solved: bool = True


@dataclass(frozen=True)
class Move:
    """The change of a stored tensor on its way into the files.

    Attributes:
        keys: Of the places of its rows, in equal shares, one after the other.
        order: Which of its rows each row there is; None: they stay.
        change: What becomes of its values; None: they stay.
    """

    keys: tuple[str, ...]
    order: torch.Tensor | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def stays(self) -> bool:
        """True where the tensor is written as it is."""
        return self.order is None and self.change is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as it is written."""
        x = x if self.order is None else x[self.order]
        return x if self.change is None else self.change(x)


class Writer(ABC):
    """Writes one quantized model.

    Attributes:
        carried: Entries of what the source folder holds and the class of the model does not build.
        forms: What is stored in other tensors than those of the model.
    """

    carried: Sequence[Entry]
    forms: Sequence[OtherForm] = ()

    @abstractmethod
    def check(self) -> str | None:
        """Raise for what the format or its readers cannot hold of the plan; before any forward, and without weights.

        Returns:
            What some reader would decode wrongly, a sentence; None where there is nothing.

        Raises:
            NotSupportedError, ShapeError: Names the layer, and what is possible.
        """

    @abstractmethod
    def entries(self, only: Container[str] | None = None) -> Iterator[Entry]:
        """The tensors of the model as it is now, or those of these names."""

    @abstractmethod
    def move(self, name: str, suffix: str) -> Move:
        """The way of what is stored of a tensor of the model, under a suffix."""

    @abstractmethod
    def layout(self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype) -> Layout:
        """How a tensor of a layer is stored, in a model of this dtype."""

    @abstractmethod
    def create(self, output: Path, begun: bool = False) -> dict[str, ByteRange]:
        """Make the files at their full size, their headers written; with `begun` they are there already.

        Args:
            output: A folder that is there, or the file where the target is one.

        Returns:
            Where each tensor goes, by its key.

        Raises:
            OutputError: The disk is too small.
        """

    @abstractmethod
    def write_rest(self, output: Path) -> None:
        """Write what lies beside the tensors, which are all written."""

    def put(self, name: str, tensors: Tensors, places: Mapping[str, ByteRange]) -> None:
        """Write what is stored of a tensor of the model, by suffix, to its places."""
        for suffix, x in tensors.items():
            move = self.move(name, suffix)
            write_across(move(x), [places[key] for key in move.keys])

    def write(self, output: Path) -> None:
        """Write all of a model in memory."""
        places = self.create(output)
        items = [*self.entries(), *self.carried]
        for name, make, _ in progress(items, "write", total=len(items)):
            self.put(name, make(), places)
        self.write_rest(output)


class OutputTarget(ABC):
    """The form that a model is to be written in, known before there is a model.

    Attributes:
        is_file: Whether it is one file; else a folder.
    """

    is_file: ClassVar[bool] = False

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """The settings that decide over the bytes of its tensors, as JSON holds them."""

    @abstractmethod
    def writer(self, quantized: Quantized) -> Writer:
        """The writer of one model."""
