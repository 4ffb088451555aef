"""config.json and generation_config.json of a folder: what the source says as it was written, and the quantization.

transformers 5 writes a config in words of its own: `rope_parameters` for `rope_theta` and `rope_scaling`, `dtype` for
`torch_dtype`. A reader of transformers 4 takes its defaults for what it does not find, without an error. So what the
source says stays, what was changed in the model is put in its place, and what only the new words say is said in the
old ones too. The file is kept so only if transformers reads of it the config that the model has.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quark.base.libraries.diffusers import is_network
from quark.base.libraries.transformers import has_code, import_transformers, save_code
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.layers.replace import quantized_layers

CONFIG, GENERATION = "config.json", "generation_config.json"
_OF_THE_FILES = (
    "_name_or_path", "architectures", "compression_config", "dtype", "expert_dtype", "quantization",
    "quantization_config", "torch_dtype", "transformers_version", "transformers_weights",
)  # fmt: skip
"""Fields that say where and how the source has its weights, or who wrote it: not what the model computes."""
_OF_OTHER_CODES = ("compression_config", "expert_dtype", "quantization", "quantization_config", "transformers_weights")
"""Those of _OF_THE_FILES that would be wrong in the new folder."""
ROPE, TYPE, THETA, SCALING = "rope_parameters", "rope_type", "rope_theta", "rope_scaling"
_OF_NETWORKS = ("_name_or_path", "quantization_config", "_pre_quantization_dtype")
"""Keys in the config of a network of diffusers about the folder that it was loaded from."""


def write_config(model: Any, quantization: dict[str, Any], source: OpenedFolder | None, folder: Path) -> None:
    """Write config.json.

    Args:
        model: Of transformers or of diffusers.
        quantization: Its `quantization_config`.
        source: Folder that it was loaded from; None: unknown.
        folder: Where the file goes.
    """
    if is_network(model):
        own = {name: value for name, value in json.loads(model.to_json_string()).items() if name not in _OF_NETWORKS}
        # Its loader has no other place for the type of its numbers.
        dtype = str(model.dtype).removeprefix("torch.")
        _write(own | {"quantization_config": {**quantization, "torch_dtype": dtype}}, folder)
        return
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)  # of the folder that it was loaded from
    config.architectures = [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    if _quantized_ends(model):
        config.tie_word_embeddings = False  # such a head or embedding no longer shares its weight with the other
    if has_code(config):
        save_code(config, folder)
    # Not by save_pretrained, which refuses fields that transformers itself has read (output_attentions, return_dict).
    stored = _as_written(config, source) or _in_old_words(json.loads(config.to_json_string()))
    for name in _OF_OTHER_CODES:
        stored.pop(name, None)
    _write(stored | {"quantization_config": quantization}, folder)


def _write(stored: Mapping[str, Any], folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


def _quantized_ends(model: Any) -> bool:
    """Tell if an embedding or a head of the model is quantized."""
    quantized = list(quantized_layers(model).values())
    ends = []
    for end in ("input", "output"):
        with suppress(NotImplementedError):  # a model of images or sound
            ends.append(getattr(model, f"get_{end}_embeddings", lambda: None)())
    return any(end is not None and end in quantized for end in ends)


def _as_written(config: Any, source: OpenedFolder | None) -> dict[str, Any] | None:
    """The config.json of a source with what was changed since it was read, in the order of its fields.

    Args:
        config: Of a model, as transformers has it.
        source: Folder that the model was loaded from.

    Returns:
        None where the source says it of another model, or where transformers would not read `config` of the result.
    """
    if source is None or not source.has_config:
        return None
    stored = copy.deepcopy(source.config)
    if stored.get("model_type") != config.model_type:  # of a model of several parts this is one
        return None
    then, now = _read_as(config, stored), _fields(config)
    if then is None:
        return None
    _follow(stored, _fields(then), now)
    if now.get("architectures") != stored.get("architectures"):
        stored["architectures"] = now["architectures"]
    for name in {"torch_dtype", "dtype"} & stored.keys() or ({"dtype"} if now.get("dtype") else set()):
        stored[name] = now["dtype"]  # a folder may say it by both names
    stored = _in_old_words(stored)
    again = _read_as(config, stored)
    return stored if again is not None and _model_fields(_fields(again)) == _model_fields(now) else None


def _read_as(config: Any, stored: Mapping[str, Any]) -> Any | None:
    """Return the config that its class makes of the fields of a file; None where it refuses them."""
    fields = {name: copy.deepcopy(value) for name, value in stored.items() if name not in _OF_OTHER_CODES}
    with suppress(Exception):  # code of a config of its own may raise anything
        return type(config).from_dict(fields)
    return None


def _fields(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def _model_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _OF_THE_FILES}


def _follow(stored: dict[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Put what differs between two states of a config into the file of the first."""
    for name, value in now.items():
        if name in _OF_THE_FILES or (name in then and then[name] == value):
            continue
        if isinstance(value, dict) and isinstance(stored.get(name), dict) and isinstance(then.get(name), dict):
            _follow(stored[name], then[name], value)
            continue
        if name == ROPE:
            for old in (THETA, SCALING):
                stored.pop(old, None)
        stored[name] = value


def _in_old_words(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A config that readers of transformers 4 read too: with `torch_dtype`, `rope_theta` and `rope_scaling`, in all of
    its parts.
    """
    found = {name: _in_old_words(part) if isinstance(part, dict) else part for name, part in stored.items()}
    if isinstance(found.get("dtype"), str):
        found.setdefault("torch_dtype", found["dtype"])
    rope = found.get(ROPE)
    if isinstance(rope, dict) and THETA in rope and THETA not in found and not found.get(SCALING):
        found[THETA] = rope[THETA]
        rest = {name: value for name, value in rope.items() if name != THETA}
        if rest.get(TYPE, "default") != "default":
            found[SCALING] = rest
    return found


def write_generation_config(model: Any, source: Path | None, folder: Path) -> None:
    """Write generation_config.json: the file of the source where the model still has what it says.

    Nothing is written where the source has no such file, and the model has what its config says.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    kind = import_transformers().GenerationConfig
    path = None if source is None else source / GENERATION
    if path is not None and path.is_file():
        with suppress(Exception):  # a file of another time, of which transformers makes nothing
            if kind.from_pretrained(source).to_dict() == generation.to_dict():
                shutil.copyfile(path, folder / GENERATION)
                return
    elif path is not None and generation.to_dict() == kind.from_model_config(model.config).to_dict():
        return
    generation.to_json_file(folder / GENERATION)
