"""QuantizeOnLoad: what transformers and diffusers are given as `quantization_config` to quantize while they load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from quark.base.checked import as_dict, as_list
from quark.errors import ConfigError
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate, default_exclusions
from quark.torch.config.lowering import lower_layer


class OnLoad(str, Enum):
    """The name of the quantizer in the tables of both libraries; diffusers asks for its `value`."""

    METHOD = "quark_on_load"


@dataclass(frozen=True)
class QuantizeOnLoad:
    """Quantizes a float folder while transformers or diffusers loads it, one layer at a time.

    The model is that of `quark.quantize(folder, scheme, ...)`, loaded. It never lies in memory as a whole in float.

    Args:
        scheme: Name of a scheme that needs no calibration data; `quark schemes` lists all.
        exclude: Patterns of layers that stay in float, beside those that do by default.
        layers: Pattern -> scheme, for some layers.

    Raises:
        ConfigError: A scheme is unknown, or has static scales, which need calibration data.

    Example:
        >>> config = QuantizeOnLoad("int8_wo", exclude=["*.o_proj"], layers={"*.down_proj": "fp8_wo"})
        >>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)  # doctest: +SKIP
    """

    scheme: str
    exclude: Sequence[str] = ()
    layers: Mapping[str, str] = field(default_factory=dict)

    quant_method: ClassVar[OnLoad] = OnLoad.METHOD

    def __post_init__(self) -> None:
        # Its own copies, so that later changes of the user's objects have no effect.
        exclude = [self.exclude] if isinstance(self.exclude, str) else as_list(self.exclude, "exclude")
        object.__setattr__(self, "exclude", exclude)
        object.__setattr__(self, "layers", as_dict(self.layers, "layers"))
        self._refuse_data(self.config())
        # transformers looks quantizers up in a table; a second to import, which whoever loads a model spends anyway.
        from quark.torch.flows.on_load.of_transformers import register

        register(self.quant_method.value)

    def config(self) -> QConfig:
        """The config of the layers of a model. Raises ConfigError for an unknown scheme."""
        return LLMTemplate.get("auto").get_config(
            self.scheme, layer_config=self.layers, exclude_layers=[*default_exclusions("auto"), *self.exclude]
        )

    def _refuse_data(self, config: QConfig) -> None:
        """Raise ConfigError for a scheme whose inputs or outputs have static scales."""
        chosen = {self.scheme: config.global_quant_config}
        chosen |= {self.layers[pattern]: layer for pattern, layer in config.layer_quant_config.items()}
        for name, layer in chosen.items():
            if lower_layer(layer).needs_data:
                raise ConfigError(
                    f"The scheme {name} has static scales, which need calibration data, and loading runs no model. "
                    f"Possible: `quark quantize FOLDER --scheme {name} --calib DATA -o OUT`, or a weight-only or "
                    "dynamic scheme."
                )

    def to_dict(self) -> dict[str, Any]:
        """The fields, as a library writes them beside the config of a model."""
        return {
            "quant_method": self.quant_method.value, "scheme": self.scheme, "exclude": [*self.exclude],
            "layers": {**self.layers},
        }  # fmt: skip
