"""The config of an adapter of PEFT, made safe before PEFT acts on it.

Its kind is one that loads nothing but the files of its folder, and no pattern in it is left to Python's `re`: patterns
are matched here, in bounded time, and PEFT gets the names that they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quark.base.bounded_regex import full_match
from quark.errors import ConfigError, FormatError, NotSupportedError

KINDS = (
    "LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "IA3", "HRA", "VERA", "FOURIERFT", "LN_TUNING", "VBLORA", "MISS",
    "RANDLORA", "SHIRA", "C3A", "ROAD", "DELORA", "TRAINABLE_TOKENS", "WAVEFT", "GRALORA",
)  # fmt: skip
"""Values of `peft_type` that add to weights what files of their folder hold; XLORA loads what its config names."""
_REACHING = ("megatron_config", "arrow_config")
"""Fields by which PEFT imports a module that a config names, or loads other adapters."""
_OF_LAYERS = ("target_modules", "exclude_modules", "feedforward_modules")
"""Fields that are names of layers, or one pattern of them."""
_BY_LAYER = ("rank_pattern", "alpha_pattern")
"""Fields that are values by patterns of the ends of names."""
_TEXTS = ("base_model_name_or_path", "revision", "peft_version", "adapter_layers")
"""Fields that no pattern is made of."""
_ALL_LINEAR = "all-linear"
_SPECIAL = re.compile(r"[*+?{}()|\[\]^$\\]")


def require_local(path: Path, said: Mapping[str, Any]) -> None:
    """Refuse an adapter of which PEFT would load more than the files of its folder.

    Args:
        path: Of adapter_config.json, for the message.
        said: Its contents.

    Raises:
        NotSupportedError: Names the kind or the field.
    """
    kind = said.get("peft_type")
    if kind not in KINDS:
        raise NotSupportedError(
            f"{path}: adapters of the kind {kind!r:.40} are not read. Possible: {', '.join(KINDS)}."
        )
    for field in _REACHING:
        if said.get(field):
            raise NotSupportedError(f"{path}: {field} is {said[field]!r:.60}. Possible: adapters without it.")


def with_names(path: Path, said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of an adapter's config that hold patterns, with the names of layers in their place.

    Args:
        path: Of adapter_config.json, for messages.
        said: Its contents.
        names: Of the modules of the base model.

    Returns:
        Field -> what PEFT is to have in it. Names of `rank_pattern` are escaped, as PEFT takes them for patterns.

    Raises:
        FormatError: A pattern is none, takes too long, or stands where names are meant.
    """
    known, changed = list(names), dict[str, Any]()
    for field, value in said.items():
        if field in _OF_LAYERS and isinstance(value, str) and value != _ALL_LINEAR:
            changed[field] = _matching(path, field, value, known)
        elif field in _BY_LAYER and isinstance(value, dict):
            changed[field] = _by_name(path, field, value, known)
        elif field not in _TEXTS and (odd := next(filter(_SPECIAL.search, _strings(value)), None)) is not None:
            raise FormatError(f"{path}: {field} holds {odd!r:.80}, and names are needed there.")
    return changed


def _matching(path: Path, field: str, pattern: str, names: list[str]) -> list[str]:
    found = [name for name in names if name and _matches(path, field, pattern, name)]
    if not found and field == _OF_LAYERS[0]:
        raise FormatError(f"{path}: {field} is {pattern!r:.80}, which is the name of no layer of the base model.")
    return found


def _by_name(path: Path, field: str, values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The value of the first pattern that the end of each name meets."""
    found = dict[str, Any]()
    for name in names:
        for pattern, value in values.items():
            if _matches(path, field, rf"(.*\.)?({pattern})", name):
                found[re.escape(name)] = value
                break
    return found


def _matches(path: Path, field: str, pattern: str, name: str) -> bool:
    try:
        return full_match(pattern, name)
    except ConfigError as error:
        raise FormatError(f"{path}: {field}: {error}") from None


def _strings(value: Any) -> list[str]:
    """All texts in a value of JSON, the keys among them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _strings(each)]
    return [text for each in value for text in _strings(each)] if isinstance(value, list) else []
