"""The dataflow graph of one forward: what made each tensor, what read it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from quark.core.schemes import SCHEMES
from quark.errors import StructureError
from quark.jobs.words import torch_algorithms
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.layers.fake_quant import Mode
from quark.torch.layers.linear import QuantLinear
from quark.torch.model.dataflow import Trace
from quark.torch.model.record_forward import record
from tests.models.architectures import build, token_ids


def graph_of(name: str) -> Trace:
    model = build(name)
    return record(model, lambda: model(token_ids()))


def names(nodes: list | tuple) -> list[str]:
    return [(node.module or node.kind).split(".", 2)[-1] for node in nodes]


def test_linears_that_read_one_tensor_are_a_group() -> None:
    graph = graph_of("llama")
    leaves = [tuple(name.rsplit(".", 1)[-1] for name in group) for group in graph.groups()]
    block = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert leaves == [*block, *block, ("lm_head",)]
    assert graph.uncalled == ()


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("llama", "model.layers.1.self_attn.q_proj", ["1.input_layernorm"]),
        ("llama", "model.layers.1.mlp.down_proj", ["1.mlp.gate_proj", "1.mlp.up_proj"]),
        (
            "qwen3",
            "model.layers.0.self_attn.o_proj",
            ["0.self_attn.q_norm", "0.self_attn.k_norm", "0.self_attn.v_proj"],
        ),
        ("phi", "model.layers.0.mlp.fc1", ["0.input_layernorm"]),
        ("gpt_neox", "gpt_neox.layers.0.attention.dense", ["0.attention.query_key_value"]),
    ],
)
def test_sources_are_the_nearest_layers(name: str, layer: str, expected: list[str]) -> None:
    graph = graph_of(name)
    assert names(graph.sources(graph.calls[layer][0].inputs[0])) == expected


def test_targets_are_the_nearest_layers_behind() -> None:
    graph = graph_of("falcon")
    norm = graph.calls["transformer.h.0.input_layernorm"][0]
    assert names(graph.targets(norm.outputs[0])) == ["0.self_attention.query_key_value", "0.mlp.dense_h_to_4h"]


@pytest.mark.parametrize(
    ("name", "writers", "readers"),
    [
        ("llama", ["self_attn.o_proj", "mlp.down_proj"], ["input_layernorm", "post_attention_layernorm"]),
        ("gemma2", ["post_attention_layernorm", "post_feedforward_layernorm"],
         ["input_layernorm", "pre_feedforward_layernorm"]),
        ("phi", ["self_attn.dense", "mlp.fc2"], ["input_layernorm"]),
        ("opt", ["self_attn.out_proj", "fc2"], ["self_attn_layer_norm", "final_layer_norm"]),
    ],
)  # fmt: skip
def test_the_residual_stream_is_the_longest_chain(name: str, writers: list[str], readers: list[str]) -> None:
    stream = graph_of(name).addition_chains()[0]
    inside = [node.module for node in stream.writers if "layers." in node.module]
    assert [name.split("layers.")[1][2:] for name in inside] == writers * 2
    reading = [node.module for node in stream.readers]
    assert [name.split("layers.")[1][2:] for name in reading[:-1]] == readers * 2  # the last is the final norm


def test_norms_on_the_stream_cut_it() -> None:
    chains = graph_of("bert").addition_chains()
    assert all(len(stream.readers) == 1 for stream in chains[:1]) and len(chains) >= 5


class Experts(nn.Module):
    """Each expert reads some rows; the last one none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).reshape(-1, 8)
        result = torch.zeros_like(flat)
        for rows, expert in zip((torch.tensor([0, 2]), torch.tensor([1])), self.experts, strict=False):
            result.index_add_(0, rows, expert(flat[rows]) * torch.rand(len(rows), 1))
        result[:, :4] += 1
        return x + result.view_as(x)


def test_chosen_rows_count_as_the_same_input_and_writes_in_place_are_seen() -> None:
    model = Experts()
    graph = record(model, lambda: model(torch.randn(1, 3, 8)))
    assert graph.groups() == [("experts.0", "experts.1")]
    assert graph.uncalled == ("experts.2",)
    assert names(graph.sources(graph.spans[""][1][0])) == ["0", "1"]


class Summed(nn.Module):
    """Rows of experts, put together and added up along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.experts = axis, nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([expert(x) for expert in self.experts]).unflatten(0, (4, 4))
        return x + rows.sum(dim=self.axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_sum_of_rows_belongs_to_the_stream_and_one_of_channels_does_not(axis: int) -> None:
    model = Summed(axis)
    graph = record(model, lambda: model(torch.randn(4, 4)))
    stream = graph.addition_chain(graph.spans[""][1][0])
    expected = ["0", "1", "2", "3"] if axis < 2 else []
    assert [node.module.rsplit(".")[-1] for node in stream.writers if node.module] == expected


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        return x * w


class Unseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hidden.apply(x, self.weight)


def test_a_leaf_module_whose_operations_nobody_sees_reads_all_it_was_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Unseen(), nn.Linear(4, 4))
    graph = record(model, lambda: model(torch.randn(2, 4)))
    assert [node.module for node in graph.sources(graph.calls["2"][0].inputs[0])] == ["1"]
    assert [node.module for node in graph.sources(graph.calls["1"][0].inputs[0])] == ["0"]


def test_quantized_layers_are_leaves_and_run_in_float() -> None:
    linear = nn.Linear(32, 4)
    spec = SCHEMES["mxfp4"]
    model = nn.Sequential(nn.LayerNorm(32), QuantLinear.from_float(linear, spec))
    x, seen = torch.randn(2, 32), []
    graph = record(model, lambda: seen.append(model(x)))
    assert torch.equal(seen[0], linear(model[0](x)))
    assert model[1].input_quantizer.mode is Mode.quantize, "afterwards the layer quantizes again"
    assert [node.module for node in graph.sources(graph.calls["1"][0].inputs[0])] == ["0"]
    assert not model[1]._forward_hooks and not model[1]._forward_pre_hooks


def test_a_move_repeats_what_was_done_to_the_elements() -> None:
    graph = graph_of("gpt_neox")
    fused = graph.calls["gpt_neox.layers.0.attention.query_key_value"][0]
    (view,) = graph.readers(fused.outputs[0])
    rows = torch.arange(96).expand(graph.values[fused.outputs[0]].shape)
    assert view.move is not None
    assert torch.equal(view.move(rows)[0, 0, :, 0], torch.tensor([0, 24, 48, 72]))


def test_a_view_is_repeated_of_a_tensor_in_another_order_of_memory() -> None:
    x = torch.randn(2, 3, 4)
    (view,) = record(nn.Sequential(nn.Identity()), lambda: x.view(6, 4)).nodes
    assert view.move is not None
    rows = torch.arange(4.0).expand(2, 3, 4)
    assert torch.equal(view.move(rows), rows.reshape(6, 4))


class FlexAttention(nn.Module):
    """Attention that compiles itself, and has no backward on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        query = self.query(x)[:, None]
        mixed: torch.Tensor = flex_attention(query, query, query)
        return x + self.out(mixed[:, 0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_forward_that_compiles_itself_is_refused_by_what_must_see_it_or_needs_a_gradient() -> None:
    torch.manual_seed(0)
    data = [torch.randn(1, 8, 16) for _ in range(2)]
    for algorithm, said in (("gptq", None), ("awq", "compiles a part"), ("autoround:iters=1", "No gradient")):
        model = nn.Sequential(FlexAttention(), FlexAttention())
        config = LLMTemplate.get("auto").get_config("int4_wo_per_channel", torch_algorithms([algorithm]))
        with pytest.raises(StructureError, match=said) if said else nullcontext():
            ModelQuantizer(config).quantize_model(model, data)
