"""Options of typer, made of the fields of a request."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from quark.jobs.options import option_of
from quark.jobs.request import QUANTIZE, Kinds, options_of, panel_of
from quark.jobs.words import each_algorithm

F = TypeVar("F", bound=Callable[..., Any])


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


def takes(kinds: Kinds[Any, Any] = QUANTIZE, names: Iterable[str] | None = None) -> Callable[[F], F]:
    """Decorate a command `f(context, model, **said)` so that it takes options of its requests; all, or some.

    A signature is what typer reads. Options that are not on the command line come as their defaults; `said_on` tells
    which are.
    """

    def with_signature(function: F) -> F:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        of_folders, of_files = map(typing.get_type_hints, kinds)
        hints, known = of_files | of_folders, options_of(*kinds)
        wanted = [name for name in known if names is None or name in {*names}]
        taken = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=... if option_of(known[name]).required else known[name].default,
                annotation=Annotated[_of_typer(hints[name]), option_for(name, kinds=kinds)],
            )
            for name in wanted
            if name not in {p.name for p in own}
        ]
        function.__signature__ = inspect.Signature([*own, *taken])  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in (*own, *taken)} | {"return": None}
        return function

    return with_signature


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
