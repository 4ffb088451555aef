"""Layers that vLLM builds in float, in every family: --for vllm leaves them so, and refuses what names them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from quark.errors import NotSupportedError
from quark.goals import GOALS
from quark.goals.float_layers import FLOAT_LAYERS, float_layers
from quark.torch import LLMTemplate
from quark.torch.config.config import QConfig
from quark.torch.flows.float_layers import left_in_float
from quark.torch.flows.predicted_size import plan_layers
from quark.torch.formats.fused_groups import architectures
from quark.torch.model.meta_model import meta_copy
from tests.contracts.test_reader_classes import CLASSES
from tests.models.families import family
from tests.models.torch_zoo import tiny_llama
from tests.models.versions import needs_transformers

VLLM = GOALS["vllm"]
KNOWN = {architecture for row in FLOAT_LAYERS for architecture in row.architectures}
FAMILIES = sorted(
    name for name, kind in CLASSES.items() if KNOWN.intersection([kind] if isinstance(kind, str) else kind)
)


def config(model: Any, **layers: str) -> QConfig:
    return LLMTemplate.get("auto").get_config("int4_wo_32", layer_config=layers, exclude_layers=["@output_head"])


def check(name: str) -> list[str]:
    """The layers of a family that vLLM builds in float; AssertionError unless a plan for it leaves them so."""
    from benchmarks.architectures.__main__ import build

    model = meta_copy(build(name, CLASSES[name])[0])
    linear = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = float_layers("vLLM", architectures(model), linear)
    before = set(plan_layers(meta_copy(model), config(model)).layers)
    asked = [layer for layer in kept if layer in before]
    fitted = left_in_float(model, config(model), VLLM)
    assert set(plan_layers(meta_copy(model), fitted).layers) == before.difference(kept)
    if asked:
        with pytest.raises(NotSupportedError, match="builds .* without a quantization"):
            left_in_float(model, config(model, **{asked[0]: "int8_wo"}), VLLM)
        left_in_float(model, config(model, **{asked[0]: "int8_wo"}), GOALS["transformers"])
    return asked


@needs_transformers("5.11", "has deepseek_v32")
def test_a_family_with_an_indexer() -> None:
    # Its weights_proj is read by the model of transformers itself, and its gate is no linear layer there.
    assert {layer.rpartition(".")[2] for layer in check("deepseek_v32")} == {"wk"}


@pytest.mark.slow
def test_a_layer_with_nothing_before_its_name_is_left_out_by_it() -> None:
    model = family("gpt2")
    fitted = left_in_float(model, config(model), VLLM)
    assert "transformer.wpe" in fitted.exclude
    assert "transformer.h.0.attn.c_attn" in plan_layers(meta_copy(model), fitted).layers


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    from benchmarks.architectures.isolated import isolated

    def verdict() -> str:
        try:
            return " ".join(check(name)) or "none"
        except (ValueError, RuntimeError, TypeError, AttributeError, ImportError) as error:
            return f"not built: {error}"

    found = isolated(verdict, seconds=90)
    if found.startswith("not built"):
        pytest.skip(found)


def test_rows_are_the_end_of_a_name_without_numbers() -> None:
    names = ["model.layers.3.self_attn.indexer.wk", "model.layers.61.eh_proj", "model.layers.3.self_attn.wk_b", "x.wk"]
    assert list(float_layers("vLLM", {"HYV4ForCausalLM"}, names)) == names[:2]
    assert list(float_layers("vLLM", {"LlamaForCausalLM"}, names)) == names[1:2]


def test_embeddings_that_vllm_builds_in_float_are_refused() -> None:
    """The class of Mixtral hands no quantization on to its embedding; that of Llama does."""
    model = meta_copy(tiny_llama())
    asked = config(model, **{"*embed_tokens": "int8_wo"})
    assert left_in_float(model, asked, VLLM) is asked
    model.config.architectures = ["MixtralForCausalLM"]
    with pytest.raises(NotSupportedError, match="builds model.embed_tokens without a quantization"):
        left_in_float(model, asked, VLLM)


def test_servers_have_rows_of_their_own() -> None:
    names = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
    assert list(float_layers("SGLang", {"OlmoForCausalLM"}, names)) == names[:2]
    assert not float_layers("SGLang", {"LlamaForCausalLM"}, names)
    assert not float_layers("vLLM", {"OlmoForCausalLM"}, names)
