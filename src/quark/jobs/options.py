"""Options: what is said of a field of a request, once for the command line, recipes, Python and the reference."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

FOR_FOLDERS, FOR_FILES = "For a folder (PyTorch)", "For an ONNX file"


@dataclass(frozen=True)
class RequestOption:
    """How a field is called, and what it means.

    Attributes:
        help: What it means, in a sentence or two.
        flags: On the command line; none: `--` and the name of the field.
        least: The smallest number.
        metavar: What the help shows in place of a value.
        key: In a recipe, with a point between a section and what is in it; None: a recipe does not say it.
        changes_output: Whether another value makes other bytes; what does not is left out of the recipe in a folder.
        required: Whether a command line has to say it.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: float | None = None
    metavar: str | None = None
    key: str | None = ""
    changes_output: bool = True
    required: bool = False


def option(default: Any, help: str, *flags: str, **rest: Any) -> Any:
    """A field of a request. `flags` and `rest` are attributes of `RequestOption`."""
    return field(default=default, metadata={"option": RequestOption(help, flags, **rest)})


def same_as(kind: type[Any], name: str, **changes: Any) -> Any:
    """A field that means what one of another request does.

    Args:
        kind: The other request.
        name: Of its field.
        changes: `default`, or attributes of `RequestOption`, that differ.
    """
    (each,) = (each for each in fields(kind) if each.name == name)
    default = changes.pop("default", each.default)
    return field(default=default, metadata={"option": replace(option_of(each), **changes)})


def option_of(each: Field[Any]) -> RequestOption:
    """Return the option of a field."""
    found = each.metadata["option"]
    assert isinstance(found, RequestOption)
    return found


def flag_of(each: Field[Any]) -> str:
    """Its longest name on the command line."""
    flags = [flag.partition("/")[0] for flag in option_of(each).flags] or [f"--{each.name.replace('_', '-')}"]
    return next((flag for flag in flags if flag.startswith("--")), flags[0])


def key_of(each: Field[Any]) -> str | None:
    """Its key in a recipe; None where a recipe does not say it."""
    key = option_of(each).key
    return None if key is None else key or each.name
