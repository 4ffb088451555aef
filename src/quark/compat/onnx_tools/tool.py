"""Tool: a conversion of an ONNX file and the flags it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir

from quark.base.files import check_apart, check_file
from quark.errors import NotSupportedError
from quark.onnx.graph.model_file import read
from quark.onnx_ops.saving import model_files, save


@dataclass(frozen=True)
class Flag:
    """A flag after the paths.

    Attributes:
        help: What it says.
        kind: Type of its value; bool: a switch without a value.
        default: Its value where it is left out; None: it must be given.
    """

    help: str
    kind: type = str
    default: Any = None


@dataclass(frozen=True)
class Tool:
    """A conversion.

    Attributes:
        run: (model, *flags), in their order -> how many places changed.
        summary: What it does, in one line.
        flags: Its flags by name.
        order: What stands where on the command line, without flags.
        read: Path -> model.
        write: (model, path, whether weights go beside it) -> None.
        tell: Model -> lines to print; a tool that has it writes no model.
    """

    run: Callable[..., int]
    summary: str
    flags: Mapping[str, Flag] = field(default_factory=dict)
    order: tuple[str, ...] = ("input", "output")
    read: Callable[[Path], ir.Model] = read
    write: Callable[[ir.Model, Path, bool], None] = save
    tell: Callable[[ir.Model], Iterable[str]] | None = None

    def convert(self, source: Path, target: Path, external_data: bool = False, **flags: Any) -> int:
        """Read, convert, write; return how many places changed.

        Args:
            source: The model to read.
            target: Where the result goes.
            external_data: Write the weights beside the model.
            **flags: A value for each of `flags`.
        """
        check_file(target, overwrite=True)
        _, *weights = model_files(source)
        check_apart(target, *weights)  # the model itself may be replaced
        model = self.read(source)
        count = self.run(model, *(flags[name] for name in self.flags))
        self.write(model, target, external_data)
        return count


def refused(name: str, reason: str) -> Tool:
    """A tool that says at once why it does nothing."""

    def refuse(path: Path) -> NoReturn:
        raise NotSupportedError(f"{name} is not part of this version: {reason}.")

    return Tool(lambda model: 0, f"Not in this version: {reason}.", read=refuse)
