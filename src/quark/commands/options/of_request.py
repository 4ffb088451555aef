"""Options of typer, made of the fields of a request."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import Field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.jobs.options import option_of
from quark.jobs.request import QUANTIZE, A, B, Kinds, options_of, panel_of, request_for
from quark.jobs.words import each_algorithm

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def option_for(name: str, *flags: str, kinds: Kinds[Any, Any] = QUANTIZE, **changes: Any) -> Any:
    """The option of a field, for the annotation of a parameter.

    Args:
        name: Of the field.
        flags: In place of its own.
        kinds: The requests of the command.
        changes: What this command tells typer otherwise, such as `help`.
    """
    said = option_of(options_of(*kinds)[name])
    told: dict[str, Any] = {
        "help": said.help,
        "rich_help_panel": panel_of(name, kinds),
        "min": said.least,
        "metavar": said.metavar,
        "callback": each_algorithm if name == "algorithm" else None,
    }
    return typer.Option(*(flags or said.flags), **(told | changes))


def takes(
    kinds: Kinds[A, B],
    model: Any,
    names: Iterable[str] | None = None,
    make: Callable[..., A | B] | None = None,
    **own: Any,
) -> Callable[[Callable[[A | B], None]], Callable[..., None]]:
    """Decorate what does a request, so that it becomes a command: it takes a model, and the options of its requests.

    Args:
        kinds: The requests of the command.
        model: The annotation of its first argument.
        names: Of the options; None: all.
        make: Makes the request of the model, of what is said and of further models; None: `request_for`.
        own: Annotations of options in place of their own, and of further models.
    """
    known = options_of(*kinds)
    made = partial(request_for, kinds) if make is None else make

    def command_of(function: Callable[[A | B], None]) -> Callable[..., None]:
        def command(context: typer.Context, model: Path, **given: Any) -> None:
            places = {name: given[name] for name in own if name not in known}
            function(made(model, said_on(context, kinds), **places))

        of_folders, of_files = map(typing.get_type_hints, kinds)
        hints = of_files | of_folders
        parts: dict[str, Any] = {"context": typer.Context, "model": model, **own}
        for name in known if names is None else names:
            parts.setdefault(name, Annotated[_of_typer(hints[name]), option_for(name, kinds=kinds)])
        # A signature is what typer reads. What is not on the command line comes as its default.
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, KEYWORD_ONLY, default=_default(known.get(n)), annotation=a) for n, a in parts.items()]
        )
        command.__annotations__ = {**parts, "return": None}
        command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
        return command

    return command_of


def _default(each: Field[Any] | None) -> Any:
    """The default of an option; none of a model."""
    if each is None:
        return inspect.Parameter.empty
    return ... if option_of(each).required else each.default


def _of_typer(hint: Any) -> Any:
    """The type of a field as typer takes it: a list where several are given."""
    if "tuple[str" not in str(hint):
        return hint
    return list[str] | None if "None" in str(hint) else list[str]


def said_on(context: typer.Context, kinds: Kinds[Any, Any] = QUANTIZE) -> dict[str, Any]:
    """The options of a command's requests that stand on a command line."""
    sources, known = {name: context.get_parameter_source(name) for name in context.params}, options_of(*kinds)
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE" and name in known
    }
