"""Hyperparameters of a GGUF file and of the config of a model: whether both say the same of what is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import FormatError
from quark.gguf.architectures.metadata import write_hyperparameters
from quark.gguf.architectures.table import architecture_of
from quark.gguf.names import import_gguf
from quark.gguf.reader import hyperparameters

_DESCRIBES = ("context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "nextn_predict_layers")
"""Keys that say nothing of what is computed; sizes are those of the tensors."""
DEFAULTS = {"rope.freq_base": 10000.0, "rope.scaling.type": "none"}
"""The values that readers take where a file has no such key."""
_NEUTRAL = ("", "none", 0, False)
"""Values with which a key that is not known here changes nothing."""
ROPE = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Key of a file -> field of rope_parameters."""
_SCALINGS = ("linear", "yarn")
"""Types of scaling that are in the metadata alone, and in no tensor."""


def refuse_other_config(file: Path, reader: Any, config: Any, whose: str) -> None:
    """Raise FormatError where a file of the config would say otherwise than this one.

    Args:
        file: For messages.
        reader: Of the file.
        config: Of a transformers model of the file's architecture.
        whose: What the config is of, for messages, and what is possible.
    """
    for key, found, made in _differences(reader, config):
        raise FormatError(f"{file}: {key} is {found} in the file, and {made} in the {config.model_type} config {whose}")


def _differences(reader: Any, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Key, value in the file, and value of the config, where these differ."""
    architecture = architecture_of(config)
    writer = import_gguf().GGUFWriter(None, architecture.arch)
    write_hyperparameters(writer, architecture, config)
    stored, made = dict(hyperparameters(reader)), {key: entry.value for key, entry in writer.kv_data[0].items()}
    for key in sorted({*stored, *made}):
        name = key.removeprefix(f"{architecture.arch}.")
        if name in _DESCRIBES or not key.startswith(f"{architecture.arch}."):
            continue
        found = stored.get(key, DEFAULTS.get(name))
        if name == "block_count" and isinstance(
            found, int
        ):  # of blocks that predict further tokens, the model has none
            found -= int(stored.get(f"{architecture.arch}.nextn_predict_layers") or 0)
        ours = made.get(key, DEFAULTS.get(name))
        if found is None:
            continue  # readers know it by heart, or from the tensors
        if ours is None and not _changes_nothing(name, found):
            yield key, found, "not there"
        elif ours is not None and not _equal(found, ours):
            yield key, found, ours


def _changes_nothing(name: str, found: Any) -> bool:
    values = found if isinstance(found, list) else [found]
    return all(value in _NEUTRAL or (name.endswith(("scale", "factor")) and value == 1) for value in values)


def with_scaled_rope(reader: Any, config: Any) -> None:
    """Give a config that transformers made of a file the scaling of rotations that it says, which transformers leaves.

    Where that is not all of it, `refuse_other_config` finds so.
    """
    arch, stored = architecture_of(config).arch, dict(hyperparameters(reader))
    kind, whole = stored.get(f"{arch}.rope.scaling.type"), getattr(config, "rope_parameters", None) or {}
    rope = whole.get("full_attention", whole)  # of layers with a sliding window nothing is scaled
    if kind not in _SCALINGS or not rope or "rope_theta" not in rope:
        return
    scaled = {field: shortest(stored[f"{arch}.{key}"]) for key, field in ROPE.items() if f"{arch}.{key}" in stored}
    factor, attention = scaled.get("factor"), stored.get(f"{arch}.rope.scaling.attn_factor")
    if kind == "yarn" and factor and attention is not None:
        # A reader multiplies by this factor of the paper itself.
        scaled["attention_factor"] = attention * (1 + math.log(factor) / 10)
    if (tenth := stored.get(f"{arch}.rope.scaling.yarn_log_multiplier")) is not None:
        scaled |= dict.fromkeys(("mscale", "mscale_all_dim"), shortest(10 * tenth))
    rope = {**rope, "rope_type": kind, **scaled}
    config.rope_parameters = {**whole, "full_attention": rope} if "full_attention" in whole else rope


def shortest(value: Any) -> Any:
    """A float32, or several, as the shortest decimal that rounds to it, as configs have it: 1e-05 for 9.99999974e-06.

    Other values are returned as they are.
    """
    if isinstance(value, list):
        return [shortest(entry) for entry in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _equal(found: Any, made: Any) -> bool:
    if isinstance(found, list) or isinstance(made, list):
        pair = [value if isinstance(value, list) else [value] for value in (found, made)]
        longest = max(map(len, pair))
        first, second = (value * longest if len(value) == 1 else value for value in pair)
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(found, str) or isinstance(made, str):
        return bool(found == made)
    return math.isclose(found, made, rel_tol=1e-6)
