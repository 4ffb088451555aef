"""What graph mode does to the float graph first: norms folded, writes in place removed, training switched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.spec import LayerSpec, spec
from quark.torch.graph.batch_norm import fold_batch_norms
from quark.torch.graph.operators import remove_inplace
from quark.torch.graph.quantize import prepare
from tests.models.graphs import block, exported, images, quantize


def calls(model: Any) -> list[str]:
    return [str(node.target) for node in model.graph.nodes if node.op == "call_function"]


def seen(norm: Any) -> Any:
    """A norm with other than the first statistics."""
    nn.init.uniform_(norm.running_var, 0.3, 3)
    nn.init.normal_(norm.running_mean)
    if norm.affine:
        nn.init.uniform_(norm.weight, -2, 2)
        nn.init.normal_(norm.bias)
    return norm


LAYERS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "conv2d": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 8, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.BatchNorm2d(8), (2, 4, 8, 8)),
    "same-padding": (nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6, affine=False), (2, 4, 8, 8)),
    "conv1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, eps=0.1), (2, 4, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 8, 8)),
    "transposed-groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (2, 4, 8, 8)),
    "linear": (nn.Linear(8, 6), nn.BatchNorm1d(6), (4, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_folded_norm_computes_the_same(name: str) -> None:
    layer, norm, shape = copy.deepcopy(LAYERS[name])
    torch.manual_seed(0)
    model = nn.Sequential(layer, seen(norm)).double().eval()
    x = torch.randn(shape, dtype=torch.float64)
    graph = exported(model, x, dynamic=False)
    assert fold_batch_norms(graph) == 1 and fold_batch_norms(graph) == 0
    graph.recompile()
    assert "aten.batch_norm.default" not in calls(graph)
    assert {key for key, _ in graph.named_parameters()} == {"0.weight", "0.bias"} and not list(graph.buffers())
    assert torch.allclose(graph(x), model(x), rtol=0, atol=1e-12)


class Branches(nn.Module):
    """A convolution that two read before its norm, and a norm on three axes behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), seen(nn.BatchNorm2d(3))
        self.linear, self.rows = nn.Linear(8, 8), seen(nn.BatchNorm1d(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.rows(self.linear((self.norm(y) + y).flatten(1, 2)))


@pytest.mark.slow
def test_a_norm_stays_where_folding_would_change_another_reader() -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    graph = exported(model, images(2))
    assert fold_batch_norms(graph) == 0
    quantized = quantize(exported(model, images(2)), LayerSpec(weight=spec("int8")))
    assert calls(quantized).count("aten.batch_norm.default") == 2


class Writes(nn.Module):
    """Writes in place: to a fresh tensor, to one with an older reader, to a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fresh = x * 2
        older = fresh + 1
        fresh += x
        torch.relu_(older)
        rows = (x * 3).view(-1)
        rows += 1
        return fresh + older + rows.view_as(x)


def test_writes_in_place_become_new_tensors_where_no_other_name_sees_them() -> None:
    x = torch.randn(4, 6)
    graph = exported(Writes(), x, dynamic=False)
    before = graph(x)
    remove_inplace(graph)
    graph.recompile()
    assert torch.equal(graph(x), before)
    assert [name for name in calls(graph) if name.split(".")[1].endswith("_")] == ["aten.add_.Tensor"]


@pytest.mark.slow
def test_a_graph_exported_in_training_is_quantized_as_in_evaluation() -> None:
    model = block()
    graph = exported(model.train(), images(4))
    prepare(graph)
    with torch.no_grad():
        assert torch.allclose(graph(images(3)), model.eval()(images(3)), atol=1e-5)
    assert "aten.batch_norm.default" not in calls(graph) and "aten.add_.Tensor" not in calls(graph)


@pytest.mark.slow
def test_training_switches_dropout_and_norms_and_survives_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), seen(nn.BatchNorm1d(16)), nn.Dropout(0.5)).eval()
    x = torch.randn(8, 16)
    graph = quantize(exported(model, x), LayerSpec(weight=spec("int8"), input=spec("int8")), x)
    assert graph.training is False and torch.equal(graph(x), graph(x))
    other = copy.deepcopy(graph)
    assert other.train() is other and other.training and not graph.training
    assert not torch.equal(other(x), other(x)) and torch.equal(graph(x), graph(x))
    name = next(name for name, _ in other.named_buffers() if name.endswith("running_mean"))
    moved, kept = other.get_buffer(name), graph.get_buffer(name)
    assert not torch.equal(moved, kept)
    assert torch.equal(other.eval()(x), other(x)) and other.quant_config is not None
