"""The names of experts in folders of every mixture that a server is known to load, against those it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from quark.core.dtypes import DTYPES
from quark.errors import NotSupportedError
from quark.goals import GOALS
from quark.goals.expert_names import EXPERT_NAMES, expert_names, unread_experts
from quark.torch import LLMTemplate
from quark.torch.flows.check_plan import check_goal
from quark.torch.flows.predicted_size import plan_layers
from quark.torch.model.meta_model import meta_copy
from quark.torch.model.names import published_names
from quark.torch.model.passes.unfuse_experts import fused_blocks, layer_names
from tests.contracts.test_reader_classes import CLASSES
from tests.models.families import family

TYPES = sorted({name for row in EXPERT_NAMES for name in row.model_types} & CLASSES.keys())


def published_experts(model: Any) -> list[str]:
    publish = published_names(model)
    blocks = fused_blocks(model)
    layers = [layer for name, leaves in blocks.items() for layer in layer_names(model, name, leaves)]
    return [publish(f"{layer}.weight").removesuffix(".weight") for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_experts_of_a_folder_have_the_names_that_servers_look_for(name: str) -> None:
    from benchmarks.architectures.__main__ import build

    try:
        model, _ = build(name, CLASSES[name])
    except Exception as error:  # noqa: BLE001 - sizes that a family does not take
        pytest.skip(f"no tiny model: {error}")
    found = published_experts(model)
    if not found:
        pytest.skip("no experts in the tiny model")
    for program in dict.fromkeys(row.program for row in EXPERT_NAMES if name in row.model_types):
        row = expert_names(name, program)
        assert row is not None and unread_experts(name, found, program) == []
        assert {layer.rpartition(".")[2] for layer in found} == set(row.leaves)


def test_other_names_are_found_out() -> None:
    assert unread_experts("mixtral", published_experts(family("mixtral"))) == []
    assert unread_experts("gpt_oss", ["model.layers.0.mlp.experts.0.gate_proj"]) != []
    assert unread_experts("mixtral", ["model.layers.0.mlp.experts.0.w1", "model.layers.0.w1"]) != []
    assert unread_experts("nobody", ["anything"]) == []
    assert unread_experts("mixtral", ["model.layers.0.mlp.experts.0.w1"], "SGLang") != []


def test_each_type_has_one_row_and_types_of_weights_exist() -> None:
    names = [(row.program, name) for row in EXPERT_NAMES for name in row.model_types]
    assert len(names) == len(set(names))
    assert {dtype for row in EXPERT_NAMES for dtype in row.quark} <= set(DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "lost"), [("int8_dynamic", True), ("ptpc_fp8", False), ("mxfp4", False)])
def test_experts_that_vllm_would_pass_over_are_refused_on_the_plan(scheme: str, lost: bool) -> None:
    model = meta_copy(family("gpt_oss")).eval()
    made = plan_layers(model, LLMTemplate.get("gpt_oss").get_config(scheme))
    if not lost:
        check_goal(model, made, GOALS["vllm"], "quark")
        return
    with pytest.raises(NotSupportedError, match=r"vLLM passes over .*experts.3.down_proj: int8.*fp4_e2m1 or fp8_e4m3"):
        check_goal(model, made, GOALS["vllm"], "quark")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [("deepseek_v3", "kv_b_proj"), ("phi3", "qkv_proj"), ("qwen3", None)])
def test_scales_of_a_cache_that_vllm_has_no_name_for_are_refused_on_the_plan(name: str, layer: str | None) -> None:
    model = meta_copy(family(name)).eval()
    made = plan_layers(model, LLMTemplate.get(name).get_config("fp8", kv_cache_scheme="fp8"))
    check_goal(model, made, GOALS["transformers"], "quark")
    if layer is None:
        check_goal(model, made, GOALS["vllm"], "quark")
        return
    with pytest.raises(NotSupportedError, match=rf"vLLM does not read the scale of .*\.{layer} from quark folders"):
        check_goal(model, made, GOALS["vllm"], "quark")
