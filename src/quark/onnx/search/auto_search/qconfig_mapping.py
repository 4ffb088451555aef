"""Makes a QConfig of the parameters that a flat search space gives."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from quark.errors import ConfigError, did_you_mean
from quark.onnx.config import tensor_specs
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, AlgoConfig, CLEConfig
from quark.onnx.config.config import QConfig
from quark.onnx.config.enums import CalibMethod, QuantGranularity, ScaleType
from quark.onnx.config.layer_config import QLayerConfig
from quark.onnx.config.tensor_specs import QTensorConfig

SPECS: Mapping[str, type[QTensorConfig]] = {
    name: getattr(tensor_specs, name) for name in tensor_specs.__all__ if name.endswith("Spec")
}
ENUMS: Mapping[str, type[Enum]] = {
    "calibration_method": CalibMethod,
    "scale_type": ScaleType,
    "quant_granularity": QuantGranularity,
}
ALGORITHMS: Mapping[str, type[AlgoConfig]] = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
JOINT = "NumIterLR"
"""A parameter that stands for two: [num_iterations, learning_rate]."""


def qconfig_of(params: Mapping[str, Any]) -> QConfig:
    """The QConfig of one choice of a flat space; names that are no parts of it are extra options.

    Raises:
        ConfigError: A name or value is unknown.
    """
    rest = dict(params)
    weight = _spec(rest.pop("weight", None), rest.pop("weight_params", {}), "weight")
    activation = _spec(rest.pop("activation", None), rest.pop("activation_params", {}), "activation")
    tuning = {name: rest.pop(f"{name}_params", {}) for name in ALGORITHMS}
    algorithms: list[AlgoConfig] = []
    equalize, equalizing = rest.pop("cle_algo", None), rest.pop("cle_params", {})
    if equalize not in (None, "cle"):
        raise ConfigError(f"cle_algo: {equalize!r}; possible: 'cle' or None.")
    if equalize == "cle":
        algorithms.append(CLEConfig(**equalizing))
    learned = rest.pop("algorithms", None)
    if learned is not None:
        if learned not in ALGORITHMS:
            raise ConfigError(f"algorithms: {learned!r}. {did_you_mean(learned, ALGORITHMS)}")
        algorithms.append(ALGORITHMS[learned](**_unjoined(tuning[learned])))
    exclude = rest.pop("exclude", None)
    return QConfig(
        QLayerConfig(input_tensors=activation, weight=weight),
        specific_layer_config=rest.pop("specific_layer_config", None),
        layer_type_config=rest.pop("layer_type_config", None),
        exclude=exclude if exclude is None or isinstance(exclude, list) else [exclude],
        algo_config=algorithms,
        use_external_data_format=rest.pop("use_external_data_format", False),
        extra_options=rest,
    )


def _spec(name: Any, params: Mapping[str, Any], where: str) -> QTensorConfig | None:
    if name is None:
        return None
    if name not in SPECS:
        raise ConfigError(f"{where}: {name!r}. {did_you_mean(str(name), SPECS)}")
    values = dict(params)
    for field, kind in ENUMS.items():
        value = values.get(field)
        if isinstance(value, str):
            if value not in kind.__members__:
                raise ConfigError(f"{where}_params.{field}: {value!r}. {did_you_mean(value, kind.__members__)}")
            values[field] = kind[value]
    return SPECS[name](**values)


def _unjoined(params: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(params)
    if JOINT in values:
        values["num_iterations"], values["learning_rate"] = joint(values.pop(JOINT))
    return values


def joint(value: Any) -> tuple[Any, Any]:
    """Iterations and learning rate of a pair. Raises ConfigError for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(f"{JOINT}: {value!r}; possible: [iterations, learning rate].")
    return value[0], value[1]
