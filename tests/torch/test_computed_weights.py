"""A weight that hooks or parametrizations compute is refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm, spectral_norm

from quark.core.spec import LayerSpec, spec
from quark.errors import StructureError
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import Mlp, mlp

X = torch.linspace(-1, 1, 256).reshape(2, 128)
Change = Callable[[nn.Module], object]
CONFIG = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int8"))))

COMPUTED: dict[str, tuple[Change, Change]] = {
    "prune": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
    "prune bias": (lambda layer: prune.l1_unstructured(layer, "bias", 0.5), lambda layer: prune.remove(layer, "bias")),
    "old spectral norm": (spectral_norm, remove_spectral_norm),
    "old weight norm": (lambda layer: torch.nn.utils.weight_norm(layer), remove_weight_norm),
    "weight norm": (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    "orthogonal": (parametrizations.orthogonal, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_weight_is_refused_and_taken_once_it_is_a_parameter(kind: str) -> None:
    make, remove = COMPUTED[kind]
    model: Mlp = mlp()
    make(model.up)
    expected = model.eval()(X)
    with pytest.raises(StructureError, match=r"^up\.(weight|bias) is no parameter .*remove_parametrizations"):
        ModelQuantizer(CONFIG).quantize_model(model)
    assert not quantized_layers(model) and torch.equal(model(X), expected)
    remove(model.up)
    ModelQuantizer.freeze(ModelQuantizer(CONFIG).quantize_model(model))
    assert set(quantized_layers(model)) == {"up", "down"}


def test_a_computed_weight_of_a_layer_that_stays_in_float_is_left_alone() -> None:
    model = mlp()
    parametrizations.weight_norm(model.up)
    ModelQuantizer(QConfig(global_quant_config=CONFIG.global_quant_config, exclude=["up"])).quantize_model(model)
    assert set(quantized_layers(model)) == {"down"}
