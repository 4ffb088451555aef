"""The error of each layer, also where the quantized model was rotated or scaled: the float layer is moved alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from quark.core.metrics import kl_by_row
from quark.errors import CalibrationError, ConfigError
from quark.torch import LLMTemplate, ModelQuantizer, layer_errors
from quark.torch.config.algo_configs import AWQConfig, RotationConfig, SmoothQuantConfig
from tests.models.families import family

IDS = [torch.randint(3, 64, (1, 48), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def quantized(model: Any, scheme: str, *algorithms: Any) -> Any:
    config = LLMTemplate.get("auto").get_config(scheme)
    config.algo_config = list(algorithms)
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(copy.deepcopy(model), IDS[:2]))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "algorithm",
    [RotationConfig(), RotationConfig(r2=True, r4=True), AWQConfig(), SmoothQuantConfig(alpha=0.5)],
    ids=["R1", "R1, R2, R4", "AWQ", "SmoothQuant"],
)
def test_layers_that_were_moved_have_the_error_of_their_codes(kind: str, algorithm: Any) -> None:
    """Without the moves they have -3 dB where they were rotated, and less than 20 where they were scaled."""
    model = family(kind)
    plain, moved = (layer_errors(model, quantized(model, "int8_wo", *words), IDS[2:]) for words in ((), (algorithm,)))
    worst = {name: min(getattr(plain.layers[each], name) for each in plain.layers) for name in ("weight", "output")}
    for layer, found in moved.layers.items():
        assert found.weight > worst["weight"] - 2, (layer, found)
        assert found.output > worst["output"] - 2, (layer, found)


def test_what_only_lost_much_counts_as_it_is() -> None:
    """Codes of two bits, many of them 0, are no move."""
    model = family("llama")
    found = layer_errors(model, quantized(model, "uint2_wo_64"), IDS[2:])
    assert all(5 < each.weight < 10 for each in found.layers.values())
    assert min(each.output for each in found.layers.values()) < 0


@pytest.mark.parametrize("algorithms", [(), (RotationConfig(r2=True),)])
def test_a_layer_alone_costs_what_the_model_loses_with_it_alone(algorithms: tuple[Any, ...]) -> None:
    model, name = family("llama"), "model.layers.0.self_attn.v_proj"
    after = quantized(model, "uint4_wo_32", *algorithms)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    found = layer_errors(model, after, IDS[2:], alone=True)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    costs = [found.layers[each].alone for each in found.worst]
    assert costs == sorted(costs, reverse=True) and found.worst[0] in str(found)  # type: ignore[type-var]
    assert "KL nats" in found._repr_html_() and found.heat_map().startswith("<svg") and "<svg" in found._repr_html_()
    if not algorithms:
        single = copy.deepcopy(model)
        single.get_submodule(name).weight = torch.nn.Parameter(after.get_submodule(name).quantized_weight())
        with torch.no_grad():
            pairs = [(model(ids).logits[0], single(ids).logits[0]) for ids in IDS[2:]]
        wanted = sum(float(kl_by_row(*pair).mean()) for pair in pairs) / len(pairs)
        assert found.layers[name].alone == pytest.approx(wanted, rel=1e-3)
    else:  # as much as without the rotation, where a layer that is not moved back would cost a hundred times as much
        plain = layer_errors(model, quantized(model, "uint4_wo_32"), IDS[2:], alone=True)
        assert max(costs) < 3 * max(each.alone for each in plain.layers.values())  # type: ignore[type-var,operator]


def test_experts_take_the_form_of_the_quantized_model_only_meanwhile() -> None:
    model = family("qwen3_moe")
    names = [name for name, _ in model.named_modules()]
    found = layer_errors(model, quantized(model, "int8_wo"), IDS[2:])
    assert "model.layers.0.mlp.experts.0.up_proj" in found.layers
    assert [name for name, _ in model.named_modules()] == names


def test_what_cannot_be_compared_is_refused() -> None:
    model = family("llama")
    after = quantized(model, "int8_wo")
    with pytest.raises(ConfigError, match="no quantized layer"):
        layer_errors(model, model, IDS)
    with pytest.raises(ConfigError, match="no layer 'model.layers.1"):
        layer_errors(family("llama", num_hidden_layers=1), after, IDS)
    with pytest.raises(CalibrationError, match="no batch"):
        layer_errors(model, after, [])
