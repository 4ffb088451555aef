"""The two float models of the ONNX benchmarks, with seeded random weights: `python benchmarks/onnx_models.py FOLDER`.

resnet50.onnx   the layout of ResNet-50 (He et al. 2015), input x (1, 3, 224, 224)
encoder.onnx    6 BERT-like layers, 384 wide, 12 heads, input ids (1, 128)
linear.onnx     20 MatMul of 5808 x 5808 with a Relu between: 2.7 GB; only with --large
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Relu(body + shortcut)."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """3, 4, 6 and 3 bottlenecks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            layers.append(Bottleneck(inside, 64 << stage, 2 if stage and not index else 1))
            inside = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class EncoderLayer(nn.Module):
    """Attention and a GELU feed-forward part, each followed by LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = (
            part(x).reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        weights = torch.softmax(q @ k.transpose(2, 3) * (width // self.heads) ** -0.5, -1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.first(x + self.o(mixed))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """Embedding, position and layers."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, tokens), integers."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.layers(self.norm(x))


def samples(name: str, count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Feeds for a model."""
    random = np.random.default_rng(seed)
    if name == "encoder":
        return [{"ids": random.integers(0, 1000, (1, 128))} for _ in range(count)]
    return [{"x": random.normal(size=(1, 3, 224, 224)).astype(np.float32)} for _ in range(count)]


def export(folder: Path) -> None:
    """Write resnet50.onnx and encoder.onnx where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name, model in {"resnet50": resnet50(), "encoder": Encoder()}.items():
        path = folder / f"{name}.onnx"
        if path.exists():
            continue
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.0)
                nn.init.uniform_(norm.running_var, 0.5, 1.5)
        (feed,) = samples(name, 1)
        inputs = tuple(torch.from_numpy(value) for value in feed.values())
        torch.onnx.export(
            model.eval(), inputs, path, dynamo=True, opset_version=18, input_names=list(feed), output_names=["y"],
            external_data=False, verbose=False,
        )  # fmt: skip


def export_linear(folder: Path, count: int = 20, width: int = 5808) -> Path:
    """Write linear.onnx, a chain of MatMul and Relu, weight by weight."""
    path = folder / "linear.onnx"
    if path.exists():
        return path
    random, initializers, nodes, offset = np.random.default_rng(0), [], [], 0
    with (folder / "linear.onnx.data").open("wb") as file:
        for index in range(count):
            weight = random.standard_normal((width, width), np.float32) * np.float32((2 / width) ** 0.5)
            tensor = TensorProto(name=f"w{index}", dims=[width, width], data_type=TensorProto.FLOAT)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": file.name.split("/")[-1], "offset": offset, "length": weight.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            offset += weight.nbytes
            weight.tofile(file)
            initializers.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"x{index}", f"w{index}"], [f"m{index}"]))
            nodes.append(helper.make_node("Relu", [f"m{index}"], [f"x{index + 1}"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", width]) for n in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    export(arguments.folder)
    if arguments.large:
        export_linear(arguments.folder)
    sys.stdout.write("\n".join(sorted(p.name for p in arguments.folder.iterdir())) + "\n")
