"""The documented config classes of the ONNX flow: QLayerConfig (a layer), QConfig (a model). legacy.py has the older.

They are the door: everything wrong is a ConfigError here, and lowering/ turns what passed into Settings. Lists and
dicts given to them are copied; nothing in this package ever changes a config. Users may, and assignments are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quark.checked import checked, known_keys
from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig, AutoMixprecisionConfig
from quark.onnx.config.extra_options import check_options
from quark.onnx.config.legacy import Config, QuantizationConfig
from quark.onnx.config.serialized import as_scope, from_json, to_json
from quark.onnx.config.tensor_specs import QTensorConfig, spec_from_dict

__all__ = ["Config", "QConfig", "QLayerConfig", "QuantizationConfig"]

Args = tuple[tuple[Any, ...], dict[str, Any]]


@checked
@dataclass(eq=False)
class QLayerConfig:
    """What happens to the tensors of a layer. `activation` is an older name of `input_tensors`.

    In `QConfig.global_config`, output tensors follow the input tensors unless they have a spec, and biases follow
    `Int32Bias` and `QuantizeBias`. For single layers, what has no spec follows the global config.
    """

    input_tensors: QTensorConfig | None = None
    weight: QTensorConfig | None = None
    bias: QTensorConfig | None = None
    output_tensors: QTensorConfig | None = None

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
        values = dict(data)
        activation = values.pop("activation", None)
        if values.get("input_tensors") == activation:
            values.pop("input_tensors", None)
        made = {name: spec_from_dict(value) for name, value in known_keys(values, cls).items()}
        return cls(activation=spec_from_dict(activation), **made)


@checked
@dataclass(eq=False)
class QConfig:
    """The quantization of a model. Priority: exclude > specific_layer_config > layer_type_config > global_config.

    Keyword arguments beyond these are extra options; `extra_options={...}` says the same. extra_options.py lists them.

    Attributes:
        global_config: For every node that nothing below names.
        specific_layer_config: Config -> node names, regular expressions ("^" and ".*") or subgraphs ([starts], [ends]).
        layer_type_config: Config -> op types; None keeps them in float.
        exclude: Node names, regular expressions or subgraphs that stay in float.
        algo_config: Algorithms in the order in which they run.
        use_external_data_format: Write weights beside the model.
        extra_options: Everything else.

    Raises:
        ConfigError: a field or an option is unknown, missing or of the wrong type.
    """

    global_config: QLayerConfig
    specific_layer_config: dict[QLayerConfig, list[Any]] = field(default_factory=dict)
    layer_type_config: dict[QLayerConfig | None, list[str]] = field(default_factory=dict)
    exclude: list[Any] = field(default_factory=list)
    algo_config: list[AlgoConfig] = field(default_factory=list)
    use_external_data_format: bool = False
    extra_options: dict[str, Any] = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self,
            global_config: QLayerConfig,
            specific_layer_config: dict[QLayerConfig, list[Any]] | None = None,
            layer_type_config: dict[QLayerConfig | None, list[str]] | None = None,
            exclude: list[Any] | None = None,
            algo_config: list[AlgoConfig] | None = None,
            use_external_data_format: bool = False,
            **kwargs: Any,
        ) -> None: ...

    @classmethod
    def _gather(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Args:
        """Keyword arguments that are no fields become extra options."""
        names = [entry.name for entry in fields(cls)]
        options = kwargs.get("extra_options") or {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"QConfig.extra_options: expected dict, got {options!r}.")
        direct = {name: value for name, value in kwargs.items() if name not in names}
        check_options(direct, "QConfig", names)
        for name in direct:
            if name in options:
                raise ConfigError(f"QConfig: option {name!r} is given twice: directly and in extra_options.")
        kept = {name: value for name, value in kwargs.items() if name in names}
        return args, {**kept, "extra_options": {**options, **direct}}

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        for name, empty in (
            ("specific_layer_config", {}),
            ("layer_type_config", {}),
            ("exclude", []),
            ("algo_config", []),
        ):
            if values.get(name, empty) is None:
                values[name] = empty
        for name in ("exclude", "algo_config"):
            if isinstance(values.get(name), tuple):
                values[name] = list(values[name])
        if isinstance(values.get("algo_config"), AlgoConfig):
            values["algo_config"] = [values["algo_config"]]
        for name in ("specific_layer_config", "layer_type_config"):
            if isinstance(values.get(name), Mapping):
                values[name] = {
                    key: [entry] if isinstance(entry, str) else list(entry) for key, entry in values[name].items()
                }

    def _check(self) -> None:
        check_options(self.extra_options, "QConfig.extra_options")
        if self.global_config.weight is None:
            raise ConfigError("QConfig.global_config: weight has no spec.")
        if self.global_config.input_tensors is None and not self.extra_options.get("WeightsOnly"):
            raise ConfigError("QConfig.global_config: input_tensors has no spec; WeightsOnly=True needs none.")
        for entry in [*self.exclude, *(e for scopes in self.specific_layer_config.values() for e in scopes)]:
            as_scope(entry)

    @staticmethod
    def get_default_config(name: str) -> Config:
        """The named configuration, as a legacy Config of one's own."""
        from quark.onnx.config.presets import get_default_config

        return Config(global_quant_config=get_default_config(name))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON holds it."""
        return {
            "global_config": self.global_config.to_dict(),
            "specific_layer_config": _layers_to_json(self.specific_layer_config),
            "layer_type_config": _layers_to_json(self.layer_type_config),
            "exclude": to_json(self.exclude),
            "algo_config": [_algorithm_to_json(algorithm) for algorithm in self.algo_config],
            "use_external_data_format": self.use_external_data_format,
            "extra_options": to_json(self.extra_options),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """Read what `to_dict` wrote."""
        values = known_keys(data, cls)
        if "global_config" not in values:
            raise ConfigError("QConfig.global_config is required.")
        values["global_config"] = QLayerConfig.from_dict(values["global_config"])
        for name in ("specific_layer_config", "layer_type_config"):
            values[name] = _layers_from_json(values.get(name) or ())
        values["algo_config"] = [_algorithm_from_json(entry) for entry in values.get("algo_config") or ()]
        values["extra_options"] = from_json(values.get("extra_options") or {})
        return cls(**values)


def _layers_to_json(layers: Mapping[Any, Any]) -> list[list[Any]]:
    return [[layer.to_dict() if layer else None, to_json(entries)] for layer, entries in layers.items()]


def _layers_from_json(pairs: Iterable[Any]) -> dict[Any, list[Any]]:
    return {QLayerConfig.from_dict(layer) if layer is not None else None: entries for layer, entries in pairs}


def _algorithm_to_json(algorithm: AlgoConfig) -> dict[str, Any]:
    data = algorithm.to_dict()
    target = data.get("target_layer_config")
    if isinstance(target, QLayerConfig):
        data["target_layer_config"] = target.to_dict()
    elif isinstance(target, Mapping):
        data["target_layer_config"] = _layers_to_json(target)
    elif isinstance(target, (list, tuple)):
        data["target_layer_config"] = [layer.to_dict() for layer in target]
    return {key: to_json(value) for key, value in data.items()}


def _algorithm_from_json(data: Mapping[str, Any]) -> AlgoConfig:
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
        return _layers_from_json(target)
    return target
