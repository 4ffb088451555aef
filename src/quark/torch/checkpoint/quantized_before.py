"""Quantized layers that a model has already, when the rest of it is quantized: they stay as they are."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quark.core.spec import LayerSpec
from quark.errors import ConfigError, NotSupportedError
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.plan import Plan

_QuantizedBefore = dict[str, LayerSpec]
"""Full name of a layer -> what is quantized in it."""


def layers_quantized_before(model: nn.Module, kept: bool = True) -> _QuantizedBefore:
    """The quantized layers of a model that was loaded from a checkpoint, or quantized in part and frozen.

    Args:
        model: Any model.
        kept: Whether they are to stay as they are.

    Raises:
        ConfigError: A layer's weight is not frozen: its float values are still there, and may be changed.
        NotSupportedError: They are not to stay. Or more than weights and inputs is quantized, which the config of the
            rest cannot say too.
    """
    before = {}
    for name, layer in quantized_layers(model).items():
        weight = layer.quantizer("weight")
        if isinstance(weight, FakeQuantize) and weight.mode is not Mode.frozen:
            raise ConfigError(
                f"The model holds quantized layers already ({name}), which are not frozen. Possible: freeze(model) "
                "first, so that what is left in float can be quantized; or the float model."
            )
        if not kept:
            raise NotSupportedError(
                f"keep_prequantized_layers=False: {name} is quantized, and to quantize it anew is not part of this "
                "version. Possible: leave it at its default, or the float model."
            )
        if layer.spec.output is not None:
            raise NotSupportedError(
                f"{name}: a model whose KV cache or outputs are quantized cannot be quantized further. Possible: the "
                "float model."
            )
        before[name] = replace(layer.spec, weight=weight.spec) if isinstance(weight, StoredTensor) else layer.spec
    return before


def with_quantized_before(config: QConfig, plan: Plan, before: _QuantizedBefore) -> tuple[QConfig, Plan]:
    """The config and the plan of the whole model, given those of what was left in float."""
    if not before:
        return config, plan
    by_name = {name: config_of_layer(spec) for name, spec in before.items()}
    whole = replace(config, layer_quant_config=by_name | config.layer_quant_config)
    return whole, replace(plan, layers=before | plan.layers)
