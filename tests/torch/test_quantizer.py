"""ModelQuantizer: replacement, priorities, calibration, freezing, bad input."""

from __future__ import annotations

import copy
from collections import UserDict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.granularity import PerChannel, PerGroup, PerToken
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, TensorSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError, NotSupportedError, ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, load_params, save_params
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers import LAYERS, QuantLayer, layer_class
from quark.torch.layers.linear import QuantLinear
from quark.torch.layers.replace import quantized_layers
from quark.torch.plan import make_plan
from tests.models.torch_zoo import every_layer, mlp, tiny_llama, token_batches

INT8 = spec("int8", PerChannel(0))


def config(layer: LayerSpec, **options: Any) -> QConfig:
    return QConfig(global_quant_config=config_of_layer(layer), **options)


def quantize(model: nn.Module, layer: LayerSpec, data: Any = None, **options: Any) -> nn.Module:
    return ModelQuantizer(config(layer, **options)).quantize_as_planned(model, data)


def inputs(count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 128, generator=generator).to(dtype) for _ in range(count)]


def test_every_supported_layer_is_replaced_and_computes_with_quantized_weights() -> None:
    model, reference = every_layer(), every_layer()
    by_type = {cls: config_of_layer(LayerSpec(weight=INT8)) for cls in LAYERS}
    quantize(model, LayerSpec(weight=INT8), layer_type_quant_config=by_type)
    assert {type(m).float_class for m in model.modules() if isinstance(m, QuantLayer)} == set(LAYERS)
    with torch.no_grad():
        for module in reference.modules():
            if type(module) in LAYERS:
                module.weight.copy_(fake_quantize(module.weight, compute_qparams(module.weight, INT8), INT8))
        (ids,) = token_batches(1)
        assert torch.equal(model(ids), reference(ids))


def test_embeddings_stay_in_float_unless_named() -> None:
    model = quantize(every_layer(), LayerSpec(weight=INT8))
    assert {"embedding", "bag"}.isdisjoint(quantized_layers(model))
    by_name = {"embedding": config_of_layer(LayerSpec(weight=INT8))}
    named = quantize(every_layer(), LayerSpec(), layer_quant_config=by_name)
    assert set(quantized_layers(named)) == {"embedding"}


def test_exclude_beats_name_beats_type_beats_global() -> None:
    int4, int2 = LayerSpec(weight=spec("int4")), LayerSpec(weight=spec("int2"))
    model = quantize(
        every_layer(),
        LayerSpec(weight=INT8),
        exclude=["head"],
        layer_quant_config={"lin*": config_of_layer(int4), "head": config_of_layer(int4)},
        layer_type_quant_config={nn.Linear: config_of_layer(int2), nn.Conv2d: config_of_layer(int2)},
    )
    found = {name: layer.spec.weight.dtype.name for name, layer in quantized_layers(model).items() if layer.spec.weight}
    assert found == {"linear": "int4", "conv": "int2", "deconv": "int8"}


def test_the_config_is_not_changed_and_serves_a_second_model() -> None:
    shared = config(LayerSpec(weight=INT8), exclude=["do*"])
    before = shared.to_dict()
    for _ in range(2):
        ModelQuantizer(shared).quantize_model(mlp())
    assert shared.to_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_runs_and_freezing_changes_no_output(scheme: str, dtype: torch.dtype) -> None:
    model = mlp(dtype)
    model = quantize(model, SCHEMES[scheme], inputs(dtype=dtype))
    (x,) = inputs(1, dtype)
    with torch.no_grad():
        before = model(x)
        after = ModelQuantizer.freeze(model)(x)
        again = ModelQuantizer.freeze(model)(x)
    assert torch.isfinite(before).all()
    assert torch.equal(before, after)
    assert torch.equal(after, again)
    if not (SCHEMES[scheme].weight.is_cast and dtype is not torch.float32):  # type: ignore[union-attr]
        assert not torch.equal(before, mlp(dtype)(x))


def test_dynamic_per_token_scales_do_not_depend_on_other_tokens() -> None:
    layer = LayerSpec(weight=INT8, input=spec("int8", PerToken(), dynamic=True))
    model = quantize(mlp(), layer)
    (x,) = inputs(1)
    with torch.no_grad():
        alone, together = model(x[:1]), model(torch.cat([x[:1], 1000 * x[1:]]))[:1]
    assert torch.allclose(alone, together, rtol=0, atol=1e-6)


def test_static_scales_come_from_all_batches() -> None:
    layer = LayerSpec(weight=INT8, input=spec("int8"), output=spec("uint8", symmetric=False))
    model = mlp()
    batches = inputs(3)
    highest = max(float(batch.abs().max()) for batch in batches)
    quantize(model, layer, batches)
    assert float(model.up.input_quantizer.scale) == pytest.approx(highest / 127.5, rel=1e-6)
    with torch.no_grad():
        outputs = torch.cat([nn.functional.linear(b, mlp().up.weight, mlp().up.bias) for b in batches])
    width = float(outputs.max() - outputs.min())
    assert float(model.up.output_quantizer.scale) == pytest.approx(width / 255, rel=1e-5)


def test_bias_is_quantized_where_there_is_one() -> None:
    layer = LayerSpec(weight=INT8, bias=spec("int8"))
    model = ModelQuantizer.freeze(quantize(mlp(), layer))
    bias = mlp().up.bias.detach()
    assert torch.equal(model.up.bias, fake_quantize(bias, compute_qparams(bias, spec("int8")), spec("int8")))
    assert model.down.bias_quantizer is None


class Words(UserDict):  # type: ignore[type-arg]
    """Like transformers' BatchEncoding: a mapping that is no dict."""


@pytest.mark.slow
def test_batches_may_be_tensors_mappings_and_tuples() -> None:
    from transformers import BatchEncoding

    layer = LayerSpec(weight=INT8, input=spec("int8"))
    ids = token_batches(1)[0]
    scales = set()
    batches: list[Any] = [
        ids,
        {"input_ids": ids},
        BatchEncoding({"input_ids": ids}),
        Words(input_ids=ids),
        (ids,),
        [ids],
    ]
    for batch in [*batches, [{"input_ids": ids}]]:
        model = quantize(tiny_llama(), layer, [batch])
        scales.add(float(model.model.layers[1].mlp.down_proj.input_quantizer.scale))
    assert len(scales) == 1


def test_a_tied_head_is_quantized_without_touching_the_embedding() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach().clone()
    frozen = ModelQuantizer.freeze(quantize(model, LayerSpec(weight=spec("int4"))))
    assert torch.equal(frozen.model.embed_tokens.weight, embedding)
    assert not torch.equal(frozen.lm_head.weight, embedding)


@pytest.mark.parametrize("view", [torch.t, lambda x: x[8:]], ids=["transposed", "slice"])
def test_a_view_of_another_weight_is_frozen_on_its_own(view: Any, tmp_path: Path) -> None:
    """An autoencoder whose decoder reads the memory of its encoder under a parameter of its own."""
    model = mlp()
    model.down = nn.Linear(128, len(view(model.up.weight)), bias=False)
    model.down.weight = nn.Parameter(view(model.up.weight.data))
    start = copy.deepcopy(model)
    quantized = quantize(model, LayerSpec(weight=spec("int4", PerChannel(0))), exclude=["up"])
    before = quantized(inputs(1)[0])
    frozen = ModelQuantizer.freeze(quantized)
    # Weights that lie in memory in another order are multiplied in another order.
    same = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    same(frozen(inputs(1)[0]), before)
    assert torch.equal(frozen.up.weight, start.up.weight)
    path = save_params(frozen, "m", export_dir=tmp_path, compressed=True)
    same(load_params(start, path, tmp_path / "m.safetensors")(inputs(1)[0]), before)


def test_a_weight_whose_rows_are_one_in_memory_is_frozen() -> None:
    model = mlp()
    model.up.weight = nn.Parameter(torch.randn(1, 128, generator=torch.Generator().manual_seed(0)).expand(128, 128))
    quantized = quantize(model, LayerSpec(weight=INT8))
    before = quantized(inputs(1)[0])
    assert torch.equal(ModelQuantizer.freeze(quantized)(inputs(1)[0]), before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="TorchScript module"):
        quantize(torch.jit.trace(nn.Linear(128, 8), inputs(1)[0]), LayerSpec(weight=INT8))


def test_training_flags_and_gradients_survive() -> None:
    model = mlp().train()
    quantize(model, LayerSpec(weight=INT8, input=spec("int8")), inputs())
    assert model.training and model.up.training
    model(inputs(1)[0]).sum().backward()
    assert model.up.weight.grad is not None and bool(model.up.weight.grad.abs().sum() > 0)


def test_the_template_excludes_the_head_of_any_causal_model() -> None:
    model = tiny_llama()
    ModelQuantizer(LLMTemplate.get("never-heard-of").get_config("int4_wo_32")).quantize_model(model)
    names = set(quantized_layers(model))
    assert "lm_head" not in names and len(names) == 14


# Bad input: one clear error, and the model as it was. ----------------------------------------------------------------


def assert_untouched(model: nn.Module, reference: nn.Module) -> None:
    assert not quantized_layers(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    for (name, mine), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()), name


@pytest.mark.parametrize("layer", [LayerSpec(weight=INT8), LayerSpec(weight=INT8, input=spec("int8"))])
@pytest.mark.parametrize("pack", [lambda x: x, lambda x: {"x": x}, lambda x: UserDict(x=x)])
def test_batches_without_an_array_of_values_are_refused(pack: Any, layer: LayerSpec) -> None:
    x = inputs(1)[0]
    for batch, message in ((x.to_sparse(), "is sparse: make it dense"), (x.to("meta"), "is on the meta device")):
        with pytest.raises(CalibrationError, match=f"batch 0 holds a tensor .4, 128. that {message}"):
            quantize(mlp(), layer, [pack(batch)])


def test_a_layer_that_has_no_weight_yet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 \(LazyLinear\) has no weight yet: run the model on one batch first"):
        quantize(nn.Sequential(nn.LazyLinear(8)), LayerSpec(weight=INT8))


STATIC = LayerSpec(weight=INT8, input=spec("int8"))


@pytest.mark.parametrize(
    ("layer", "data", "error", "message"),
    [
        (STATIC, None, CalibrationError, "up.input"),
        (STATIC, [], CalibrationError, "empty"),
        (STATIC, ["a string"], CalibrationError, "batch is a str"),
        (STATIC, [{"y": torch.zeros(2, 128)}], CalibrationError, "unexpected keyword argument 'y'"),
        (STATIC, [torch.full((2, 128), float("nan"))], NonFiniteError, "up.input"),
        (STATIC, [torch.full((2, 128), float("inf"))], NonFiniteError, "up.input"),
        (LayerSpec(weight=spec("int4", PerGroup(-1, 48))), None, ShapeError, "'up'.*group_size 48.*length 128"),
        (
            LayerSpec(weight=INT8, input=spec("int4", PerGroup(-1, 48), dynamic=True)),
            None,
            ShapeError,
            "'up'.*input.*group_size 48",
        ),
    ],
)
def test_bad_input_leaves_the_model_as_it_was(
    layer: LayerSpec, data: Any, error: type[Exception], message: str
) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        quantize(model, layer, data)
    assert_untouched(model, mlp())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["int8_wo", "uint4_wo_32", "fp8", "mxfp4", "nvfp4", "mx6", "bfp16", "int4_fp8"])
def test_non_finite_weights_are_named(scheme: str, value: float) -> None:
    model = mlp()
    with torch.no_grad():
        model.down.weight[3, 5] = value
    with pytest.raises(NonFiniteError, match=r"down\.weight"):
        quantize(model, SCHEMES[scheme], inputs())
    assert not quantized_layers(model)


def test_a_pattern_without_a_match_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"exclude: the pattern 'lm_hed'.*lm_head"):
        quantize(tiny_llama(), LayerSpec(weight=INT8), exclude=["lm_hed"])
    with pytest.raises(ConfigError, match=r"layer_quant_config: the pattern '\*\.q_prj'.*q_proj"):
        quantize(tiny_llama(), LayerSpec(weight=INT8), layer_quant_config={"*.q_prj": config_of_layer(STATIC)})
    with pytest.raises(ConfigError, match="no quantizable layer is a Conv2d"):
        quantize(mlp(), LayerSpec(weight=INT8), layer_type_quant_config={nn.Conv2d: config_of_layer(STATIC)})
    with pytest.raises(ConfigError, match="Nothing to quantize"):
        quantize(mlp(), LayerSpec(weight=INT8), exclude=["*"])


def test_scripts_are_warned_of_what_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Published command lines have such patterns, and run where they were written."""
    unmatched = {
        "exclude": ["lm_head", "[]", "*.gate.linear", "model.layers.0"],
        "layer_quant_config": {"*.q_prj": config_of_layer(STATIC)},
        "layer_type_quant_config": {nn.Conv2d: config_of_layer(STATIC)},
    }
    with caplog.at_level("WARNING", logger="quark"):
        done = ModelQuantizer(config(LayerSpec(weight=INT8), **unmatched)).quantize_model(tiny_llama())
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 5 and all(text.startswith("Changes nothing: ") for text in warned)
    for pattern in ("'[]'", "'*.gate.linear'", "'model.layers.0'", "'*.q_prj'", "Conv2d"):
        assert sum(pattern in text for text in warned) == 1, pattern
    other = quantize(tiny_llama(), LayerSpec(weight=INT8), exclude=["lm_head"])
    assert {*quantized_layers(done)} == {*quantized_layers(other)}


def test_quantizing_twice_freezing_a_float_model_and_later_features_are_refused() -> None:
    model = quantize(mlp(), LayerSpec(weight=INT8))
    with pytest.raises(ConfigError, match="quantized layers already"):
        quantize(model, LayerSpec(weight=INT8))
    with pytest.raises(ConfigError, match="freeze needs a model from quantize_model"):
        ModelQuantizer.freeze(mlp())
    from quark.torch.config.named_algorithms import UnknownAlgoConfig

    with pytest.raises(NotSupportedError, match="UnknownAlgoConfig"):
        ModelQuantizer(config(LayerSpec(weight=INT8), algo_config=[UnknownAlgoConfig("of another version")]))
    again = ModelQuantizer(config(LayerSpec(weight=INT8), keep_prequantized_layers=False))
    with pytest.raises(NotSupportedError, match="keep_prequantized_layers=False: .* is quantized"):
        again.quantize_model(ModelQuantizer.freeze(model))
    assert quantized_layers(again.quantize_model(mlp()))
    with pytest.raises(ConfigError, match="Unknown scheme 'int9'"):
        ModelQuantizer("int9")


def test_an_uncalled_layer_is_named() -> None:
    model = mlp()
    model.unused = nn.Linear(4, 4)
    with pytest.raises(CalibrationError, match="unused .*never reached"):
        quantize(model, STATIC, inputs())


def test_multihead_attention_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model.attention = nn.MultiheadAttention(64, 4)
    quantize(model, LayerSpec(weight=INT8))
    assert set(quantized_layers(model)) == {"0"}


def test_spec_of_two_levels_needs_data_for_activations() -> None:
    nvfp4: TensorSpec | None = SCHEMES["nvfp4"].input
    assert nvfp4 is not None and nvfp4.dynamic and nvfp4.needs_calibration
    with pytest.raises(CalibrationError, match="dynamic or weight-only"):
        quantize(mlp(), SCHEMES["nvfp4"])


def test_an_excluded_block_without_a_star_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'model\.layers\.0' matches the module .* but none of the layers"):
        quantize(tiny_llama(), LayerSpec(weight=INT8), exclude=["model.layers.0"])
    model = quantize(tiny_llama(), LayerSpec(weight=INT8), exclude=["model.layers.0.*", "lm_head"])
    assert all(name.startswith("model.layers.1.") for name in quantized_layers(model))


def test_siblings_share_the_global_scale_of_nvfp4() -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("nvfp4")).quantize_model(tiny_llama(), token_batches())
    attention = model.model.layers[0].self_attn
    scales = {float(getattr(attention, name).weight_quantizer.scale_2) for name in ("q_proj", "k_proj", "v_proj")}
    largest = max(
        float(getattr(attention, name).weight.detach().abs().max()) for name in ("q_proj", "k_proj", "v_proj")
    )
    assert len(scales) == 1 and scales.pop() == pytest.approx(largest / (6 * 448), rel=1e-6)


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_subclass_with_its_own_forward_stays_in_float_and_the_plan_says_so() -> None:
    from rich.console import Console

    model = mlp()
    model.down = Doubled(128, 32)
    plan = make_plan(config(LayerSpec(weight=INT8)), model)
    assert set(plan.layers) == {"up"} and plan.unknown == ("down",)
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan.table(model))
    assert "float (own forward)" in console.export_text()
    assert type(quantize(model, LayerSpec(weight=INT8)).down) is Doubled


class OwnLinear(nn.Linear):
    """Like FalconLinear: a linear layer with a forward of its own, and more than that if `gain` is not 1."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gain * (x @ self.weight.T)
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_subclass_is_replaced_if_it_computes_a_linear_layer(bias: bool, device: str) -> None:
    with torch.device(device):
        layer = OwnLinear(64, 32, bias=bias, dtype=torch.bfloat16)
        state = torch.get_rng_state()
        assert layer_class(layer) is QuantLinear
        assert torch.equal(torch.get_rng_state(), state), "the proof draws no random numbers"
        layer.gain = 2.0
        assert layer_class(layer) is None
        layer.gain, layer.adapter = 1.0, nn.Linear(64, 2)
        assert layer_class(layer) is None
    assert layer.in_features == 64 and layer.weight.shape == (32, 64)
