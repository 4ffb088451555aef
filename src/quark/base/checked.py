"""checked: dataclasses whose every problem is a ConfigError that names the class, the field and what came.

Users change them as they like: an assignment is checked as the constructor checks, and what works with a config takes
a `snapshot`, which finds what was done to its lists and sees nothing that is done later.

The types are checked by pydantic in strict mode. It is imported, and a class's validator built, when the
first object is made: `import quark.torch` and `import quark.onnx` do not pay for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from typing_extensions import dataclass_transform

from quark.errors import ConfigError, did_you_mean

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


def config_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return the text that `repr` of a config shows: its class, and a line for each row with a text."""
    shown = [row for row in rows if row[1]]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {text}" for name, text in shown)])


def changed_fields(config: Any) -> dict[str, str]:
    """The fields of a dataclass that are not as they are by default, as texts; members of enums by name."""
    found = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        if value != default:
            found[entry.name] = value.name if isinstance(value, Enum) else str(value)
    return found


def checked(cls: type[T]) -> type[T]:
    """Give a dataclass an `__init__` and assignments that validate.

    Three optional methods of the class take part. Two classmethods turn other accepted forms into the documented
    ones: `_gather(args, kwargs)`, which returns both, before they are bound to fields, and `_accept(values)`, before
    the types are checked. `_check()` finds inconsistent fields.

    Args:
        cls: A class made by `@dataclass`, not frozen.
    """
    target: Any = cls
    signature = inspect.signature(target.__init__)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the class's own
        gather = getattr(type(self), "_gather", None)
        if gather is not None:
            args, kwargs = gather(args, kwargs)
        values = _bind(type(self), target, args, kwargs)
        for name, kind in _enums(target).items():
            if isinstance(values.get(name), str):
                values[name] = member(kind, values[name], f"{type(self).__name__}.{name}")
        accept = getattr(cls, "_accept", None)
        if accept is not None:
            accept(values)
        _validate(self, target, values)
        if hasattr(self, "_check"):
            self._check()

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    target.__init__ = __init__
    target.__setattr__ = _check_assignment
    target.__pydantic_config__ = {"strict": True, "arbitrary_types_allowed": True}
    return cls


@dataclass_transform(field_specifiers=(dataclasses.field,))
def checked_dataclass(cls: type[T]) -> type[T]:
    """Make a dataclass that validates; see `checked`."""
    return checked(dataclasses.dataclass(cls))


def snapshot(config: T) -> T:
    """A copy that shares no list, dict or config with the original, checked as if it were made anew.

    Raises:
        ConfigError: Something was put into a list or dict of the config that its constructor refuses.
    """
    value, kind = cast(Any, config), cast(Any, type(config))
    if kind.__setattr__ is _check_assignment:
        value = kind(**{name: snapshot(getattr(value, name)) for name in _names(kind)})
    elif kind is dict:
        value = {snapshot(key): snapshot(entry) for key, entry in value.items()}
    elif kind in (list, tuple):
        value = kind(map(snapshot, value))
    return cast(T, value)


def member(kind: type[E], text: str, where: str) -> E:
    """The member of an enum by its name or value; ConfigError with the nearest names otherwise."""
    for entry in kind:
        if text in (entry.name, entry.value):
            return entry
    raise ConfigError(
        f"{where}: unknown {kind.__name__} {text!r}. {did_you_mean(text, [entry.name for entry in kind])}"
    )


def as_dict(data: object, where: str) -> dict[Any, Any]:
    """A copy of a mapping; ConfigError, which says where it stands, for anything else."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected names with values (a dict), got {data!r:.80} ({type(data).__name__}).")
    return dict(data)


def as_list(data: object, where: str) -> list[Any]:
    """A copy of a list or tuple; ConfigError, which says where it stands, for anything else."""
    if not isinstance(data, (list, tuple)):
        raise ConfigError(f"{where}: expected a list, got {data!r:.80} ({type(data).__name__}).")
    return list(data)


def known_keys(data: Mapping[str, Any], cls: type, ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`data` without the ignored keys; ConfigError for a key that is no field of `cls`."""
    data, names = as_dict(data, cls.__name__), _names(cls)
    for key in data:
        if key not in names and key not in ignored:
            raise ConfigError(f"{cls.__name__} has no field {key!r}. {did_you_mean(str(key), names)}")
    return {key: value for key, value in data.items() if key in names}


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def _enums(cls: Any) -> dict[str, type[Enum]]:
    """The fields whose annotation holds one Enum."""
    enums = {}
    for name, hint in get_type_hints(cls).items():
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Enum)]
        if len(kinds) == 1:
            enums[name] = kinds[0]
    return enums


@cache
def _validator(cls: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls).validator


def _bind(shown: type, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `cls` by field name. Raises ConfigError that names the class as `shown`, a subclass perhaps."""
    names = _names(cls)
    by_position = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
    if len(args) > len(by_position):
        raise ConfigError(f"{shown.__name__} takes at most {len(by_position)} values, got {len(args)}.")
    values = dict(zip(by_position, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise ConfigError(f"{shown.__name__} has no field {name!r}. {did_you_mean(name, names)}")
        if name in values:
            raise ConfigError(f"{shown.__name__}.{name} is given twice: by position and by name.")
        values[name] = value
    return values


def _validate(self: Any, cls: type, values: dict[str, Any]) -> None:
    from pydantic_core import ArgsKwargs, ValidationError

    try:
        _validator(cls).validate_python(ArgsKwargs((), values), self_instance=self)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        name = f"{type(self).__name__}.{field}"
        if field not in values:
            raise ConfigError(f"{name} is required.") from None
        came = values[field]
        hint = get_type_hints(cls)[field]
        expected = hint.__name__ if isinstance(hint, type) else re.sub(r"[\w.]+\.", "", str(hint))  # without modules
        raise ConfigError(f"{name}: expected {expected}, got {came!r} ({type(came).__name__}).") from None


def _check_assignment(self: Any, name: str, value: Any) -> None:
    """Assign a field as the constructor would take it; the object is unchanged when that is refused."""
    if isinstance(getattr(type(self), name, None), property):
        object.__setattr__(self, name, value)
        return
    names = _names(cast(Any, type(self)))
    if name not in names:
        raise ConfigError(f"{type(self).__name__} has no field {name!r}. {did_you_mean(name, names)}")
    changed = type(self)(**{**{field: getattr(self, field) for field in names}, name: value})
    object.__setattr__(self, name, getattr(changed, name))
