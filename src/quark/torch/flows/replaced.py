"""A float model becomes one with quantized layers, and is what it was if anything fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from quark.errors import ConfigError
from quark.torch.config.config import QConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.cache_rules import cached_layers
from quark.torch.layers.attention.probabilities import quantize_attention
from quark.torch.layers.low_rank import undo_branch
from quark.torch.layers.online_rotation import undo_input_rotation
from quark.torch.layers.replace import replace_layer, set_submodule
from quark.torch.model.passes import prepare, undo
from quark.torch.plan import Plan, chooser


@contextmanager
def prepared(model: nn.Module, config: QConfig) -> Iterator[None]:
    """Run the passes on what the config quantizes; undo them if the body fails."""
    originals = prepare(model, chooser(config, model).wanted)
    try:
        yield
    except BaseException:
        undo(model, originals)
        raise


@contextmanager
def replaced(model: nn.Module, plan: Plan) -> Iterator[dict[str, QuantLayer]]:
    """Replace the layers of the plan; put the float layers back if the body fails."""
    if "" in plan.layers:
        raise ConfigError("The model itself is a single layer, which cannot be replaced in place; wrap it in a module.")
    originals = {name: model.get_submodule(name) for name in plan.layers}
    layers = {name: replace_layer(model, name, spec) for name, spec in plan.layers.items()}
    try:
        yield layers
    except BaseException:
        for name, module in originals.items():
            undo_branch(layers[name])
            undo_input_rotation(layers[name])
            module._parameters = layers[name]._parameters
            set_submodule(model, name, module)
        raise


@contextmanager
def attention_quantized(
    model: nn.Module, config: QConfig, plan: Plan, layers: Mapping[str, QuantLayer]
) -> Iterator[None]:
    """Add what acts inside attention; take it away again if the body fails."""
    undo_attention = quantize_attention(model, cached_layers(config, layers), plan.probabilities)
    try:
        yield
    except BaseException:
        undo_attention()
        raise
