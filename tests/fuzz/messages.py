"""Damages any field of a protobuf message, by what the message says of its fields."""

from __future__ import annotations

from typing import Any

from tests.fuzz.case import Random, pick
from tests.fuzz.damage import damage_bytes, shorten

INTEGERS = (0, 1, -1, 2, 7, 17, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-42, 3e38, float("nan"), float("inf"))
STRINGS = ("", "x", "a\0b", "é", "x" * 5000, "../up", " ", "Conv", "com.nobody")


def change_a_field(random: Random, message: Any) -> str:
    """Change one field, of a message or one inside of it. Says which."""
    for _ in range(50):
        path, holder = pick(random, _messages(message, ""))
        set_fields = [field for field, _ in holder.ListFields()]
        known = set_fields if set_fields and random.random() < 0.85 else list(holder.DESCRIPTOR.fields)
        field = pick(random, known)
        try:
            return f"{path}.{field.name} {_change(random, holder, field)}"
        except (ValueError, TypeError, UnicodeError, AttributeError):
            continue  # a value that the field cannot hold: another one
    return "nothing"


def _messages(message: Any, path: str) -> list[tuple[str, Any]]:
    """The message and all inside of it, with their paths."""
    found = [(path or "model", message)]
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        several = list(enumerate(value)) if _repeated(field) else [(None, value)]
        for index, inner in several:
            found += _messages(inner, f"{path}.{field.name}".lstrip(".") + ("" if index is None else f"[{index}]"))
    return found


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _change(random: Random, holder: Any, field: Any) -> str:
    if _repeated(field):
        return _change_list(random, holder, field)
    if field.type == field.TYPE_MESSAGE:
        return _change_message(random, getattr(holder, field.name), holder, field)
    if random.random() < 0.15:
        holder.ClearField(field.name)
        return "removed"
    value = _value(random, field, getattr(holder, field.name))
    setattr(holder, field.name, value)
    return f"= {shorten(value)}"


def _change_message(random: Random, inner: Any, holder: Any, field: Any) -> str:
    if random.random() < 0.5:
        holder.ClearField(field.name)
        return "removed"
    inner.SetInParent()
    return "is there"


def _change_list(random: Random, holder: Any, field: Any) -> str:
    entries = getattr(holder, field.name)
    how = pick(random, ("remove", "twice", "swap", "change", "clear"))
    if not len(entries):
        how = "add"
    at = int(random.integers(max(len(entries), 1)))
    of_messages = field.type == field.TYPE_MESSAGE
    if how == "remove":
        del entries[at]
    elif how == "clear":
        del entries[:]
    elif how == "twice":
        entries.append(entries[at])
    elif how == "swap":
        other = int(random.integers(len(entries)))
        kept = list(entries)
        kept[at], kept[other] = kept[other], kept[at]
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in kept] if of_messages else kept
        del entries[:]
        entries.extend(copies)
    elif of_messages:
        entries.add() if how == "add" else entries[at].Clear()
    elif how == "add":
        entries.append(_value(random, field, None))
    else:
        entries[at] = _value(random, field, entries[at])
    return f"[{at}] {how}"


def _value(random: Random, field: Any, present: Any) -> Any:
    """Another value for a field, of its type."""
    if field.type == field.TYPE_BYTES:
        return damage_bytes(random, present or b"x")[0]
    if field.type == field.TYPE_STRING:
        return pick(random, STRINGS)
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return pick(random, FLOATS)
    return pick(random, INTEGERS)
