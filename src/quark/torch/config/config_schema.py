"""Schema of what a config.json says of quantization: of which type each entry is, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quark.base.bounded_regex import full_match
from quark.errors import ConfigError, FormatError

SECTIONS = ("quantization_config", "compression_config")
DEEPEST = 40
"""Objects in objects of a config."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 1 << 31


def _is_side(value: Any) -> bool:
    sides = re.split("x", value) if isinstance(value, str) else value
    return isinstance(sides, list) and len(sides) == 2 and all(_is_positive(side) for side in sides)


def _is_positive(side: Any) -> bool:
    number = int(side) if isinstance(side, str) and re.fullmatch("[0-9]{1,9}", side) else side
    return _is_count(number) and bool(number > 0)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _are_patterns(value: Any) -> bool:
    """Texts, of which those that begin with "re:" are regular expressions."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        return False
    for entry in value:
        if entry.startswith("re:"):
            full_match(entry[3:], "")
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("targets", "ignore", "modules_to_not_convert", "exclude"), (_are_patterns, "a list of patterns")),
    "config_groups": (_holds_objects, "an object of objects"),
    "apply": (_are_objects, "a list of objects"),
    **dict.fromkeys(
        ("weights", "input_activations", "output_activations", "transform_config", "export"),
        (_is_object, "an object"),
    ),
    **dict.fromkeys(("weight_block_size", "block_structure"), (_is_side, 'two positive integers, or "AxB"')),
    **dict.fromkeys(("num_bits", "bits", "group_size", "head_dim"), (_is_count, "a whole number")),
    **dict.fromkeys(("format", "quant_method", "strategy", "location"), (_is_text, "a text")),
}
"""Key, wherever it stands -> what its value is, and how to say that. Any may be null."""


def check_quantization(path: Path, config: dict[str, Any]) -> None:
    """Raise FormatError for an entry that is of another type than every program writes it.

    Args:
        path: For messages.
        config: The whole config.json.
    """
    for section in SECTIONS:
        _check(path, section, config.get(section), 0)


def _check(path: Path, name: str, value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise FormatError(f"{path}: {name:.80} lies more than {DEEPEST} objects deep.")
    if isinstance(value, list):
        for entry in value:
            _check(path, name, entry, depth + 1)
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        known = KINDS.get(key)
        try:
            right = known is None or entry is None or known[0](entry)
        except ConfigError as error:
            raise FormatError(f"{path}: {name}.{key}: {error}") from None
        if known is not None and not right:
            raise FormatError(f"{path}: {name}.{key} is {entry!r:.80}; possible: {known[1]}.")
        _check(path, f"{name}.{key}", entry, depth + 1)
