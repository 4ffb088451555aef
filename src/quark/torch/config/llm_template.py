"""LLMTemplate: a QConfig from the name of a scheme, for any model.

Of a documented family, a template shows the documented lists (`families`). What to exclude of any other is said by role
(`SELECTORS`), and found in the model when the plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quark.base.checked import as_dict, as_list, snapshot
from quark.base.log import logger
from quark.core.blocks.block_types import BLOCK_TYPES
from quark.core.granularity import HEADS
from quark.core.names.registry import Registry
from quark.core.names.scheme_families import suggestion
from quark.core.schemes import OLD_SCHEMES, SCHEMES, scheme_of
from quark.core.spec import TensorSpec
from quark.errors import ConfigError, did_you_mean
from quark.gguf import MIXES
from quark.torch.config.algo_configs import AlgoConfig
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.families import EXCLUDED, with_shown
from quark.torch.config.lowering import config_of_layer, lower_layer, lower_tensor
from quark.torch.config.named_algorithms import ALGO_CONFIGS, algo_config_by_name
from quark.torch.config.selectors import SELECTORS
from quark.torch.config.tensor.enums import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.config.tensor.observer_classes import PerChannelMinMaxObserver, PerTensorMinMaxObserver
from quark.torch.config.tensor.tensor_config import QTensorConfig

__all__ = ["LLMTemplate"]

Algorithms = str | AlgoConfig
"""An algorithm by its name, or with what it is told."""
MODEL_TYPES = tuple(EXCLUDED)
"""The documented names. Any other name works as well."""

_SHARED_SCALE_SCHEMES = ("nvfp4", "nvfp4_weight_only", "fp4_block16_scale_e4m3")
"""Runtimes fuse q/k/v and gate/up and hold one global scale for each; so sibling layers must share theirs."""


_STATIC: dict[str, Any] = {"is_dynamic": False, "symmetric": True, "round_method": RoundType.half_even}
_WHOLE: dict[str, Any] = {**_STATIC, "qscheme": QSchemeType.per_tensor, "observer_cls": PerTensorMinMaxObserver}
_EACH_HEAD: dict[str, Any] = {
    **_STATIC, "qscheme": QSchemeType.per_channel, "observer_cls": PerChannelMinMaxObserver,
    "ch_axis": HEADS.axis, "scale_type": ScaleType.float,
}  # fmt: skip
CACHE_SCHEMES = {
    "fp8": QTensorConfig(Dtype.fp8_e4m3, **_WHOLE),
    "int8": QTensorConfig(Dtype.int8, scale_type=ScaleType.float, **_WHOLE),
    "fp8_per_head": QTensorConfig(Dtype.fp8_e4m3, **_EACH_HEAD),
    "int8_per_head": QTensorConfig(Dtype.int8, **_EACH_HEAD),
}
"""How a cache may be quantized, by name."""


_CACHE_NAMES: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("*qkv_proj",): ("*qkv_proj", ("phi3", "phi4_multimodal", "codegen")),
    ("*query_key_value",): ("*query_key_value", (
        "chatglm", "gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "fuyu", "persimmon")),
    ("*c_attn",): ("*c_attn", ("gpt2", "gpt_bigcode", "qwen")),
    ("*Wqkv",): ("*Wqkv", ("dbrx", "mpt")),
    ("*kv_b_proj",): ("*q_b_proj", (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "axk1", "axk2", "bailing_hybrid",
        "dots3_note", "dots3_note_text", "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash",
        "minicpm3", "mistral4", "mistral_large4", "youtu")),
    ("*self_attn.kv_proj",): ("*self_attn.q_b_proj", ("deepseek_v4",)),
    ("*self_attention.kv_proj",): ("*q_proj", ("jetmoe",)),
    ("*.k", "*.v"): ("*.q", ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop")),
    ("*.key", "*.value"): ("*.query", ("git", "bert", "bert-generation", "roberta", "electra", "camembert")),
    ("*key_proj", "*value_proj"): ("*query_proj", ("prophetnet", "xlm-prophetnet")),
    ("*project_k", "*project_v"): ("*project_q", ("cpmant",)),
    ("*Wk", "*Wv"): ("*Wq", ("ctrl",)),
    ("*k_proj.linear", "*v_proj.linear"): ("*q_proj.linear", ("moshi", "kyutai_speech_to_text")),
}  # fmt: skip
"""Patterns of the layers that make keys and values -> that of queries, and the families that call them so; all others
have `k_proj` and `v_proj`. One pattern stands for layers that make both.
"""


class LLMTemplate:
    """How the layers of a family of language models are called, and configs for it.

    Args:
        model_type: `model.config.model_type`; any string.
        kv_layers_name: Patterns of the key and value projections. Default `*k_proj`, `*v_proj`.
        q_layer_name: Pattern or patterns of the query projection. Default `*q_proj`.
        gate_up_layers_name: Names of the gate and up projections. Default `gate_proj`, `up_proj`.
        exclude_layers_name: Patterns left in float. Default: those of the family, if it is documented, else the roles
            output head, router, not text.
        algorithm_configs: Algorithm name -> config, in place of the defaults.
        f2f_weight_converters: Recorded for file-to-file quantization.
        **legacy: `awq_config=`, `gptq_config=` ...: the older form of `algorithm_configs`.
    """

    _registered: ClassVar[dict[str, LLMTemplate]] = {}
    _schemes: ClassVar[Registry[QLayerConfig]] = Registry("scheme")

    def __init__(
        self,
        model_type: str,
        kv_layers_name: list[str] | None = None,
        q_layer_name: str | list[str] | None = None,
        gate_up_layers_name: list[str] | None = None,
        exclude_layers_name: list[str] | None = None,
        algorithm_configs: Mapping[str, AlgoConfig | None] | None = None,
        f2f_weight_converters: list[Any] | None = None,
        **legacy: AlgoConfig | None,
    ) -> None:
        self.model_type = model_type
        self.kv_layers_name = _strings(kv_layers_name, ["*k_proj", "*v_proj"])
        self.q_layer_name = _strings(q_layer_name, ["*q_proj"])
        self.gate_up_layers_name = _strings(gate_up_layers_name, ["gate_proj", "up_proj"])
        self.exclude_layers_name = _strings(exclude_layers_name, list(EXCLUDED.get(model_type, SELECTORS)))
        self.f2f_weight_converters = f2f_weight_converters
        algorithms = dict(algorithm_configs or {})
        for name, config in legacy.items():
            algorithm = name.removesuffix("_config")
            if algorithm == name or algorithm not in ALGO_CONFIGS:
                known = [*(f"{algo}_config" for algo in ALGO_CONFIGS), *_ARGUMENTS]
                raise ConfigError(f"LLMTemplate has no argument {name!r}. {did_you_mean(name, known)}")
            algorithms[algorithm] = config
        self.algo_config = {name: config for name, config in algorithms.items() if config is not None}
        for name in self.algo_config:
            ALGO_CONFIGS[name]

    @classmethod
    def list_available(cls) -> list[str]:
        """The documented model types and the registered ones; `get` takes any other name too."""
        return [*MODEL_TYPES, *(name for name in cls._registered if name not in MODEL_TYPES)]

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """The registered template of a model type, or one that finds the roles in the model."""
        if model_type in cls._registered:
            return cls._registered[model_type]
        for patterns, (query, families) in _CACHE_NAMES.items():
            if model_type in families:
                return cls(model_type, list(patterns), query)
        return cls(model_type)

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Use `template` for its model type from now on."""
        cls._registered[template.model_type] = template

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QLayerConfig) -> None:
        """Add a scheme, which stands in place of a built-in one of that name until it is removed.

        Raises ConfigError for a name that was registered before, or a config that cannot be lowered.
        """
        lower_layer(config)
        cls._schemes.register(scheme_name, config)
        if scheme_name in SCHEMES or scheme_name in OLD_SCHEMES:
            logger.info("The registered scheme %r stands in place of the built-in one.", scheme_name)

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Remove a scheme that `register_scheme` added."""
        cls._schemes.unregister(scheme_name)

    @classmethod
    def get_supported_schemes(cls) -> list[str]:
        """The names that `get_config` takes, beside those of the block types of GGUF files (`BLOCK_TYPES`)."""
        return [*SCHEMES, *(name for name in cls._schemes if name not in SCHEMES)]

    @classmethod
    def scheme(cls, name: str | QLayerConfig) -> QLayerConfig:
        """The layer config of a scheme. Raises ConfigError with the nearest names."""
        if isinstance(name, QLayerConfig):
            return name
        known = isinstance(name, str)
        if known and name in cls._schemes:
            return snapshot(cls._schemes[name])
        built_in = OLD_SCHEMES.get(name, name) if known else ""
        if built_in in MIXES and built_in not in BLOCK_TYPES:
            raise ConfigError(
                f"The scheme {name!r} gives each tensor of a GGUF file a type of its own, which depends on the model. "
                f"Possible: quark.torch.gguf_config(model, {name!r}), or a block type ({', '.join(BLOCK_TYPES)})."
            )
        if built_in not in SCHEMES and built_in not in BLOCK_TYPES:
            names = [*cls.get_supported_schemes(), *MIXES]
            hint = suggestion(str(name), names) or did_you_mean(str(name).lower(), names)
            raise ConfigError(f"Unknown scheme {name!r}. {hint}")
        return config_of_layer(scheme_of(built_in))

    def get_config(
        self,
        scheme: str,
        algorithm: Algorithms | Sequence[Algorithms] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: Mapping[str, str] | None = None,
        layer_type_config: Mapping[type[nn.Module], str] | None = None,
        exclude_layers: list[str] | None = None,
        algo_configs: Mapping[str, AlgoConfig] | None = None,
        shared_scale_groups: list[list[str]] | None = None,
    ) -> QConfig:
        """The config of a model under a scheme.

        Args:
            scheme: For every linear layer that nothing below names.
            algorithm: Names or configs of algorithms, or one of them, in order; "rotation,gptq" is both.
            kv_cache_scheme: A name of `CACHE_SCHEMES` quantizes the cache: "fp8", "int8", or with a scale for each head
                "fp8_per_head", "int8_per_head".
            min_kv_scale: Smallest scale of the cache.
            attention_scheme: "fp8" quantizes queries and attention probabilities.
            layer_config: Pattern -> scheme. What one names, such as "lm_head", the default exclude does not.
            layer_type_config: Module class -> scheme.
            exclude_layers: Replaces the template's exclude.
            algo_configs: Algorithm name -> config, in place of the template's.
            shared_scale_groups: Replaces the groups of layers that share a global scale.

        Raises:
            ConfigError: an unknown scheme or algorithm; the nearest names are listed.
        """
        base = self.scheme(scheme)
        layer_config = as_dict(layer_config or {}, "layer_config")
        layer_type_config = as_dict(layer_type_config or {}, "layer_type_config")
        layers = {pattern: self.scheme(name) for pattern, name in layer_config.items()}
        cache: dict[str, QLayerConfig] = {}
        softmax = None
        if kv_cache_scheme is not None:
            stored = _tensor_scheme("kv_cache_scheme", kv_cache_scheme, CACHE_SCHEMES)
            cache = {p: replace(layers.get(p, base), output_tensors=stored) for p in self.kv_layers_name}
            # Readers of checkpoints look for these patterns among the layers, too.
            layers.update(cache)
        if attention_scheme is not None:
            softmax = _tensor_scheme("attention_scheme", attention_scheme, ("fp8",))
            layers.update({p: replace(layers.get(p, base), output_tensors=softmax) for p in self.q_layer_name})
        shared = any(n in _SHARED_SCALE_SCHEMES and n not in self._schemes for n in (scheme, *layer_config.values()))
        if shared_scale_groups is None:
            shared_scale_groups = self._siblings() if shared else []
        return QConfig(
            global_quant_config=base,
            exclude=self._default_exclude(layer_config) if exclude_layers is None else exclude_layers,
            algo_config=self._algorithms(algorithm, algo_configs or {}),
            layer_type_quant_config={kind: self.scheme(name) for kind, name in layer_type_config.items()},
            layer_quant_config=layers,
            kv_cache_quant_config=cache,
            min_kv_scale=min_kv_scale,
            softmax_quant_spec=softmax,
            shared_scale_groups=shared_scale_groups,
            sync_moe_expert_input_amax=shared,
        )

    def _default_exclude(self, layer_config: Iterable[str]) -> list[str]:
        """The exclude list without patterns that `layer_config` has as well; selectors yield by themselves."""
        named = {pattern.strip("*.") for pattern in layer_config}
        return [pattern for pattern in self.exclude_layers_name if pattern.strip("*.") not in named]

    def _siblings(self) -> list[list[str]]:
        attention = [*self.q_layer_name, *self.kv_layers_name]
        return [
            [name.rsplit(".", 1)[-1].lstrip("*") for name in group] for group in (attention, self.gate_up_layers_name)
        ]

    def _algorithms(
        self, chosen: Algorithms | Sequence[Algorithms] | None, given: Mapping[str, AlgoConfig]
    ) -> list[AlgoConfig] | None:
        for name in given:
            ALGO_CONFIGS[name]
        if isinstance(chosen, str):
            chosen = split_names(chosen)
        items = [chosen] if isinstance(chosen, AlgoConfig) else as_list(chosen or [], "algorithm")
        return [self._algorithm(item, given) for item in items] or None

    def _algorithm(self, item: Algorithms, given: Mapping[str, AlgoConfig]) -> AlgoConfig:
        if isinstance(item, AlgoConfig):
            return item
        if not isinstance(item, str):
            raise ConfigError(f"algorithm takes names and configs of algorithms, got {item!r:.60}.")
        return given.get(item) or self.algo_config.get(item) or with_shown(algo_config_by_name(item), self.model_type)


def default_exclusions(model_type: str) -> list[str]:
    """Return the layers that stay in float by default: the roles, or those of a registered template of the type."""
    registered = LLMTemplate._registered.get(model_type)
    return list(registered.exclude_layers_name if registered is not None else SELECTORS)


_ARGUMENTS = (
    "kv_layers_name",
    "q_layer_name",
    "gate_up_layers_name",
    "exclude_layers_name",
    "algorithm_configs",
)


def split_names(names: str) -> list[str]:
    """The names of a list with commas, as scripts of the documented system take them; none of an empty one."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _strings(value: str | list[str] | None, default: list[str]) -> list[str]:
    return default if value is None else [value] if isinstance(value, str) else list(value)


def cache_spec(scheme: str) -> TensorSpec:
    """How a cache of a scheme is quantized. Raises ConfigError for another name."""
    spec = lower_tensor(_tensor_scheme("kv_cache_scheme", scheme, CACHE_SCHEMES))
    assert spec is not None
    return spec


def _tensor_scheme(option: str, name: str, known: Iterable[str]) -> QTensorConfig:
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{option}: unknown scheme {name!r}. Possible: {', '.join(map(repr, known))}.")
    return replace(CACHE_SCHEMES[name])
