"""The names of transformers that quark takes beside its documented ones, for all versions from OLDEST on.

Questions about a model import nothing: it can be of transformers only where transformers is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from quark.base.garbage import without_collection
from quark.base.libraries.installed_packages import is_transformers_version_lower
from quark.base.libraries.names import Name
from quark.errors import MissingDependencyError, NotSupportedError, require_packages

OLDEST = "5.5"
"""The oldest version that quark takes, as pyproject.toml says it: 4.57 has no conversions of names."""

Rules = tuple[Sequence[Any], Sequence[Any]]
"""Renamings, and mergers, of a model."""

DECODES_EXPERTS = "5.16"
"""The first version that decodes all experts of compressed-tensors folders: 5.12 takes codes for values, 5.14 knows no
FP8 among them."""
LATENT = "5.15"
"""The first version whose caches hold what latent attention compresses; older ones hold the keys and values of it."""
READS_TOKENIZER_FILES = "5.6"
"""The first version that reads tokenizer.json where nothing says its class; older ones guess that by the model."""
APART = "5.21"
"""The first version that merges weights of experts alone; older ones merge all tensors whose names begin as theirs."""

_NAMES, _LOADER = "core_model_loading", "modeling_utils"
NAMES = (
    Name("conversion_mapping", "get_model_conversion_mapping", "renamings and mergers of a model"),
    Name(_NAMES, "WeightRenaming", "a renaming"),
    Name(_NAMES, "WeightConverter", "a merger"),
    Name(_NAMES, "PrefixChange", "a renaming that is not turned round", "5.14", "there are no such renamings"),
    Name(_NAMES, "rename_source_key", "the name in a model of a name in a file"),
    Name(_NAMES, "dot_natural_key", "the order in which parts are merged"),
    Name(_NAMES, "build_glob_alternation", "the patterns of tensors that stay in float32"),
    Name(_LOADER, "PreTrainedModel._from_config", "an empty model"),
    Name(_LOADER, "PreTrainedModel._get_dtype_plan", "tensors that are wider than the rest"),
    Name(_LOADER, "PreTrainedModel._keep_in_fp32_modules_strict", "tensors that are always float32"),
    Name(_LOADER, "PreTrainedModel._keys_to_ignore_on_load_missing", "tensors that a file may lack"),
    Name(_LOADER, "PreTrainedModel._keys_to_ignore_on_load_unexpected", "tensors that a class leaves out"),
    Name(_LOADER, "PreTrainedModel.initialize_weights", "buffers that no file holds"),
    Name(_LOADER, "all_tied_weights_keys", "tensors that are one"),
    Name(_LOADER, "ALL_ATTENTION_FUNCTIONS", "attention whose probabilities are quantized"),
    Name("masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", "the masks of that"),
    Name("initialization", "_is_hf_initialized", "a tensor that has its values"),
    Name("configuration_utils", "_attn_implementation", "which attention function a model calls"),
    Name("configuration_utils", "_auto_class", "a config with code of its own"),
    Name("configuration_utils", "_commit_hash", "the revision of a folder in the cache"),
    Name("configuration_utils", "_name_or_path", "the folder of a model"),
    Name("dynamic_module_utils", "custom_object_save", "code of a model, beside its config"),
    Name("dynamic_module_utils", "get_class_from_dynamic_module", "a class of such code"),
    Name("modeling_rope_utils", "ROPE_INIT_FUNCTIONS", "the frequencies of scaled positions"),
    Name("models.auto.auto_factory", "_model_mapping", "the class that an Auto class takes"),
    Name("pytorch_utils", "Conv1D", "linear layers of GPT-2"),
    Name("integrations.moe", "is_concatenated", "rows of gate and up that alternate", "5.7", "the gate is tried"),
    Name("cache_utils", "DynamicCache", "what a cache answers"),
    Name("cache_utils", "EncoderDecoderCache", "what a cache answers"),
    Name(
        "models.deepseek_v3.modeling_deepseek_v3", "expand_kv", "what caches hold of latent attention",
        LATENT, "its scales are refused",
    ),
    Name("quantizers.auto", "AUTO_QUANTIZER_MAPPING", "how a format is loaded"),
    Name(
        "quantizers.base", "serialized_names", "tensors of a format that are converted together",
        "5.21", "the format is not asked",
    ),
    Name(
        "quantizers.base", "MODULES_TO_PATCH_FOR_QUANTIZATION", "experts that are taken apart before they are loaded",
    ),
    Name("quantizers.base", "HfQuantizer.param_needs_quantization", "quantizing while a model is loaded"),
    Name("quantizers.base", "HfQuantizer.get_quantize_ops", "quantizing while a model is loaded"),
    Name("quantizers.quantizer_quark", "QuarkHfQuantizer.is_trainable", "adapters that the Trainer trains"),
    Name("quantizers.auto", "register_quantizer", "quantizing while a model is loaded"),
    Name(_NAMES, "ConversionOps", "quantizing while a model is loaded"),
    Name("utils.chat_template_utils", "render_jinja_template", "conversations as texts"),
    Name("utils.hub", "cached_file", "the folder of a name"),
)  # fmt: skip


def import_transformers() -> Any:
    """The transformers package. Raises MissingDependencyError where it is absent, or older than OLDEST."""
    require_packages("Reading a model folder", "torch", "transformers", "safetensors")
    if is_transformers_version_lower(OLDEST):
        raise MissingDependencyError(
            f"transformers {transformers_version()} is installed, and quark needs {OLDEST} or newer: pip install "
            f"'transformers>={OLDEST}'."
        )
    with without_collection():
        import transformers  # costs seconds: imported when a folder is really read

    return transformers


def transformers_version() -> str:
    """The installed version."""
    return version("transformers")


def decodes_experts() -> bool:
    """Tell if the installed version decodes experts of compressed-tensors folders; true where none is installed."""
    return not is_transformers_version_lower(DECODES_EXPERTS)


def caches_latents() -> bool:
    """Tell if caches of the installed version hold what latent attention compresses; true where none is installed."""
    return not is_transformers_version_lower(LATENT)


def require_readable_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Raise NotSupportedError where the installed version reads another tokenizer than tokenizer.json is."""
    place = Path(folder)
    alone = (place / "tokenizer.json").is_file() and not (place / "tokenizer_config.json").is_file()
    if alone and is_transformers_version_lower(READS_TOKENIZER_FILES):
        raise NotSupportedError(
            f"{folder} has no tokenizer_config.json, without which transformers {transformers_version()} makes another "
            f"tokenizer than its tokenizer.json. Possible: transformers {READS_TOKENIZER_FILES} or newer, or that file."
        )


def loaded(module: str) -> ModuleType | None:
    """A module of transformers, where it is loaded."""
    return sys.modules.get(f"transformers.{module}")


def _module(name: str) -> Any:
    return sys.modules[f"transformers.{name}"]


# Models ---------------------------------------------------------------------------------------------------------------


def is_transformers_model(model: object) -> bool:
    """Tell if a model is one of transformers', whose loader is known."""
    modeling: Any = loaded(_LOADER)
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def is_conv1d(module: object) -> bool:
    """Tell if a module is the Conv1D of GPT-2."""
    layers: Any = loaded("pytorch_utils")
    return layers is not None and type(module) is layers.Conv1D


def rows_alternate(experts: Any) -> bool:
    """Tell if rows of gate and up alternate in fused experts, as in GPT-OSS, and are no two halves."""
    gate = getattr(experts, "_apply_gate", None)
    if hasattr(experts, "is_concatenated") or gate is None:
        return not getattr(experts, "is_concatenated", True)
    # Two gates and two ups: where they alternate, the second number is the first up, and changes the first output.
    plain, changed = gate(experts.gate_up_proj.new_tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0]], device="cpu"))
    return bool(plain[0] != changed[0])


def empty_of_class(kind: Any, config: Any, dtype: Any, **options: Any) -> Any:
    """A model of a class and a config, as the loader begins with it."""
    return kind._from_config(config, dtype=dtype, **options)


def classes_of(auto_class: str, config: Any) -> tuple[Any, ...]:
    """The classes that one of the Auto classes takes for a config."""
    found = getattr(sys.modules["transformers"], auto_class)._model_mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def dtype_plan(model: Any, dtype: Any) -> dict[str, Any]:
    """Pattern of names -> the dtype that tensors are loaded in where it is another one than `dtype`."""
    plan: dict[str, Any] = model._get_dtype_plan(dtype)
    return plan


def tied_weights(model: Any) -> dict[str, str]:
    """Name of a tensor -> the name of the one that it is, as the class and the config say it."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def set_tied_weights(model: Any, ties: dict[str, str]) -> None:
    """Let the loader tie these tensors only."""
    model.all_tied_weights_keys = ties


def may_be_missing(model: Any) -> list[str]:
    """Patterns of tensors of a class that a file may lack."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])


def left_out(model: Any) -> list[str]:
    """Patterns of tensors in files that a class leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])


def set_left_out(model: Any, patterns: set[str]) -> None:
    """Let a model leave these tensors of files out."""
    model._keys_to_ignore_on_load_unexpected = patterns


def always_float32(model: Any) -> list[str]:
    """Patterns of tensors that stay in float32 whatever is asked for."""
    return list(getattr(model, "_keep_in_fp32_modules_strict", None) or [])


def has_values(tensor: Any, whether: bool = True) -> None:
    """Say of a tensor, or of a module, that its values are there, so that the loader draws none."""
    tensor._is_hf_initialized = whether


def let_adapters_train() -> None:
    """Let the Trainer take a model that quark loads, with adapters on it; without any it says that it needs some.

    transformers says of its class for quark's folders, of which it makes an object itself, that nothing trains.
    """
    _module("quantizers.quantizer_quark").QuarkHfQuantizer.is_trainable = True


def draw_missing(model: Any) -> None:
    """Let a class compute what is not marked by `has_values`."""
    model.initialize_weights()


def patched_experts(kind: str) -> Any:
    """The class that experts of a class become before codes are loaded into them; None: they stay what they are."""
    base = loaded("quantizers.base")
    patch = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {}).get(kind)
    return None if patch is None else patch["module_name"]


# Configs --------------------------------------------------------------------------------------------------------------


def set_folder(model: Any, folder: str) -> None:
    """Say where a model comes from."""
    model.config._name_or_path = folder


def folder_of(config: Any) -> str:
    """Where a model comes from; empty: it does not say it."""
    return str(getattr(config, "_name_or_path", "") or "")


def revision_of(config: Any) -> str | None:
    """The revision of the folder in the cache that a config was read from."""
    return getattr(config, "_commit_hash", None)


def has_code(config: Any) -> bool:
    """Tell if a config is of a class with code of its own, which is to lie beside it."""
    return config._auto_class is not None


def attention_of(config: Any) -> str | None:
    """The name of the attention function that a model calls; None: it calls none by its name."""
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str | None) -> None:
    """Let a model call another attention function."""
    config._attn_implementation = name


def names_attention(config: Any) -> bool:
    """Tell if a config can name an attention function."""
    return hasattr(config, "_attn_implementation")


def register_attention(name: str, function: Any) -> None:
    """Make an attention function known, with the masks of the plain one."""
    functions, masks = _module(_LOADER).ALL_ATTENTION_FUNCTIONS, _module("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    if name not in functions:
        functions.register(name, function)
        masks.register(name, masks["eager"])


def rope_function(kind: str) -> Any:
    """The function that computes scaled frequencies of positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind]


def save_code(config: Any, folder: Any) -> None:
    """Write the code of a config into a folder."""
    from transformers.dynamic_module_utils import custom_object_save

    custom_object_save(config, folder, config=config)


def class_of_code(reference: str, folder: Any) -> Any:
    """A class of the code in a folder, which is run."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder)


def file_in_cache(name: str, file: str, revision: str | None) -> str | None:
    """Where a file of a repository lies in the cache; None: it does not. Nothing is downloaded."""
    from transformers.utils import cached_file

    found: str | None = cached_file(
        name, file, revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return found


def cache_class(name: str) -> Any:
    """A class of caches; None where transformers is not loaded."""
    return getattr(loaded("cache_utils"), name, None)


# Names ----------------------------------------------------------------------------------------------------------------


def conversions(model: object, legacy: bool = False) -> list[Any]:
    """The renamings and mergers of a model; none for one that is not of transformers.

    Args:
        model: Of any class.
        legacy: Also those of names that only old files have (LayerNorm.gamma).
    """
    mapping: Any = loaded("conversion_mapping")
    if mapping is None or not is_transformers_model(model):
        return []
    found: list[Any] = mapping.get_model_conversion_mapping(model, add_legacy=legacy)
    return found


def renamings(rules: Iterable[Any]) -> list[Any]:
    """The renamings among conversions."""
    core: Any = loaded(_NAMES)
    return [] if core is None else [rule for rule in rules if isinstance(rule, core.WeightRenaming)]


def mergers(rules: Iterable[Any]) -> list[Any]:
    """The conversions that make tensors of other tensors."""
    core: Any = loaded(_NAMES)
    return [] if core is None else [rule for rule in rules if isinstance(rule, core.WeightConverter)]


def can_be_turned(renaming: Any) -> bool:
    """Tell if a renaming has a way back that its own class gives: one that cuts or adds a prefix has none."""
    change = getattr(_module(_NAMES), "PrefixChange", None)
    return change is None or not isinstance(renaming, change)


def name_in_model(name: str, rules: Rules, prefix: str | None, own: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name that the loader makes of one in a file, and the pattern of the merger that takes it.

    Args:
        name: In the file.
        rules: Renamings and mergers.
        prefix: `base_model_prefix` of the class.
        own: The state dict of the model.
    """
    renamed, merged = rules
    found: tuple[str, str | None] = _module(_NAMES).rename_source_key(name, renamed, merged, prefix, own)
    return found


def merged_as(name: str, rules: Iterable[Any]) -> tuple[str, str | None]:
    """The name that the first of some mergers makes of one, and its pattern; the name itself, and None, without."""
    for rule in rules:
        made, pattern = rule.rename_source_key(name)
        if pattern is not None:
            return made, pattern
    return name, None


def renamed(name: str, rules: Iterable[Any]) -> str:
    """A name after some renamings, one after another."""
    for rule in rules:
        name, _ = rule.rename_source_key(name)
    return name


def order_of_parts(name: str) -> Any:
    """The key by which the loader sorts what it merges."""
    return _module(_NAMES).dot_natural_key(name)


def any_of(patterns: Sequence[str]) -> Any:
    """A regular expression for any of some patterns of layers, as the loader reads these."""
    from transformers.core_model_loading import build_glob_alternation

    return build_glob_alternation(list(patterns))[0]


def parts_of_codes(method: str) -> tuple[str, ...]:
    """The tensors that a format stores of a weight, which its loader converts together; none: it converts weights."""
    kind = _module("quantizers.auto").AUTO_QUANTIZER_MAPPING.get(method)
    found = getattr(kind, "serialized_names", {})
    if isinstance(found, property):  # 5.21 and 5.22 name fewer, as the config has them; several always
        return ("weight", "weight_scale")
    return tuple(found.get("weight", ()))
