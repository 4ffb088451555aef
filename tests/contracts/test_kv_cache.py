"""Every family that caches keys and values: its scales are those of what the cache of transformers holds.

What a runtime with a quantized cache computes is shown by transformers itself: the float model, with a cache that
rounds what it is given to torch's own float8 under the scales.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from quark.compat.torch_names.shorthand_specs import FP8E4M3PerChannelSpec, FP8E4M3PerTensorSpec
from quark.core.metrics import sqnr
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.layers.attention import cache_rules
from quark.torch.layers.attention.cache_rules import cache_feeding
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT
from tests.models.versions import LATENT_CACHES

FP8 = QLayerConfig(output_tensors=FP8E4M3PerTensorSpec())
EACH_HEAD = QLayerConfig(output_tensors=FP8E4M3PerChannelSpec(ch_axis=-3))
LARGEST = 448.0
NORM = 20.0
"""Weights of the norms of keys: 1 in a fresh model, and as large as this in trained ones."""
NORMED = re.compile(r"(k|key)_?(layer)?norm\.weight$")
Pair = tuple[float, float]
EVERYDAY = ("qwen3", "gemma3_text", "qwen3_next", "deepseek_v3", "bart")


def families() -> dict[str, Any]:
    """model_type -> class, of all families that generate text."""
    from benchmarks.architectures.__main__ import families

    return families(every=True)


def built(name: str) -> tuple[Any, list[Any]]:
    """A tiny model whose norms of keys have large weights, and its batches."""
    from benchmarks.architectures.__main__ import build

    model, data = build(name, families()[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if NORMED.search(key):
                parameter.fill_(NORM)
    return model, data


def stored(cache: Any) -> list[Pair]:
    """The largest key and value of each attention module, in the order of the model: own, then those of an encoder."""
    if cache is None:
        return []
    own = getattr(cache, "self_attention_cache", cache)
    parts = [own] if own is cache else [own, cache.cross_attention_cache]
    layers = [[x for x in part.layers if getattr(x, "keys", None) is not None and x.keys.numel()] for part in parts]
    return [(float(x.keys.abs().max()), float(x.values.abs().max())) for row in zip(*layers, strict=True) for x in row]


def quantized(model: Any, data: list[Any], **options: Any) -> Any:
    patterns = LLMTemplate.get(model.config.model_type).kv_layers_name
    config = QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(patterns, FP8), **options)
    return ModelQuantizer(config).quantize_model(model, data)


def scales(model: nn.Module) -> list[Pair]:
    """The scales of keys and values of each attention module, in the order of the model."""
    found: dict[str, dict[str, float]] = {}
    for name, module in model.named_modules():
        if name.endswith(".output_quantizer"):
            parent, _, leaf = name.removesuffix(".output_quantizer").removesuffix(".linear").rpartition(".")
            found.setdefault(parent, {})[leaf] = float(module.scale)  # type: ignore[arg-type]
    made = []
    for own in found.values():
        first = next(iter(own.values()))  # of a layer that makes both
        k, v = (next((s for leaf, s in own.items() if part in re.sub("proj|query", "", leaf)), first) for part in "kv")
        made.append((k, v))
    return made


def covered(found: list[Pair], largest: list[Pair], name: str) -> None:
    """Raise AssertionError unless what scales cover is within 5 % of the largest that is stored."""
    assert found, name
    if len(found) != len(largest):  # a module that stores in several layers: all that it stores is covered
        found, largest = [overall(found)], [overall(largest)]
    for (k, v), (key, value) in zip(found, largest, strict=True):
        expected = (max(key, value),) * 2 if k == v else (key, value)
        assert (LARGEST * k, LARGEST * v) == pytest.approx(expected, rel=0.05), name


def check(name: str) -> tuple[float, float]:
    """Raise AssertionError unless the scales are right; the SQNR of a runtime with them, and with the former ones."""
    from transformers.cache_utils import Cache

    model, data = built(name)
    with torch.no_grad():
        expected = model(**data[0], use_cache=True)
    made = {late: scales(quantized(built(name)[0], data[:1], kv_cache_post_rope=late)) for late in (True, False)}
    covered(made[True], stored(expected.past_key_values), name)
    figures, update = [], Cache.update
    for late in (True, False):
        order = iter(made[late])

        def rounding(self: Any, keys: Any, values: Any, *args: Any, order: Any = order, **more: Any) -> Any:
            k, v = next(order)
            return update(self, fp8(keys, k), fp8(values, v), *args, **more)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(Cache, "update", rounding)
            figures.append(sqnr(expected.logits, model(**data[0], use_cache=True).logits))
    model = quantized(model, data[:1])
    for use_cache in (True, False):  # what is quantized computes what that runtime does, with a cache and without
        with torch.no_grad():
            logits = model(**data[0], use_cache=use_cache).logits
        assert sqnr(expected.logits, logits) == pytest.approx(figures[0], abs=1), name
    return figures[0], figures[1]


def overall(pairs: list[Pair]) -> Pair:
    """The largest of all keys and of all values."""
    return max(k for k, _ in pairs), max(v for _, v in pairs)


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x through torch's own float8."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[LATENT_CACHES] if n == "deepseek_v3" else []) for n in EVERYDAY]
)
def test_a_runtime_with_these_scales_beats_one_with_the_former(name: str) -> None:
    now, before = check(name)
    assert now > before + 10 if name != "bart" else abs(now - before) < 1


def test_latent_attention_is_refused_where_caches_hold_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers before 5.15 does: the scales would be those of other tensors than runtimes store."""
    monkeypatch.setattr(cache_rules, "caches_latents", lambda: False)
    model, data = built("deepseek_v3")
    with pytest.raises(NotSupportedError, match=r"kv_b_proj is of latent attention.*transformers 5\.15 or newer"):
        quantized(model, data[:1])
    quantized(model, data[:1], kv_cache_post_rope=False)
    model, data = built("qwen3")
    assert scales(quantized(model, data[:1]))


def verdict(name: str) -> str:
    """What became of a family: "right", or why it has no cache to quantize; AssertionError where it is wrong."""
    try:
        model, data = built(name)
        with torch.no_grad():
            largest = stored(model(**data[0], use_cache=True).past_key_values)
    except Exception as error:  # noqa: BLE001 - sizes that this family does not take, or no cache
        return f"not built: {error}"
    try:
        covered(scales(quantized(model, data[:1])), largest, name)
    except CalibrationError as error:
        assert re.search("encoder_attn.*never reached", str(error)), f"{name}: {error}"
        return "a decoder that was run without an encoder (TrOCR)"
    except (ConfigError, NotSupportedError) as error:
        assert not largest, f"{name}: {error}"
        return "no keys are stored"
    assert largest, name
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_scales_cover_what_the_cache_of_every_family_holds(name: str) -> None:
    from benchmarks.architectures.isolated import isolated

    found = isolated(lambda: verdict(name), seconds=60)
    if found.startswith("not built"):
        pytest.skip(found)


def verdict_of_heads(name: str) -> str:
    """What became of a scale for each head: "right", or why it is refused, before any data; AssertionError otherwise.

    Of a decoder with an encoder, whose cache has two parts, nothing is looked at.
    """
    try:
        model, data = built(name)
        with torch.no_grad():
            cache = model(**data[0], use_cache=True).past_key_values
        layers = [x for x in cache.layers if getattr(x, "keys", None) is not None and x.keys.numel()]
    except Exception as error:  # noqa: BLE001 - sizes that this family does not take, or no cache
        return f"not built: {error}"
    patterns = LLMTemplate.get(model.config.model_type).kv_layers_name
    config = QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(patterns, EACH_HEAD))
    try:
        with pytest.raises(CalibrationError, match="need calibration data"):
            ModelQuantizer(config).quantize_model(model, None)
    except (ConfigError, NotSupportedError) as error:
        return f"refused: {error}"
    try:
        model = ModelQuantizer(config).quantize_model(model, data[:1])
    except CalibrationError as error:
        assert re.search("encoder_attn.*never reached", str(error)), f"{name}: {error}"
        return "a decoder that was run without an encoder (TrOCR)"
    found: dict[str, list[torch.Tensor]] = {}
    for path, module in model.named_modules():
        if path.endswith(".output_quantizer"):
            parent = path.removesuffix(".output_quantizer").removesuffix(".linear").rpartition(".")[0]
            found.setdefault(parent, []).append(module.scale * LARGEST)
    stores = [[x.abs().amax((0, 2, 3)) for x in (layer.keys, layer.values)] for layer in layers]
    made = list(found.values())
    assert made, name
    if len(made) != len(stores):  # a module that stores in several layers: all that it stores is covered
        made, stores = ([[torch.stack(part).amax(0) for part in zip(*pairs, strict=True)]] for pairs in (made, stores))
    for own, largest in zip(made, stores, strict=True):
        for covers, expected in zip(own, largest if len(own) == 2 else [torch.maximum(*largest)], strict=True):
            torch.testing.assert_close(covers, expected, rtol=0.05, atol=0)
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_scales_of_heads_are_those_of_every_family_or_refused_before_any_data(name: str) -> None:
    from benchmarks.architectures.isolated import isolated

    found = isolated(lambda: verdict_of_heads(name), seconds=60)
    if found.startswith("not built"):
        pytest.skip(found)


def fed(name: str) -> tuple[list[str], list[str]]:
    """The layers that patterns of a family mean, and those that they only match; of a model without weights."""
    import transformers

    from benchmarks.architectures.tiny import variants

    class_name = families()[name]
    kind = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    model = None
    for config in variants(kind.config_class):
        with suppress(Exception), torch.device("meta"):
            model = kind(config)
            break
    if model is None:
        pytest.skip("no tiny model")
    patterns = LLMTemplate.get(model.config.model_type).kv_layers_name
    made = QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(patterns, FP8))
    meant = sorted(cache_feeding(made, model))
    wholes = tuple(f".{pattern.lstrip('*.')}" for pattern in patterns)
    return meant, [layer for layer in meant if not f".{layer}".endswith(wholes)]


@pytest.mark.parametrize(
    "name", [name if name == "inkling2_text" else pytest.param(name, marks=pytest.mark.slow) for name in families()]
)
def test_patterns_mean_whole_parts_of_names(name: str) -> None:
    meant, others = fed(name)
    assert not others, f"{name}: {others} are no layers of keys or values"
    assert meant or name != "inkling2_text"


@pytest.mark.slow
def test_scales_of_a_trained_model_cover_the_keys_of_a_text_that_it_was_not_calibrated_on() -> None:
    """Keys of the first block are 1.3 times as large as what the former place covers: rotary embedding turns pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.llm.text import token_windows

    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    data, held = (token_windows(tokenizer, TEXT / f"{name}.txt", 128, 64) for name in ("calibration", "heldout"))
    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL).eval()
    with torch.no_grad():
        each = [stored(model(window, use_cache=True).past_key_values) for window in held]
    largest = [overall(list(pairs)) for pairs in zip(*each, strict=True)]
    shares = {}
    for late in (True, False):
        fresh = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL).eval()
        made = scales(quantized(fresh, data, kv_cache_post_rope=late))
        shares[late] = [s / (LARGEST * scale) for pair, own in zip(largest, made, strict=True)
                        for s, scale in zip(pair, own, strict=True)]  # fmt: skip
    # The largest of a text of the same length: one that is 7 % smaller, none that is more than 3 % larger.
    assert min(shares[True]) > 0.9 and max(shares[True]) < 1.05 < 1.25 < max(shares[False])
