"""QLayerConfig: the specs of a layer, and the forms of several layers as JSON holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from quark.base.checked import as_dict, as_list, checked, known_keys
from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig, AutoMixprecisionConfig
from quark.onnx.config.serialized import to_json
from quark.onnx.config.tensor_specs import QTensorConfig, spec_from_dict

__all__ = ["QLayerConfig"]

Args = tuple[tuple[Any, ...], dict[str, Any]]


@checked
@dataclass(eq=False)
class QLayerConfig:
    """The specs of the tensors of a layer. `activation` is an older name of `input_tensors`.

    In `QConfig.global_config`, output tensors follow the input tensors unless they have a spec, and biases follow
    `Int32Bias` and `QuantizeBias`. For single layers, what has no spec follows the global config.
    """

    input_tensors: QTensorConfig | None = None
    weight: QTensorConfig | None = None
    bias: QTensorConfig | None = None
    output_tensors: QTensorConfig | None = None

    def __repr__(self) -> str:
        """One line: what each tensor becomes; what has no spec is left out."""
        specs = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"QLayerConfig({'; '.join(f'{name}: {spec!r}' for name, spec in specs.items() if spec is not None)})"

    if TYPE_CHECKING:

        def __init__(
            self,
            input_tensors: QTensorConfig | None = None,
            activation: QTensorConfig | None = None,
            weight: QTensorConfig | None = None,
            bias: QTensorConfig | None = None,
            output_tensors: QTensorConfig | None = None,
        ) -> None: ...

    @classmethod
    def _gather(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Args:
        """Bind `activation`, which stands second by position, to `input_tensors`."""
        kwargs = dict(kwargs)
        if len(args) > 1:
            names = ("input_tensors", "activation", "weight", "bias", "output_tensors")
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        activation = kwargs.pop("activation", None)
        if activation is not None:
            if args or kwargs.get("input_tensors") is not None:
                raise ConfigError("QLayerConfig: activation is another name of input_tensors; give one of them.")
            kwargs["input_tensors"] = activation
        return args, kwargs

    def _check(self) -> None:
        if all(value is None for value in vars(self).values()):
            raise ConfigError("QLayerConfig: no tensor has a spec; give at least input_tensors or weight.")

    @property
    def activation(self) -> QTensorConfig | None:
        """The older name of `input_tensors`."""
        return self.input_tensors

    @activation.setter
    def activation(self, value: QTensorConfig | None) -> None:
        self.input_tensors = value

    def to_dict(self) -> dict[str, Any]:
        """The tensors that have a spec."""
        tensors = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: spec.to_dict() for name, spec in tensors.items() if spec is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QLayerConfig:
        """Read what `to_dict` wrote, or a dict with `activation`."""
        values = as_dict(data, cls.__name__)
        activation = values.pop("activation", None)
        if values.get("input_tensors") == activation:
            values.pop("input_tensors", None)
        specs = {name: spec_from_dict(value) for name, value in known_keys(values, cls).items()}
        return cls(activation=spec_from_dict(activation), **specs)


def layers_to_json(layers: Mapping[Any, Any]) -> list[list[Any]]:
    return [[layer.to_dict() if layer else None, to_json(entries)] for layer, entries in layers.items()]


def layers_from_json(pairs: Any, where: str) -> dict[Any, list[Any]]:
    """The inverse. Raises ConfigError, which says where they stand, for what is no list of pairs."""
    layers = {}
    for pair in as_list(pairs, where):
        if len(as_list(pair, where)) != 2:
            raise ConfigError(f"{where}: expected pairs of a config and names, got {pair!r:.80}.")
        layers[None if pair[0] is None else QLayerConfig.from_dict(pair[0])] = pair[1]
    return layers


def algorithm_to_json(algorithm: AlgoConfig) -> dict[str, Any]:
    data = algorithm.to_dict()
    target = data.get("target_layer_config")
    if isinstance(target, QLayerConfig):
        data["target_layer_config"] = target.to_dict()
    elif isinstance(target, Mapping):
        data["target_layer_config"] = layers_to_json(target)
    elif isinstance(target, (list, tuple)):
        data["target_layer_config"] = [layer.to_dict() for layer in target]
    return {key: to_json(value) for key, value in data.items()}


def algorithm_from_json(data: Mapping[str, Any]) -> AlgoConfig:
    data = as_dict(data, "algo_config")
    if data.get("name") != AutoMixprecisionConfig.name or "target_layer_config" not in data:
        return AlgoConfig.from_dict(data)
    return AlgoConfig.from_dict({**data, "target_layer_config": target_layers(data["target_layer_config"])})


def target_layers(target: Any) -> Any:
    """The target_layer_config of mixed precision with objects where JSON has dicts; others stay as they are."""
    if isinstance(target, Mapping) and target and all(isinstance(key, str) for key in target):
        return QLayerConfig.from_dict(target)
    if isinstance(target, (list, tuple)) and target and all(isinstance(layer, Mapping) for layer in target):
        return [QLayerConfig.from_dict(layer) for layer in target]
    if isinstance(target, (list, tuple)) and target and all(isinstance(pair, (list, tuple)) for pair in target):
        return layers_from_json(target, "target_layer_config")
    return target
