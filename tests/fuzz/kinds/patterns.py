"""Patterns, as configs of strangers hold them: regular expressions that `re` would not end on, and broken ones."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, nothing_to_compare, pick
from tests.fuzz.kinds.quantized_folders import _load

PIECES = (
    "a",
    "model",
    "layers",
    r"\.",
    ".",
    r"\d",
    r"\w",
    "[a-z_]",
    "[^x]",
    "(a|a)",
    "(l|la|lay)",
    "$",
    "^",
    r"\b",
    "",
    "q_proj",
)
REPEATS = ("*", "+", "?", "{2}", "{0,90}", "{40}", "*?", "")
NAMES = ("model.layers.0.self_attn.q_proj", "lm_head", "a" * 24, "model.layers.1.mlp.down_proj", "")
LONG = ("model.layers.0.self_attn.q_proj" * 3, "a" * 90, "model.layers.10.mlp.experts.63.down_proj")


def expression(random: Random, depth: int = 0) -> str:
    """A regular expression of a few pieces, within each other."""
    text = ""
    for _ in range(int(random.integers(1, 5))):
        inner = pick(random, PIECES)
        if depth < 4 and random.random() < 0.4:
            inner = pick(random, ("({})", "(?:{})", "(?={})", "(?!{})", "({}|a)")).format(expression(random, depth + 1))
        text += inner + (pick(random, REPEATS) if inner[-1:] not in ("^", "$", "b", "") and inner else "")
    return text


def _match(pattern: str) -> None:
    """Long names, which must end; then short ones, of which `re` says the same."""
    from quark.core.names.patterns import matches

    for name in LONG:
        matches(name, f"re:{pattern}")
    if len(pattern) > 30 or pattern.count("*") + pattern.count("+") + pattern.count("{") > 3:
        return  # `re` might not end
    for name in NAMES:
        if matches(name, f"re:{pattern}") != bool(re.fullmatch(pattern, name)):
            raise WrongError(f"{pattern!r} on {name!r}: not what re says")


def make(random: Random, place: Place) -> Case:
    sound = random.random() < SOUND
    pattern = "model.*proj" if sound else expression(random)
    if not sound and random.random() < 0.2:
        pattern = pattern.replace(")", "", 1) + pick(random, ("(", "[z-a]", "{3,1}", "\\", "(?P<a"))
    if random.random() < 0.8:
        return Case(repr(pattern), partial(_match, pattern), nothing_to_compare, sound=sound)
    folder = place.bases.copy("compressed-int4", place.inputs / "quantized")
    file = folder / "config.json"
    config: Any = json.loads(file.read_text(encoding="utf-8"))
    group = next(iter(config["quantization_config"]["config_groups"].values()))
    group["targets"] = [f"re:{pattern}", *group["targets"]]
    file.write_text(json.dumps(config), encoding="utf-8")
    found = place.outputs / "logits.npy"
    return Case(f"targets of a folder: {pattern!r}", partial(_load, folder, found), outputs=(found,), sound=sound)
