"""The documented algorithm configs (`algo_config=[...]`): parameters only, and their place among the extra options.

Each class knows the option keys that say the same (`keys`), and so comes from them (`from_options`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from quark.base.checked import as_dict, checked, known_keys
from quark.core.names.registry import Registry
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.onnx.operators import LAYERS

__all__ = [
    "AdaQuantConfig", "AdaRoundConfig", "AlgoConfig", "AutoMixprecisionConfig", "BiasCorrectionConfig", "CLEConfig",
    "GPTQConfig", "QuarotConfig", "SmoothQuantConfig",
]  # fmt: skip


A_ = TypeVar("A_", bound="AlgoConfig")

ALGO_CONFIGS: Registry[type[AlgoConfig]] = Registry("algorithm")
_ACRONYMS = {"cle": "CLE", "gds": "GDS", "lr": "LR", "mse": "MSE", "qdq": "QDQ"}
TUNED = [*LAYERS, "InstanceNormalization", "LayerNormalization"]


_TARGET = "target_layer_config=QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())"
_LIMIT = "metric_threshold, with metric_default or metric_evaluate_fn, and metric_optimize_object"
FORMER_MIX_FIELDS = {
    "target_quant_type": _TARGET,
    "act_target_quant_type": _TARGET,
    "weight_target_quant_type": _TARGET,
    "bias_target_quant_type": _TARGET,
    "output_index": "metric_output_index",
    "l2_target": _LIMIT,
    "top1_acc_target": _LIMIT,
    "evaluate_function": "metric_evaluate_fn",
    "num_target": "include_layers, or metric_threshold",
    "target_tensors": "include_layers",
    "target_indices": "include_layers",
    "exclude_indices": "exclude_layers",
    "auto_mix_use_fast_ft": "AdaRoundConfig or AdaQuantConfig after it in algo_config",
}
"""Fields of mixed precision in versions before 0.13 of the documented system -> what says it today."""


@dataclass
class AlgoConfig:
    """Base of all algorithm configs.

    Attributes:
        name: The algorithm, as `to_dict` writes it.
        keys: Field -> extra option that says the same: `num_batches` is NumBatches, unless the class says otherwise.
        flag: Options that are set whenever the algorithm runs.
        nest: The option that holds the others as a dict, or "".
    """

    name: ClassVar[str] = ""
    keys: ClassVar[Mapping[str, str]] = {}
    flag: ClassVar[Mapping[str, Any]] = {}
    nest: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The name and the parameters that differ from their defaults."""
        changed = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            factory = entry.default_factory
            if value != (entry.default if factory is dataclasses.MISSING else factory()):
                changed[entry.name] = value
        return {"name": self.name, **changed}

    @classmethod
    def from_options(cls: type[A_], options: Mapping[str, Any]) -> A_:
        """The config that these options (the inside of `nest`, where there is one) describe.

        Raises:
            ConfigError: an unknown key or a wrong value.
        """
        names = {key: name for name, key in cls.keys.items()}
        values = {}
        for key, value in options.items():
            if key in cls.flag:
                continue
            if key not in names:
                where = cls.nest or cls.__name__
                raise ConfigError(f"{where} has no entry {key!r}. {did_you_mean(key, [*names, *cls.flag])}")
            values[names[key]] = value
        return cls(**values)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AlgoConfig:
        """Read what `to_dict` wrote; the class follows from "name"."""
        if "name" not in as_dict(data, "algo_config"):
            raise ConfigError(f"An algorithm needs a 'name', one of: {', '.join(ALGO_CONFIGS)}. Got {dict(data)!r}.")
        kind = ALGO_CONFIGS[data["name"]]
        return kind(**known_keys(data, kind, frozenset({"name"})))

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        """Take ints for floats, and tuples and lists for each other, as Python code writes them."""
        for entry in dataclasses.fields(cls):
            value, kind = values.get(entry.name), str(entry.type)
            if type(value) is int and kind.startswith("float"):
                values[entry.name] = float(value)
            elif isinstance(value, list) and kind.startswith("tuple"):
                values[entry.name] = tuple(value)
            elif isinstance(value, tuple) and kind.startswith("list"):
                values[entry.name] = list(value)


@dataclass_transform(field_specifiers=(field,))
def _algorithm(cls: type[A_]) -> type[A_]:
    """Make a checked dataclass of an algorithm's parameters, name its options and register it."""
    config = checked(dataclass(cls))
    if "keys" not in vars(config):
        names = [entry.name for entry in dataclasses.fields(config)]
        words = {name: [_ACRONYMS.get(word, word.capitalize()) for word in name.split("_")] for name in names}
        config.keys = {name: "".join(parts) for name, parts in words.items()}
    ALGO_CONFIGS.register(config.name, config)
    return config


@_algorithm
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant (Xiao et al. 2022): outliers of activations move into weights; alpha is the share that moves."""

    name: ClassVar[str] = "smooth_quant"
    keys: ClassVar[Mapping[str, str]] = {"alpha": "SmoothAlpha"}
    alpha: float = 0.5


@_algorithm
class CLEConfig(AlgoConfig):
    """Cross-layer equalization (Nagel et al. 2019): consecutive layers exchange channel scales.

    `cle_through_gates`: also where a hard-swish, a SiLU or squeeze and excitation stands between two layers.
    """

    name: ClassVar[str] = "cle"
    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7
    cle_through_gates: bool = True


@_algorithm
class BiasCorrectionConfig(AlgoConfig):
    """Biases absorb the mean error of their layer's output."""

    name: ClassVar[str] = "bias_correction"
    flag: ClassVar[Mapping[str, Any]] = {"BiasCorrection": True}


@_algorithm
class GPTQConfig(AlgoConfig):
    """GPTQ (Frantar et al. 2022): column by column, the error spread over the columns that follow."""

    name: ClassVar[str] = "gptq"
    nest: ClassVar[str] = "GPTQParams"
    flag: ClassVar[Mapping[str, Any]] = {"UseGPTQ": True}
    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True


@_algorithm
class QuarotConfig(AlgoConfig):
    """QuaRot (Ashkboos et al. 2024): Hadamard rotations folded into weights."""

    name: ClassVar[str] = "quarot"
    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None


@dataclass
class _FastFinetune(AlgoConfig):
    """The fields of both AdaRound and AdaQuant: layer by layer, gradient descent on the output's error."""

    nest: ClassVar[str] = "FastFinetune"
    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1000000000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: tuple[float, float] | tuple[()] | None = None
    target_op_type: list[str] = field(default_factory=lambda: list(TUNED))
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | None = None
    log_period: int = 100
    ref_model_path: str | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False


@_algorithm
class AdaRoundConfig(_FastFinetune):
    """AdaRound (Nagel et al. 2020): learns for each weight whether it rounds up or down."""

    name: ClassVar[str] = "adaround"
    flag: ClassVar[Mapping[str, Any]] = {"OptimAlgorithm": "adaround"}


@_algorithm
class AdaQuantConfig(_FastFinetune):
    """AdaQuant (Hubara et al. 2020): learns the weights themselves through the rounding.

    Attributes:
        relative_rate: Instead of `learning_rate`: the same as a share of the scale of each weight, where that has one.
            One figure then serves weights of any size and of any number of bits (of this package).
    """

    name: ClassVar[str] = "adaquant"
    flag: ClassVar[Mapping[str, Any]] = {"OptimAlgorithm": "adaquant"}
    num_iterations: int = 3000
    learning_rate: float = 1e-5
    relative_rate: float | None = None


@_algorithm
class AutoMixprecisionConfig(AlgoConfig):
    """Gives layers another precision than the global one, the least damaging first, until a limit is reached.

    Attributes:
        target_layer_config: A QLayerConfig; a list of them, of which each layer takes the least damaging; or
            {QLayerConfig: [node names]}, where one may map to []: all layers that no other names.
        target_op_type: Op types that take part.
        subgraph_json: File that groups nodes: they change together. The rest is one more group, "__ungrouped__".
        include_layers, exclude_layers: Names or patterns of nodes, as in QConfig.exclude; include None or []: all.
        data_size: Most samples that models are scored on; 0 for all.
        metric_output_index: The output of the model that is compared.
        metric_distance_fn: (float, quantized) -> distance, less is better. Each is a list with the outputs of each
            sample, a list of one array.
        metric_evaluate_fn: Instead: (outputs) -> quality, more is better; the distance is what quantization costs.
        metric_default: Instead: mean over samples of "l2", "kl" (of softmax), "cosine" (1 - cosine), "sqnr" or "psnr"
            (negative dB).
        metric_threshold: Largest distance; 0 for none, None to measure only and change nothing.
        metric_optimize_object: "speed": change layers while the distance stays within the threshold. "quality":
            change layers until it is.
        sensitivity_cache_file: JSON file of what was measured, written layer by layer and reused. A layer whose
            "enabled" is set to false there stays as it is.
        worker_num: Threads that measure; the result does not depend on it.
        dual_quant_nodes: Two consecutive pairs of Q/DQ where precisions meet.
        no_input_qdq_shared: Leave layers alone whose input is read by another node too.
        shared_param_mode: "propagate": what shares a scale with an input or output of a changed layer (Transpose,
            MaxPool) changes with it; "unshare": it does not, and has a scale of its own.
        size_budget: Limit of the bytes of all weights, or, up to 1, of their share of the float weights (of this
            package). Layers that become smaller change until it holds; of those that grow, those that fit do.
    """

    name: ClassVar[str] = "auto_mixprecision"
    nest: ClassVar[str] = "AutoMixprecision"
    target_layer_config: Any
    target_op_type: tuple[str, ...] = LAYERS
    subgraph_json: str | None = None
    include_layers: list[str] | None = None
    exclude_layers: list[str] | None = None
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Callable[..., Any] | None = None
    metric_evaluate_fn: Callable[..., Any] | None = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: str | None = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"
    size_budget: float | None = None

    @classmethod
    def _gather(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name in kwargs:
            if name in FORMER_MIX_FIELDS:
                possible = FORMER_MIX_FIELDS[name]
                raise NotSupportedError(
                    f"AutoMixprecisionConfig.{name} belongs to versions before 0.13. Possible: {possible}."
                )
        return args, kwargs

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        super()._accept(values)
        for name in ("subgraph_json", "sensitivity_cache_file"):
            if isinstance(values.get(name), os.PathLike):
                values[name] = os.fspath(values[name])

    def _check(self) -> None:
        for name, possible in {
            "metric_default": ("l2", "kl", "cosine", "sqnr", "psnr"),
            "metric_optimize_object": ("speed", "quality"),
            "shared_param_mode": ("propagate", "unshare"),
        }.items():
            value = getattr(self, name)
            if value not in possible:
                raise ConfigError(f"AutoMixprecisionConfig.{name}: {value!r}. {did_you_mean(value, possible)}")
        for name, least in {"data_size": 0, "metric_output_index": 0, "worker_num": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"AutoMixprecisionConfig.{name}={getattr(self, name)}: it must be {least} or more.")
        if self.metric_distance_fn is not None and self.metric_evaluate_fn is not None:
            raise ConfigError("AutoMixprecisionConfig: give metric_distance_fn or metric_evaluate_fn, not both.")
        if self.size_budget is not None and (self.size_budget <= 0 or self.metric_threshold is None):
            raise ConfigError(
                f"AutoMixprecisionConfig.size_budget={self.size_budget}: bytes, or a share of the float weights up to "
                "1; not together with metric_threshold=None, which changes nothing."
            )


from_dict = AlgoConfig.from_dict
