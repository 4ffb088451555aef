"""Models and shortcuts of the tests of graph mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quark.core.spec import LayerSpec
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.config.tensor.enums import QuantizationMode

FX = QuantizationMode.fx_graph_mode
BATCH = torch.export.Dim("batch", min=2, max=1024)


class Block(nn.Module):
    """Convolutions with norms, an Add in place, a Concat, both poolings, a linear layer; input (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.left, self.left_norm = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.right = nn.Conv2d(8, 4, 1)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.left_norm(self.left(x))
        y += x
        both = torch.cat([nn.functional.max_pool2d(y, 2), nn.functional.avg_pool2d(self.right(x), 2)], dim=1)
        return self.head(self.drop(nn.functional.adaptive_avg_pool2d(both, 1).flatten(1)))


def block(seed: int = 0) -> Block:
    """A seeded Block whose norms have seen data."""
    torch.manual_seed(seed)
    model = Block()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.3, 3)  # type: ignore[union-attr]
    return model.eval()


def images(count: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def exported(model: nn.Module, *args: Any, dynamic: bool = True) -> fx.GraphModule:
    """The graph of a model; the first axis of each tensor is dynamic."""
    shapes = tuple({0: BATCH} for _ in args) if dynamic else None
    module = torch.export.export(model, args, dynamic_shapes=shapes).module()
    assert isinstance(module, fx.GraphModule)
    return module


def quantize(model: nn.Module, layer: LayerSpec, *batches: Any, **options: Any) -> Any:
    """Quantize in graph mode."""
    config = QConfig(global_quant_config=config_of_layer(layer), quant_mode=FX, **options)
    return ModelQuantizer(config).quantize_as_planned(model, list(batches) or None)


def quantizers(model: fx.GraphModule) -> dict[str, list[str]]:
    """Path of a quantizer -> the tensors that it is called on."""
    found: dict[str, list[str]] = {}
    for node in model.graph.nodes:
        if node.op == "call_module" and str(node.target).rsplit(".", 1)[-1].startswith(("weight", "bias", "in", "out")):
            found.setdefault(str(node.target), []).append(node.args[0].name)
    return found
