"""Quantized caches and attention, against oracles that quantize with torch's float8 and transformers' own Cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from quark.compat.torch_names.shorthand_specs import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    Uint8PerTensorSpec,
)
from quark.core.schemes import SCHEMES
from quark.core.spec import spec
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.attention.cache_view import (
    CacheQuantize,
    GiveView,
    _makers,
    cache_argument,
    cache_owner,
    stores_keys,
)
from quark.torch.layers.attention.heads import stored_heads
from quark.torch.layers.replace import quantized_layers
from tests.models.families import family
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, mlp
from tests.models.versions import LATENT_CACHES

IDS = torch.arange(48).reshape(3, 16)
FP8, INT8 = (QLayerConfig(output_tensors=spec()) for spec in (FP8E4M3PerTensorSpec, Int8PerTensorSpec))
EACH_HEAD = QLayerConfig(output_tensors=FP8E4M3PerChannelSpec(ch_axis=-3))
PATTERNS = ["*k_proj", "*v_proj"]
FULL = "model.layers.1.self_attn"


def cache_config(layer: QLayerConfig = FP8, **options: Any) -> QConfig:
    return QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(PATTERNS, layer), **options)


def quantize(config: QConfig, model: nn.Module | None = None) -> Any:
    return ModelQuantizer(config).quantize_model(family("llama") if model is None else model, [IDS])


def scale_of(model: nn.Module, name: str) -> float:
    return float(model.get_submodule(f"{name}.output_quantizer").scale)  # type: ignore[arg-type]


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x through torch's own float8."""
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def largest_stored(model: nn.Module) -> dict[str, float]:
    """Name of each projection of keys and values -> largest absolute value that the cache holds of it after IDS."""
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
    return {
        f"model.layers.{index}.self_attn.{leaf}": float(tensor.abs().max())
        for index, layer in enumerate(cache.layers)
        for leaf, tensor in (("k_proj", layer.keys), ("v_proj", layer.values))
    }


def test_the_scales_cover_the_largest_key_and_value() -> None:
    largest = largest_stored(family("llama"))
    alone, group = quantize(cache_config()), quantize(cache_config(kv_cache_group=PATTERNS))
    for block in (0, 1):
        names = [f"model.layers.{block}.self_attn.{leaf}" for leaf in ("k_proj", "v_proj")]
        assert [scale_of(alone, n) for n in names] == pytest.approx([largest[n] / 448 for n in names], rel=1e-6)
        shared = max(largest[n] for n in names) / 448
        assert [scale_of(group, n) for n in names] == pytest.approx([shared, shared], rel=1e-6)
    assert scale_of(group, "model.layers.0.self_attn.k_proj") != scale_of(group, f"{FULL}.k_proj")
    floor = sum(sorted(largest.values())[1:3]) / 2 / 448
    floored = quantize(cache_config(min_kv_scale=floor))
    for name, value in largest.items():
        assert scale_of(floored, name) == pytest.approx(max(value / 448, floor), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_scales_of_heads_cover_the_largest_of_each(name: str) -> None:
    with torch.no_grad():
        layers = family(name)(IDS, use_cache=True).past_key_values.layers
    config = LLMTemplate.get(name).get_config("int8_wo", kv_cache_scheme="fp8_per_head", exclude_layers=["*"])
    model = quantize(replace(config, min_kv_scale=1e-5), family(name))
    for index, layer in enumerate(layers):
        keys, values = (x.abs().amax((0, 2, 3)) / 448 for x in (layer.keys, layer.values))
        made = {
            leaf: module.output_quantizer.scale
            for leaf, module in model.named_modules()
            if f".{index}." in leaf and getattr(module, "output_quantizer", None)
        }
        wanted = [torch.maximum(keys, values)] if len(made) == 1 else [keys, values]
        for scale, expected in zip(made.values(), wanted, strict=True):
            torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)


@LATENT_CACHES
def test_heads_that_a_module_does_not_tell_apart_are_refused_before_any_data() -> None:
    made = LLMTemplate.get("deepseek_v3").get_config("int8_wo", kv_cache_scheme="fp8_per_head")
    with pytest.raises(NotSupportedError, match="does not say how many heads of this layer its cache stores"):
        ModelQuantizer(made).quantize_model(family("deepseek_v3"), None)


def test_a_config_whose_layers_differ_says_nothing() -> None:
    """As those of transformers that raise an error for what each layer has for itself (Dots 3)."""

    class Differing:
        hidden_size = 64

        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("this differs from layer to layer")

    owner = nn.Module()
    owner.k_proj = nn.Linear(64, 32)
    assert stored_heads(owner, "k_proj", Differing()) is None
    owner.num_key_value_heads, owner.head_dim = 2, 16  # type: ignore[assignment]
    assert stored_heads(owner, "k_proj", Differing()) == 2


def test_before_rope_the_projections_are_quantized() -> None:
    model, plain = quantize(cache_config(kv_cache_post_rope=False)), family("llama")
    for name, module in plain.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            scale = scale_of(model, name)
            module.register_forward_hook(lambda m, a, y, scale=scale: fp8(y, scale))
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_after_rope_the_model_computes_as_with_a_quantized_cache(name: str, attention: str) -> None:
    from transformers import DynamicCache

    model, plain = family(name), family(name)
    model.set_attn_implementation(attention)
    plain.set_attn_implementation(attention)
    template = LLMTemplate.get(name)
    patterns = template.kv_layers_name
    config = QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(patterns, FP8), kv_cache_post_rope=True)
    model = quantize(config, model)
    leaves = ["qkv_proj", "qkv_proj"] if name == "phi3" else ["k_proj", "v_proj"]
    seen: list[float] = []

    class Quantized(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **options: Any) -> Any:
            seen.append(float(keys.detach().abs().max()))
            scales = [scale_of(model, f"model.layers.{layer}.self_attn.{leaf}") for leaf in leaves]
            return super().update(fp8(keys, scales[0]), fp8(values, scales[1]), layer, *args, **options)

    argument = cache_argument(plain)
    assert argument is not None
    given: dict[str, Any] = {argument: Quantized()}
    expected = plain(IDS, **given).logits
    torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, plain(IDS).logits, atol=1e-3)
    if name == "llama":
        assert scale_of(model, "model.layers.0.self_attn.k_proj") == pytest.approx(seen[0] / 448, rel=1e-6)
    # Step by step, with a cache of transformers', the same.
    steps = model(IDS[:, :10], use_cache=True)
    rest = model(IDS[:, 10:], **{argument: getattr(steps, argument)}).logits
    torch.testing.assert_close(rest, expected[:, 10:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_probabilities_are_quantized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = family(name)
    plain.set_attn_implementation("eager")
    model = ModelQuantizer(
        QConfig(config_of_layer(SCHEMES["int8_wo"]), softmax_quant_spec=FP8E4M3PerTensorSpec())
    ).quantize_model(family(name), [IDS])
    for layer in quantized_layers(model).values():
        layer.weight_quantizer = None
    scales = [float(m.prob_output_quantizer.scale) for m in model.modules() if hasattr(m, "prob_output_quantizer")]
    assert len(scales) == 2
    softmax, order = nn.functional.softmax, iter(scales)
    monkeypatch.setattr(nn.functional, "softmax", lambda x, **options: fp8(softmax(x, **options), next(order)))
    expected = plain(IDS).logits
    monkeypatch.undo()
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, plain(IDS).logits, atol=1e-3)


FAMILIES = {
    "llama": {f"{FULL}.k_proj", f"{FULL}.v_proj", f"{FULL}.q_proj"},
    "phi3": {f"{FULL}.qkv_proj"},
    "gpt2": {"transformer.h.1.attn.c_attn"},
    "mixtral": {f"{FULL}.k_proj", f"{FULL}.v_proj", f"{FULL}.q_proj"},
}


CASES = [("llama", "fp8", False), ("llama", "fp8", True), ("llama", "int8", True), ("phi3", "fp8", True),
         ("gpt2", "fp8", False), ("mixtral", "int8", True)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme", "late"), CASES)
def test_a_checkpoint_carries_the_names_that_runtimes_read(name: str, scheme: str, late: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    template = LLMTemplate.get(name)
    config = template.get_config("uint4_wo_32", kv_cache_scheme=scheme, attention_scheme="fp8")
    model = quantize(replace(config, kv_cache_post_rope=late), family(name))
    expected = model(IDS).logits
    export_safetensors(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as handle:
        names = {key for key in handle.keys() if key.endswith("output_scale") and ".1." in key}  # noqa: SIM118
    attention = {"gpt2": "transformer.h.1.attn"}.get(name, FULL)
    assert names == {f"{layer}.output_scale" for layer in FAMILIES[name]} | {f"{attention}.prob_output_scale"}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded(IDS).logits, expected)
    assert torch.equal(import_model_from_safetensors(family(name, seed=1), tmp_path / "out")(IDS).logits, expected)
    assert "quark_" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("template", [True, False])
def test_the_written_config_is_what_vllm_expects(template: bool, tmp_path: Path) -> None:
    made = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
    if not template:
        own = {"*layers.0.*": config_of_layer(SCHEMES["fp8"])}
        made = replace(made, layer_quant_config=own, softmax_quant_spec=None)
    model = quantize(made)
    export_safetensors(model, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group, layers = set(stored["export"]["kv_cache_group"]), stored["layer_quant_config"]
    assert group == set(stored["kv_cache_quant_config"]) == set(PATTERNS) and group <= set(layers)
    outputs = [layers[pattern].pop("output_tensors") for pattern in PATTERNS]
    assert outputs[0] == outputs[1]
    assert (outputs[0]["dtype"], outputs[0]["qscheme"], outputs[0]["is_dynamic"]) == ("fp8_e4m3", "per_tensor", False)
    own_layer = {key: value for key, value in stored["global_quant_config"].items() if key != "output_tensors"}
    assert all(layers[pattern] == own_layer for pattern in PATTERNS)
    assert torch.equal(
        import_model_from_safetensors(family("llama", 1), tmp_path / "out")(IDS).logits, model(IDS).logits
    )


def test_an_excluded_projection_keeps_its_weight_and_feeds_the_cache(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(
        "int8", kv_cache_scheme="int8", exclude_layers=["*k_proj", "*layers.0.self_attn.*", "@output_head"]
    )
    model = quantize(config)
    layers = quantized_layers(model)
    assert layers[f"{FULL}.k_proj"].weight_quantizer is layers[f"{FULL}.k_proj"].input_quantizer is None
    assert layers["model.layers.0.self_attn.v_proj"].weight_quantizer is None
    assert layers[f"{FULL}.v_proj"].weight_quantizer is not None and "model.layers.0.self_attn.q_proj" not in layers
    export_safetensors(model, tmp_path / "out")
    loaded = import_model_from_safetensors(family("llama", seed=1), tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_an_excluded_attention_module_keeps_its_probabilities(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = LLMTemplate.get("llama").get_config(
        "int8", attention_scheme="fp8", exclude_layers=["*layers.0.*", "@output_head"]
    )
    model = quantize(config)
    assert not hasattr(model.model.layers[0].self_attn, "prob_output_quantizer")
    export_safetensors(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_fp8_costs_at_most_half_a_percent_of_perplexity(late: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.llm.text import perplexity, token_windows

    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    calibration = token_windows(tokenizer, TEXT / "calibration.txt", 128, 4)
    held = token_windows(tokenizer, TEXT / "heldout.txt", 128, 8)
    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL).eval()
    before = perplexity(model, held)
    config = cache_config(kv_cache_group=PATTERNS, kv_cache_post_rope=late)
    after = perplexity(ModelQuantizer(config).quantize_model(model, calibration), held)
    assert before != after and after <= 1.005 * before


BAD: list[tuple[QConfig, type[Exception], str]] = [
    (QConfig(FP8, min_kv_scale=0.5), ConfigError, "min_kv_scale has no meaning without"),
    (QConfig(FP8, kv_cache_group=["*k_proj"]), ConfigError, "kv_cache_group has no meaning without"),
    (cache_config(min_kv_scale=-1.0), ConfigError, "must not be negative"),
    (cache_config(QLayerConfig()), ConfigError, r"kv_cache_quant_config\['\*k_proj'\].*None"),
    (cache_config(kv_cache_group=["*q_proj"]), ConfigError, "kv_cache_group: the pattern"),
    (QConfig(FP8, kv_cache_quant_config={"*key": FP8}), ConfigError, "kv_cache_quant_config: the pattern"),
    (cache_config(QLayerConfig(output_tensors=FP8E4M3PerTensorSpec(is_dynamic=True))), NotSupportedError, "static"),
    (cache_config(QLayerConfig(output_tensors=FP8E4M3PerChannelSpec(ch_axis=0))), NotSupportedError, "per tensor"),
    (cache_config(EACH_HEAD, kv_cache_post_rope=False), NotSupportedError, "which what a layer gives has not"),
    (cache_config(QLayerConfig(output_tensors=Uint8PerTensorSpec())), NotSupportedError, "fp8_e4m3, int8"),
    (
        QConfig(FP8, softmax_quant_spec=FP8E4M3PerTensorSpec(is_dynamic=True)),
        NotSupportedError,
        "softmax_quant_spec.*static",
    ),
]


@pytest.mark.parametrize(("config", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_has_no_meaning_is_refused(config: QConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(config)


def test_a_model_without_attention_functions_is_refused() -> None:
    config = QConfig(config_of_layer(SCHEMES["int8_wo"]), softmax_quant_spec=FP8E4M3PerTensorSpec())
    with pytest.raises(NotSupportedError, match="Mlp has no attention module"):
        ModelQuantizer(config).quantize_model(mlp(), [torch.randn(2, 128)])
    late = QConfig(config_of_layer(SCHEMES["int8_wo"]), kv_cache_quant_config={"up": FP8}, kv_cache_post_rope=True)
    with pytest.raises(NotSupportedError, match="Mlp, whose forward takes no cache"):
        ModelQuantizer(late).quantize_model(mlp(), [torch.randn(2, 128)])


def test_on_an_error_attention_is_as_it_was() -> None:
    model = family("llama")
    expected, names = model(IDS).logits, dict(model.named_modules())
    config = LLMTemplate.get("llama").get_config("int8", kv_cache_scheme="fp8", attention_scheme="fp8")
    with pytest.raises(CalibrationError):
        ModelQuantizer(replace(config, kv_cache_post_rope=True)).quantize_model(model, [])
    assert dict(model.named_modules()) == names and model.config._attn_implementation == "sdpa"
    assert torch.equal(model(IDS).logits, expected)


class Attention(nn.Module):
    """With a layer of keys, and one of values where it has such."""

    def __init__(self, *leaves: str) -> None:
        super().__init__()
        for leaf in leaves:
            self.add_module(leaf, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("leaves", "quantized", "keys", "values"),
    [
        (("k_proj",), ["k_proj"], ["k_proj"], ["k_proj"]),
        (("k_proj", "v_proj"), ["k_proj"], ["k_proj"], []),
        (("k_proj", "v_proj"), ["v_proj"], [], ["v_proj"]),
        (("k_proj", "v_proj"), ["k_proj", "v_proj"], ["k_proj"], ["v_proj"]),
        (("qkv_proj",), ["qkv_proj"], ["qkv_proj"], ["qkv_proj"]),
    ],
)
def test_values_are_quantized_by_the_layer_that_makes_them(
    leaves: tuple[str, ...], quantized: list[str], keys: list[str], values: list[str]
) -> None:
    """Where none makes values alone they are made of the keys; one that stays in float leaves them in float."""
    assert _makers(Attention(*leaves), quantized) == (keys, values)


class Storing(nn.Module):
    """An attention module with layers in a wrapper of one, and in one of several."""

    def __init__(self, is_decoder: bool = True) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.wrapper, self.several = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        return past_key_values.update(x, x, 0)


def test_a_cache_is_that_of_the_module_around_a_layer_and_of_none_that_never_has_one() -> None:
    modules = {"attn": Storing(), **{f"attn.{name}": child for name, child in Storing().named_children()}}
    owners = {name: cache_owner(modules, name) for name in ("attn.k", "attn.wrapper.0", "attn.several.0", "k")}
    assert owners == {"attn.k": "attn", "attn.wrapper.0": "attn", "attn.several.0": None, "k": None}
    for decoder in (True, False):
        assert stores_keys(nn.Module(), {"attn": Storing(decoder)}, "attn") is decoder
    assert not stores_keys(nn.Module(), {"attn": nn.Linear(4, 4)}, "attn")


@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_the_view_goes_where_the_cache_was(argument: str) -> None:
    from transformers import DynamicCache

    cache, view = DynamicCache(), GiveView([], [])
    x = torch.ones(1)
    args, kwargs = view(Storing(), (x,), {argument: cache})
    assert args == (x,) and kwargs.keys() == {argument} and kwargs[argument].__dict__ is cache.__dict__
    args, kwargs = view(Storing(), (x, cache), {})
    assert not kwargs and args[1].__dict__ is cache.__dict__


@pytest.mark.parametrize("shape", [(1, 3, 4, 8), (2, 8)])
def test_other_heads_than_there_are_scales_for_are_refused(shape: tuple[int, ...]) -> None:
    quantizer = CacheQuantize(spec("fp8_e4m3"))
    quantizer.heads = 2
    with pytest.raises(NotSupportedError, match="no 2 heads"):
        quantizer.cached(torch.zeros(shape))
