"""The documented config classes: QTensorConfig (a tensor), QLayerConfig (a layer), QConfig (a model).

They are the door: everything wrong is a ConfigError here, and lowering.py turns what passed into core specs.
Lists and dicts given to them are copied. Users may change a config; nothing in this package does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from typing import Any

import torch
from torch import nn

from quark.__version__ import __version__
from quark.base.checked import as_dict, checked_dataclass, config_table, known_keys
from quark.errors import ConfigError, did_you_mean
from quark.torch.config.algo_configs import AlgoConfig, RotationConfig
from quark.torch.config.named_algorithms import recorded_algo_config
from quark.torch.config.selectors import SELECTORS
from quark.torch.config.tensor.enums import DeviceType, QSchemeType, QuantFlow, QuantizationMode
from quark.torch.config.tensor.tensor_config import QTensorConfig

__all__ = ["Config", "QConfig", "QLayerConfig", "QuantizationConfig"]

TensorConfigs = QTensorConfig | list[QTensorConfig] | None


@checked_dataclass
class QLayerConfig:
    """How the tensors of a layer are quantized. A tensor with None stays in float.

    Each field takes a `QTensorConfig`, a shorthand spec such as `Int8PerTensorSpec(...)`, or a list of two. The second
    of a list quantizes the scales of the first (`is_scale_quant=True`), or else its codes.

    Attributes:
        input_tensors: The input of the layer, (..., in_features).
        output_tensors: The output of the layer, (..., out_features).
        weight: The weight, (out_features, in_features) for a linear layer.
        bias: The bias, (out_features,).
        target_device: Accepted for AMD Quark's signature.

    Raises:
        ConfigError: A field is of the wrong type, a list is not a pair, or an activation has static groups.

    Example:
        >>> from quark.torch.quantization import Int8PerTensorSpec
        >>> QLayerConfig(weight=Int8PerTensorSpec(observer_method="min_max", symmetric=True, is_dynamic=False))
        QLayerConfig(weight int8 tensor)
    """

    input_tensors: TensorConfigs = None
    output_tensors: TensorConfigs = None
    weight: TensorConfigs = None
    bias: TensorConfigs = None
    target_device: DeviceType | None = None

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        for name in ("input_tensors", "output_tensors", "weight", "bias"):
            values[name] = _as_configs(values.get(name))

    def _check(self) -> None:
        _check_layer(self)

    def __repr__(self) -> str:
        """One line: what each tensor becomes; tensors that stay in float are left out."""
        named = {name: getattr(self, name) for name in ("weight", "input_tensors", "output_tensors", "bias")}
        shown = [f"{name.removesuffix('_tensors')} {_short(value)}" for name, value in named.items() if value]
        return f"QLayerConfig({', '.join(shown) or 'float'})"

    def to_dict(self) -> dict[str, Any]:
        """Return the object of a layer as JSON values, as checkpoints store it."""
        tensors = ("input_tensors", "output_tensors", "weight", "bias")
        device = None if self.target_device is None else self.target_device.name
        return {**{name: _to_json(getattr(self, name)) for name in tensors}, "target_device": device}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QLayerConfig:
        """Read what `to_dict` wrote."""
        values = known_keys(data, cls)
        device = values.pop("target_device", None)
        return cls(**{name: _from_json(value) for name, value in values.items()}, target_device=device)


@checked_dataclass
class QConfig:
    """How the layers of a model are quantized.

    If several fields name a layer, the first of these applies: `exclude`, `layer_quant_config`,
    `layer_type_quant_config`, `global_quant_config`.

    Attributes:
        global_quant_config: The config of every supported layer that no other field names.
        exclude: Layers that stay in float: fnmatch patterns of full module names, regular expressions after "re:", and
            SELECTORS such as "@router".
        algo_config: Algorithms in the order in which they run. A single one needs no list.
        log_severity_level: The lowest level that is logged while the model is quantized: 0 debug, 1 the level that is
            set, 2 warning, 3 error.
        version: The version of quark, which is written to checkpoints.
        layer_type_quant_config: Class of a module -> config.
        layer_quant_config: Pattern as in `exclude` -> config; the first match applies.
        kv_cache_quant_config: Pattern of key and value projections -> config, whose `output_tensors` is the cache.
        kv_cache_group: Patterns of layers that share the largest of their scales.
        min_kv_scale: The smallest scale of the cache.
        kv_cache_post_rope: Quantize what the cache stores: keys after their norm and rotary embedding. False: quantize
            what the projections give, as AMD Quark does by default.
        shared_scale_groups: Lists of sibling layers, by the last part of their names, that share one global scale
            (NVFP4).
        softmax_quant_spec: The config of attention probabilities.
        quant_mode: `eager_mode` replaces modules, `fx_graph_mode` changes an exported graph.
        quant_flow: `standard`; `per_block` with one block at a time on the GPU; `file2file` without a model in memory.
        gpu_resident_blocks: Number of blocks that stay on the GPU with `per_block`.
        sync_moe_expert_input_amax: Whether the experts of a block share the range of their inputs.
        keep_prequantized_layers: Layers that are quantized already stay unchanged. False is for models without such
            layers.
        weight_format: How the checkpoint from which the config was read stores weights; None for a new config.
        calibrate_all_experts: Calibrate each expert of a mixture with all tokens, instead of those that its router
            sends to it. The outputs of the float model stay the same.

    Raises:
        ConfigError: A field is unknown, missing or of the wrong type.

    Example:
        >>> from quark.torch.quantization import Int8PerTensorSpec
        >>> weight = Int8PerTensorSpec(observer_method="min_max", symmetric=True, is_dynamic=False)
        >>> config = QConfig(global_quant_config=QLayerConfig(weight=weight), exclude=["lm_head"])
    """

    global_quant_config: QLayerConfig
    exclude: list[str] = field(default_factory=list)
    algo_config: list[AlgoConfig] | None = None
    log_severity_level: int | None = 1
    version: str | None = __version__
    layer_type_quant_config: dict[type[nn.Module], QLayerConfig] = field(default_factory=dict)
    layer_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    kv_cache_post_rope: bool = True
    shared_scale_groups: list[list[str]] = field(default_factory=list)
    softmax_quant_spec: QTensorConfig | None = None
    quant_mode: QuantizationMode = QuantizationMode.eager_mode
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    weight_format: str | None = None
    calibrate_all_experts: bool = False

    def __repr__(self) -> str:
        """A short table of what differs from the defaults."""
        rows = {"all layers": self.global_quant_config, **{str(k): v for k, v in self.layer_quant_config.items()}}
        rows |= {kind.__name__: config for kind, config in self.layer_type_quant_config.items()}
        lines = [(name, repr(config)[len("QLayerConfig(") : -1]) for name, config in rows.items()]
        lines += [("exclude", ", ".join(self.exclude))] if self.exclude else []
        lines += [("algorithms", ", ".join(algorithm.__class__.__name__ for algorithm in self.algo_config or []))]
        for entry in fields(self):
            known = entry.name in ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude")
            value = getattr(self, entry.name)
            changed = entry.default_factory is MISSING and value != entry.default
            if not known and changed and entry.name != "algo_config":
                lines.append((entry.name, getattr(value, "name", None) or str(value)))
        return config_table("QConfig", lines)

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        for name in ("exclude", "algo_config", "kv_cache_group"):
            if isinstance(values.get(name), tuple):
                values[name] = list(values[name])
        if isinstance(values.get("algo_config"), AlgoConfig):
            values["algo_config"] = [values["algo_config"]]
        if hasattr(values.get("softmax_quant_spec"), "to_quantization_spec"):
            values["softmax_quant_spec"] = values["softmax_quant_spec"].to_quantization_spec()

    def _check(self) -> None:
        for pattern in self.exclude:
            if pattern.startswith("@") and pattern not in SELECTORS:
                raise ConfigError(f"QConfig.exclude: unknown selector {pattern!r}. {did_you_mean(pattern, SELECTORS)}")
        if self.gpu_resident_blocks < 0 or (self.gpu_resident_blocks and self.quant_flow is not QuantFlow.per_block):
            raise ConfigError(
                f"QConfig.gpu_resident_blocks={self.gpu_resident_blocks} is for quant_flow=QuantFlow.per_block, and at "
                "least 0."
            )

    def get_rotation_config(self) -> RotationConfig | None:
        """Return the first rotation among the algorithms, or None."""
        return next((algo for algo in self.algo_config or [] if isinstance(algo, RotationConfig)), None)

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` of config.json, without "export", which the exporter adds.

        It describes the quantized model: fields that only say how quantization ran are not in it.
        """
        types, algorithms = self.layer_type_quant_config.items(), self.algo_config or []
        whole = [algo.to_dict() for algo in algorithms]
        documented = [algo.documented_dict() for algo in algorithms if algo.is_documented]
        return {
            "quant_method": "quark",
            "quant_mode": self.quant_mode.name,
            "version": self.version,
            "global_quant_config": self.global_quant_config.to_dict(),
            "exclude": list(self.exclude),
            "layer_quant_config": {key: layer.to_dict() for key, layer in self.layer_quant_config.items()},
            "layer_type_quant_config": {key.__name__: layer.to_dict() for key, layer in types},
            "kv_cache_quant_config": {key: layer.to_dict() for key, layer in self.kv_cache_quant_config.items()},
            "kv_cache_post_rope": self.kv_cache_post_rope,
            "softmax_quant_spec": _to_json(self.softmax_quant_spec),
            "algo_config": documented or None,
            **({} if documented == whole else {OWN_ALGORITHMS: whole}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """Read a `quantization_config` of this or an older version; absent and null collections are empty.

        Raises ConfigError for a key that neither is a field nor was ever written.
        """
        known = known_keys(data, cls, _CHECKPOINT_KEYS)
        values = {name: value for name, value in known.items() if value is not None}
        export = as_dict(data.get("export") or {}, "export")
        values = {
            **{k: export[k] for k in ("kv_cache_group", "min_kv_scale", "weight_format") if export.get(k)},
            **values,
        }
        values.setdefault("kv_cache_post_rope", False)  # who does not write it quantizes at the projections
        values["global_quant_config"] = QLayerConfig.from_dict(values.get("global_quant_config", {}))
        for name in ("layer_quant_config", "kv_cache_quant_config"):
            layers = as_dict(values.get(name, {}), name)
            values[name] = {key: QLayerConfig.from_dict(layer) for key, layer in layers.items()}
        types = as_dict(values.get("layer_type_quant_config", {}), "layer_type_quant_config")
        values["layer_type_quant_config"] = {_layer_type(k): QLayerConfig.from_dict(v) for k, v in types.items()}
        if "softmax_quant_spec" in values:
            values["softmax_quant_spec"] = _from_json(values["softmax_quant_spec"])
        if algos := data.get(OWN_ALGORITHMS) or values.get("algo_config"):
            values["algo_config"] = [recorded_algo_config(a) for a in (algos if isinstance(algos, list) else [algos])]
        return cls(**values)

    @staticmethod
    def with_llm_template(
        template: Any,
        scheme: str,
        algorithm: str | list[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: dict[str, str] | None = None,
        layer_type_config: dict[type[nn.Module], str] | None = None,
        exclude_layers: list[str] | None = None,
    ) -> QConfig:
        """`template.get_config(...)`, under its older address."""
        config: QConfig = template.get_config(
            scheme,
            algorithm,
            kv_cache_scheme,
            min_kv_scale,
            attention_scheme,
            layer_config,
            layer_type_config,
            exclude_layers,
        )
        return config


QuantizationConfig = QLayerConfig
Config = QConfig

OWN_ALGORITHMS = "algo_config_of_quark"
"""Key of the algorithms with all of their fields, where AMD Quark's classes lack some of them or of their fields."""
_CHECKPOINT_KEYS = frozenset(
    {
        OWN_ALGORITHMS,
        "quant_method",
        "export",
        "exclude_patterns",
        "torch_dtype",  # of a network of diffusers, whose config.json has no other place for it
        "custom_mode",
        "pack_method",
        "weight_format",
        "weight_merge_groups",
    }
    | {"pre_quant_opt_config", "target_device"}
)
"""Keys of checkpoints of 0.8 to 0.13 that are no fields."""


def _check_layer(config: QLayerConfig) -> None:
    """Raise ConfigError for a list that is no pair, or for static groups of an activation."""
    for name in ("input_tensors", "output_tensors", "weight", "bias"):
        value = getattr(config, name)
        stages: list[QTensorConfig] = value if isinstance(value, list) else [value] if value is not None else []
        if len(stages) not in (1, 2) and value is not None:
            raise ConfigError(f"QLayerConfig.{name}: a list has two stages, got {len(stages)}.")
        if stages and stages[0].is_scale_quant:
            raise ConfigError(
                f"QLayerConfig.{name}: is_scale_quant=True is for the second of two configs; it quantizes the "
                "scales of the first."
            )
        if name in ("input_tensors", "output_tensors"):
            for stage in stages:
                if stage.qscheme is QSchemeType.per_group and stage.is_dynamic is False:
                    raise ConfigError(
                        f"QLayerConfig.{name}: per_group scales of an activation depend on its shape and "
                        "cannot be calibrated. Set is_dynamic=True."
                    )


def _as_configs(value: Any) -> Any:
    """A tensor field with shorthand specs turned into configs; anything else as it came."""
    if hasattr(value, "to_quantization_spec"):
        return value.to_quantization_spec()
    return [_as_configs(item) for item in value] if isinstance(value, (list, tuple)) else value


def _to_json(value: TensorConfigs) -> Any:
    if isinstance(value, list):
        return [config.to_dict() for config in value]
    return None if value is None else value.to_dict()


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [QTensorConfig.from_dict(item) for item in value]
    return None if value is None else QTensorConfig.from_dict(value)


def _layer_type(name: str) -> type[nn.Module]:
    """The class of torch.nn with this name."""
    found = getattr(torch.nn, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    names = [key for key, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    raise ConfigError(f"layer_type_quant_config: torch.nn has no layer {name!r}. {did_you_mean(name, names)}")


def _short(value: TensorConfigs) -> str:
    """A tensor in a few words: "uint4 group 128 asymmetric"."""
    if isinstance(value, list):
        return " of ".join(map(_short, value))
    if value is None:
        return "float"
    scheme = value.qscheme.name.replace("per_", "") if value.qscheme is not None else ""
    size = f" {value.group_size}" if value.group_size else ""
    extra = (" asymmetric" if value.symmetric is False else "") + (" live" if value.is_dynamic else "")
    return f"{value.dtype.name} {scheme}{size}{extra}".replace("  ", " ").strip()


def algorithms_in(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every record of an algorithm in a `QConfig.to_dict()`, of those with the documented fields and with all."""
    return [record for key in ("algo_config", OWN_ALGORITHMS) for record in stored.get(key) or ()]
