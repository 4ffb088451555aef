"""A model folder: its config.json, the class that it names, and whether its files can be of that class.

Nothing here is allocated by what a config says: its numbers are compared with the shapes in the weight files first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.files import refuse_pickle, require_config
from quark.base.garbage import without_collection
from quark.base.json_objects import plain_json
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import class_of_code, import_transformers
from quark.errors import FormatError, one_line
from quark.torch.config.config_schema import check_quantization
from quark.torch.diffusion.component import is_component
from quark.torch.model.folder_files import check_files

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a stored tensor -> its shape."""

COUNTS = re.compile(r"^((num|n)_(\w+_)?(layers?|blocks?|experts?|stages)|(\w+_)?layers|depth|n_layer)$")
"""Fields that say how many modules are built."""
_COUNTED = re.compile(r"^(num|n)_|_(size|dim)$")
"""Fields that count something."""
SCALARS = re.compile(r"theta|base|token|seed|factor")
"""Fields whose size costs nothing."""
MODULES, LENGTH = 2000, 1 << 24
"""The most that is always built: so many modules of a kind, and tables of so many entries."""
_OF_MODELOPT = "hf_quant_config.json"
"""Where ModelOpt says how a folder is quantized, before its versions that say so in config.json."""
OF_MLX, MLX = "quantization", "mlx"
"""Where MLX says how a folder is quantized, and the `quant_method` that stands for it here: MLX writes none."""
_PACKING = 64
"""A dimension may be this many times as long as what is stored of it: packed codes, and heads of several parts."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; its `quantization_config` may lie in the file of ModelOpt beside it.

    What MLX says in a field of its own is the `quantization_config` here, too, and that field is gone.

    Raises FormatError when it is no such config, or a file of the folder lies elsewhere.
    """
    path = folder / "config.json"
    refuse_pickle(folder, inside=False)
    check_files(folder)
    require_config(folder)
    config = _json_of(path)
    known = isinstance(config, dict) and (isinstance(config.get("model_type"), str) or is_component(config))
    if not known:
        raise FormatError(
            f"{path} is not the config of a transformers model: it has no model_type. Nor is it one of a network of "
            "diffusers: it has no _class_name."
        )
    _move_section_of_mlx(config)
    for field, kind in (("quantization_config", dict), ("architectures", list), ("auto_map", dict)):
        if not isinstance(config.get(field), (kind, type(None))):
            raise FormatError(f"{path}: {field} is {config[field]!r}; possible: a {kind.__name__}.")
    if not config.get("quantization_config") and (folder / _OF_MODELOPT).is_file():
        config["quantization_config"] = _said_beside(folder / _OF_MODELOPT)
    check_quantization(path, config)
    for name, value in _leaves(config):
        leaf = name.rpartition(".")[2]
        if leaf == "transformers_weights" and value:
            raise FormatError(f"{path}: {name} is {value!r}; weights are read from model.safetensors or its index.")
        if leaf.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise FormatError(f"{path}: {name} is {value!r}, code to be downloaded; possible: eager, sdpa.")
    return config


def _json_of(path: Path) -> Any:
    try:
        return plain_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is not JSON: {one_line(error)}.") from None


def _move_section_of_mlx(config: dict[str, Any]) -> None:
    """Put what MLX says of a folder, in one place or in both, where other programs say it."""
    section = config.get("quantization_config") or config.get(OF_MLX)
    if (
        isinstance(section, dict)
        and not {"quant_method", "config_groups"} & {*section}
        and {"bits", "mode"} & {*section}
    ):
        config["quantization_config"] = {**section, "quant_method": MLX}
        config.pop(OF_MLX, None)


def _said_beside(path: Path) -> dict[str, Any]:
    """Return the section that ModelOpt writes into a file of its own, as newer versions write it into config.json."""
    stored = _json_of(path)
    said = stored.get("quantization") if isinstance(stored, dict) else None
    if not isinstance(said, dict):
        raise FormatError(f"{path} is not what ModelOpt writes: it holds no object `quantization`.")
    return {**said, "quant_method": "modelopt"}


def _check_experts(folder: Path, stored: Mapping[str, Any]) -> None:
    """Raise FormatError where a token is to go to more experts than there are."""
    chosen = stored.get("num_experts_per_tok")
    for experts in ("num_local_experts", "num_experts", "n_routed_experts"):
        there = stored.get(experts)
        if isinstance(chosen, int) and isinstance(there, int) and chosen > there:
            raise FormatError(
                f"{folder / 'config.json'}: num_experts_per_tok is {chosen}, of {there} experts ({experts})."
            )


def check_sizes(folder: Path, stored: Mapping[str, Any], shapes: Shapes) -> None:
    """Compare the numbers of a config with the shapes of the tensors that lie beside it, before anything is built.

    Args:
        folder: For the message.
        stored: From `read_config`.
        shapes: Of the tensors in the weight files; empty where there are none.

    Raises:
        FormatError: A number calls for more modules, or longer tensors, than the files can hold.
    """
    _check_experts(folder, stored)
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    for name, value in _leaves(stored):
        leaf = name.rpartition(".")[2]
        if SCALARS.search(leaf) or not isinstance(value, int) or isinstance(value, bool):
            continue
        limit = max(MODULES, len(shapes)) if COUNTS.match(leaf) else max(LENGTH, _PACKING * longest)
        if value < 0 and _COUNTED.match(leaf) and value != _usual(stored, leaf):
            raise FormatError(f"{folder / 'config.json'}: {name} is {value}; possible: 0 and more.")
        if value > limit:
            raise FormatError(
                f"{folder / 'config.json'}: {name} is {value}, and the weight files hold {len(shapes)} tensors, the "
                f"longest dimension {longest}: they are not of this model."
            )


def _usual(stored: Mapping[str, Any], field: str) -> Any:
    """Return the default of a field that a config does not set: the -1 of ViLT's num_images is of no interest."""
    mapping = import_transformers().CONFIG_MAPPING
    kind = stored.get("model_type")
    return getattr(mapping[kind](), field, None) if kind in mapping else None


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a config, by its path. The depth is bounded by that of the JSON reader."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


def load_config(folder: Path, stored: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """The transformers config of a folder with this config.json. Raises FormatError."""
    if is_component(stored):
        raise FormatError(f"{folder / 'config.json'} is that of a network of diffusers, and not of transformers.")
    transformers = import_transformers()
    # Which imports what the class of the config is declared with.
    with as_format_error(folder, trusted=trust_remote_code), without_collection():
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    if (stored.get("quantization_config") or {}).get("quant_method") == MLX:
        config.__dict__.pop(OF_MLX, None)
    return config


def model_class(folder: Path, config: Any, trust_remote_code: bool = False) -> Any:
    """The class that `architectures` names; where config.json has none, that of the causal language model.

    Args:
        folder: Of the model.
        config: From `load_config`.
        trust_remote_code: Import a class from the code that `auto_map` names.

    Raises:
        FormatError: transformers has no such class, or it belongs to another kind of config.
    """
    transformers = import_transformers()
    path, named = folder / "config.json", next(iter(config.architectures or []), None)
    if named is None:
        mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            raise FormatError(f"{path} names no class in `architectures`, and {config.model_type} has no default one.")
        return mapping[type(config)]
    if trust_remote_code and (reference := _remote(config, named)):
        with as_format_error(folder, trusted=True):
            return class_of_code(reference, folder)
    with without_collection():
        found: Any = getattr(transformers, named, None) if isinstance(named, str) else None
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        own = getattr(config, "auto_map", None)
        hint = " Its code lies in the folder: --trust-remote-code runs it." if own else ""
        raise FormatError(
            f"{path} names the class {named!r}, which transformers {transformers.__version__} does not have.{hint}"
        )
    # A base class without a forward is no model, and building one changes what transformers remembers of all others.
    if getattr(found, "forward", None) is nn.Module.forward:
        raise FormatError(f"{path} names the class {named}, which is no whole model.")
    takes: Any = getattr(found, "config_class", None)
    if takes is not None and not isinstance(config, takes):
        raise FormatError(
            f"{path}: model_type {config.model_type!r} and the class {named} do not belong together: that one takes a "
            f"{takes.__name__}, and this is a {type(config).__name__}."
        )
    return found


def _remote(config: Any, named: str) -> str | None:
    """Return the class in `auto_map`, as "file.Class"."""
    references: Iterable[Any] = (getattr(config, "auto_map", None) or {}).values()
    return next((r for r in references if isinstance(r, str) and r.rpartition(".")[2] == named), None)
