"""Every family: layers that a server makes one of share a global scale, and a plan that parts them is refused.

Which layers those are is seen in a forward of the model: siblings that read one tensor. The table of facts may keep
some of them apart.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.goals import GOALS
from quark.goals.fused_layers import FUSED_LAYERS
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.selectors import routers
from quark.torch.flows.check_plan import check_goal
from quark.torch.formats.fused_groups import EXPERTS, fused_groups, fused_matrices
from quark.torch.model.batches import forward_batch
from quark.torch.model.meta_model import meta_copy
from quark.torch.model.outside_reads import example
from quark.torch.model.passes import prepare
from quark.torch.model.record_forward import record
from quark.torch.plan import Plan, chooser, make_plan

EVERYDAY = ("deepseek_v3",)
SELECTED = ["@output_head", "@router"]


def families() -> dict[str, Any]:
    """model_type -> class, of all families that generate text."""
    from benchmarks.architectures.__main__ import families

    return families(every=True)


def built(name: str) -> tuple[Any, list[Any]]:
    from benchmarks.architectures.__main__ import build

    return build(name, families()[name])


def scheme(name: str, *excluded: str) -> QConfig:
    """The weights of a scheme: nothing that needs data."""
    made = LLMTemplate.get("auto").get_config(name, exclude_layers=[*SELECTED, *excluded])
    weights = QLayerConfig(weight=made.global_quant_config.weight)
    return replace(made, global_quant_config=QLayerConfig(), layer_type_quant_config={nn.Linear: weights})


def reading_one(model: nn.Module, batch: Any) -> set[tuple[str, ...]]:
    """Siblings that read one tensor, as a forward shows them; full names, sorted."""
    apart = routers(model)
    trace = record(model, lambda: forward_batch(model, batch, torch.device("cpu")))
    found = set()
    for group in trace.groups():
        siblings: dict[str, set[str]] = defaultdict(set)
        for layer in set(group) - apart:
            siblings[layer.rpartition(".")[0]].add(layer)
        found |= {tuple(sorted(layers)) for module, layers in siblings.items() if len(layers) > 1 and module}
    return found


def kept_apart(layers: tuple[str, ...]) -> bool:
    leaves = {layer.rpartition(".")[2] for layer in layers}
    return any(not row.fused and leaves <= set(row.members) for row in FUSED_LAYERS)


def runs_without_weights(model: Any) -> bool:
    """Whether a forward of the model says anything before there are weights, which may be asked for values."""
    meta = meta_copy(model)
    try:
        forward_batch(meta, example(meta), torch.device("meta"))
    except RuntimeError:
        return False
    return True


def planned(model: nn.Module, *excluded: str) -> Plan:
    config = scheme("int8_wo", *excluded)
    prepare(model, chooser(config, model).wanted)
    return make_plan(config, model)


def check_scales(name: str) -> None:
    """Raise AssertionError unless what a server makes one of decodes under the largest scale as it does apart."""
    model, data = built(name)
    model = ModelQuantizer(scheme("nvfp4")).quantize_model(model)
    seconds = {
        layer: float(model.get_submodule(layer).weight_quantizer.scale_2)
        for layer, spec in model.quant_plan.layers.items()
        if spec.weight is not None and spec.weight.scale_spec is not None
    }
    for group in fused_matrices(model):
        own = {seconds.get(layer) for layer in group.layers}
        assert len(own) == 1, (name, group)
    for layers in reading_one(model, data[0]):
        inside = [group for group in fused_matrices(model) if not set(group.layers).isdisjoint(layers)]
        # What the table names may be a part: attention of AFMoE has a gate beside its queries, keys and values.
        told = any(group.fused for group in inside) or kept_apart(layers)
        assert told or any(set(layers) <= set(group.layers) for group in inside) or not runs_without_weights(model), (
            name, layers,
        )  # fmt: skip


def check_refusal(name: str) -> None:
    """Raise AssertionError unless leaving one layer of each kind of group in float is refused, and no plan without."""
    model, _ = built(name)
    made = planned(model)
    check_goal(model, made, GOALS["vllm"], "quark")
    kinds = {tuple(layer.rpartition(".")[2] for layer in group.layers): group for group in fused_groups(model)}
    for group in kinds.values():
        if group.layers[0] not in made.layers:  # the whole group is excluded by its role
            continue
        with pytest.raises(NotSupportedError, match="makes one layer") as error:
            check_goal(model, planned(model, group.layers[0]), GOALS["vllm"], "quark")
        assert group.layers[0].rpartition(".")[2] in str(error.value)
        block = group.layers[0].partition(".experts.")[0]
        whole = [f"{block}.experts.*"] if group.fused == EXPERTS else list(group.layers)
        check_goal(model, planned(model, *whole), GOALS["vllm"], "quark")


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_family(name: str) -> None:
    check_scales(name)
    check_refusal(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_every_family(name: str) -> None:
    from benchmarks.architectures.isolated import isolated

    def verdict() -> str:
        try:
            planned(built(name)[0])
        except Exception as error:  # noqa: BLE001 - sizes that this family does not take, experts of another form
            return f"not built: {error}"
        check_scales(name)
        check_refusal(name)
        return "right"

    found = isolated(verdict, seconds=90)
    if found.startswith("not built"):
        pytest.skip(found)
