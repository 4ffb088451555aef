"""QConfig: the documented config of a model. legacy.py has the older ones.

It is the door: everything wrong is a ConfigError here, and lowering/ turns what passed into Settings. Lists and
dicts given to it are copied; nothing in this package ever changes a config. Users may, and assignments are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quark.base.checked import as_list, checked, config_table, known_keys
from quark.errors import ConfigError
from quark.onnx.config.algo_configs import AlgoConfig
from quark.onnx.config.extra_options import check_options
from quark.onnx.config.layer_config import (
    QLayerConfig,
    algorithm_from_json,
    algorithm_to_json,
    layers_from_json,
    layers_to_json,
)
from quark.onnx.config.legacy import Config, QuantizationConfig
from quark.onnx.config.preset_rows import make_legacy
from quark.onnx.config.serialized import as_scope, from_json, to_json

__all__ = ["Config", "QConfig", "QLayerConfig", "QuantizationConfig"]


@checked
@dataclass(eq=False)
class QConfig:
    """How the nodes of a model are quantized.

    If several fields name a node, the first of these applies: `exclude`, `specific_layer_config`, `layer_type_config`,
    `global_config`. Any further keyword is an extra option, as in `QConfig(layer, WeightsOnly=True)`;
    `extra_options={"WeightsOnly": True}` means the same.

    Attributes:
        global_config: The config of every node that no other field names. Its `weight` is required, and its
            `input_tensors` too, unless `WeightsOnly=True`.
        specific_layer_config: Config -> list of nodes: names, regular expressions ("^" and ".*"), or subgraphs as
            ([first nodes], [last nodes]).
        layer_type_config: Config -> list of op types; the key None keeps them in float.
        exclude: Nodes that stay in float, given as in `specific_layer_config`.
        algo_config: Algorithms in the order in which they run.
        use_external_data_format: Write the weights to a file beside the model, which models above 2 GB need.
        extra_options: All other options by name.

    Raises:
        ConfigError: A field or an option is unknown, missing or of the wrong type.

    Example:
        >>> from quark.onnx import Int8Spec, QLayerConfig, UInt8Spec
        >>> config = QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec()), exclude=["/head/Gemm"])
    """

    global_config: QLayerConfig
    specific_layer_config: dict[QLayerConfig, list[Any]] = field(default_factory=dict)
    layer_type_config: dict[QLayerConfig | None, list[str]] = field(default_factory=dict)
    exclude: list[Any] = field(default_factory=list)
    algo_config: list[AlgoConfig] = field(default_factory=list)
    use_external_data_format: bool = False
    extra_options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """A short table of what is said; defaults are left out."""
        rows = [("all nodes", repr(self.global_config))]
        rows += [(", ".join(map(str, names)), repr(config)) for config, names in self.specific_layer_config.items()]
        types = self.layer_type_config.items()
        rows += [(", ".join(names), "float" if config is None else repr(config)) for config, names in types]
        rows += [("exclude", ", ".join(map(str, self.exclude)))]
        rows += [("algorithms", ", ".join(type(algorithm).__name__ for algorithm in self.algo_config))]
        rows += [("use_external_data_format", "True")] if self.use_external_data_format else []
        return config_table("QConfig", [*rows, *((name, str(value)) for name, value in self.extra_options.items())])

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
    def _gather(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        given = {name: value for name, value in kwargs.items() if name in names}
        return args, {**given, "extra_options": {**options, **direct}}

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
        return Config(make_legacy(name, QuantizationConfig))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON holds it."""
        return {
            "global_config": self.global_config.to_dict(),
            "specific_layer_config": layers_to_json(self.specific_layer_config),
            "layer_type_config": layers_to_json(self.layer_type_config),
            "exclude": to_json(self.exclude),
            "algo_config": [algorithm_to_json(algorithm) for algorithm in self.algo_config],
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
            values[name] = layers_from_json(values.get(name) or (), f"{cls.__name__}.{name}")
        algorithms = as_list(values.get("algo_config") or (), f"{cls.__name__}.algo_config")
        values["algo_config"] = [algorithm_from_json(entry) for entry in algorithms]
        values["extra_options"] = from_json(values.get("extra_options") or {})
        return cls(**values)
