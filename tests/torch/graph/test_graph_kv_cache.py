"""Keys and values in graph mode: the scales and the logits of eager mode, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.compat.torch_names.shorthand_specs import FP8E4M3PerChannelSpec, FP8E4M3PerTensorSpec, Int8PerTensorSpec
from quark.errors import ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, load_params, save_params
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.tensor.enums import QuantizationMode
from tests.models.families import family
from tests.models.versions import LATENT_CACHES

IDS = torch.arange(48).reshape(3, 16)
GRAPH = QuantizationMode.fx_graph_mode


def built(name: str, attention: str = "sdpa") -> Any:
    """A tiny model whose norms of keys have large weights."""
    model = family(name)
    model.config.use_cache = False
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("k_norm.weight"):
                parameter.fill_(20.0)
    return model


def config(name: str, each: bool = False, **options: Any) -> QConfig:
    patterns = LLMTemplate.get(name).kv_layers_name
    cache = QLayerConfig(output_tensors=FP8E4M3PerChannelSpec(ch_axis=-3) if each else FP8E4M3PerTensorSpec())
    return QConfig(QLayerConfig(), kv_cache_quant_config=dict.fromkeys(patterns, cache), **options)


def exported(name: str, attention: str = "sdpa") -> Any:
    return torch.export.export(built(name, attention), (IDS,)).module()


def scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: module.scale  # type: ignore[misc]
        for name, module in model.named_modules()
        if name.endswith("output_quantizer")
    }


@pytest.mark.parametrize(
    ("name", "attention", "least"),
    [
        ("gemma2", "eager", 0.0),
        pytest.param("qwen3", "sdpa", 0.05, marks=pytest.mark.slow),
        pytest.param("phi3", "sdpa", 0.0, marks=pytest.mark.slow),
        pytest.param("gpt_neox", "eager", 0.0, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "sdpa", 0.0, marks=LATENT_CACHES),
        pytest.param("deepseek_v3", "eager", 0.0, marks=[LATENT_CACHES, pytest.mark.slow]),
    ],
)
def test_it_is_what_eager_mode_gives(name: str, attention: str, least: float) -> None:
    eager = ModelQuantizer(config(name, min_kv_scale=least)).quantize_model(built(name, attention), [IDS])
    made = config(name, min_kv_scale=least, quant_mode=GRAPH)
    graph = ModelQuantizer(made).quantize_model(exported(name, attention), [IDS])
    assert scales(graph) == scales(eager) and scales(graph)
    assert torch.equal(graph(IDS).logits, eager(IDS).logits)
    assert not torch.allclose(graph(IDS).logits, built(name, attention)(IDS).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("qwen3", "sdpa")]
    + [pytest.param(*row, marks=pytest.mark.slow) for row in (("gemma2", "eager"), ("phi3", "sdpa"))],
)
def test_heads_have_their_scales_before_they_are_repeated(name: str, attention: str) -> None:
    eager = ModelQuantizer(config(name, True)).quantize_model(built(name, attention), [IDS])
    graph = ModelQuantizer(config(name, True, quant_mode=GRAPH)).quantize_model(exported(name, attention), [IDS])
    found, expected = scales(graph), scales(eager)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert {tuple(scale.shape) for scale in found.values()} == {(2,)}
    assert torch.equal(graph(IDS).logits, eager(IDS).logits)


@pytest.mark.slow
def test_beside_quantized_layers_and_in_a_file(tmp_path: Path) -> None:
    layer = QLayerConfig(weight=Int8PerTensorSpec(), input_tensors=Int8PerTensorSpec())
    cache = config("qwen3").kv_cache_quant_config
    made = QConfig(layer, kv_cache_quant_config=cache, kv_cache_group=list(cache), quant_mode=GRAPH)
    graph = ModelQuantizer(made).quantize_model(exported("qwen3"), [IDS])
    found = scales(graph)
    assert len(found) == 4 and len({float(scale) for scale in found.values()}) == 2, "one for both of a layer"
    expected = graph(IDS).logits
    frozen = ModelQuantizer.freeze(graph)
    file = save_params(frozen, "model", args=(IDS,), export_dir=tmp_path, quant_mode=GRAPH)
    torch.testing.assert_close(load_params(pth_path=str(file), quant_mode=GRAPH)(IDS).logits, expected)


@pytest.mark.slow
def test_what_a_graph_does_not_have_is_refused() -> None:
    latent = exported("deepseek_v3")
    with pytest.raises(NotSupportedError, match=r"kv_b_proj reads what another layer of .*has a single head"):
        ModelQuantizer(config("deepseek_v3", True, quant_mode=GRAPH)).quantize_model(latent, [IDS])
    other = {"*up_proj": QLayerConfig(output_tensors=FP8E4M3PerTensorSpec())}
    absent = {"*nothing": other["*up_proj"]}
    for made, error, message in (
        (config("qwen3", kv_cache_post_rope=False), NotSupportedError, "kv_cache_post_rope=False is not part of"),
        (QConfig(QLayerConfig(), kv_cache_quant_config=other), NotSupportedError, "that no attention in .* reads"),
        (QConfig(QLayerConfig(), kv_cache_quant_config=absent), ConfigError, r"the pattern '\*nothing'"),
    ):
        with pytest.raises(error, match=message):
            ModelQuantizer(replace(made, quant_mode=GRAPH)).quantize_model(latent, [IDS])
