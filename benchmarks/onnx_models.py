"""The float models of the ONNX benchmarks, with seeded random weights: `python benchmarks/onnx_models.py FOLDER`.

resnet50.onnx   the layout of ResNet-50 (He et al. 2015), input x (1, 3, 224, 224)
resnet18.onnx   the layout of ResNet-18, with the statistics of its own activations in BatchNormalization
encoder.onnx    6 BERT-like layers, 384 wide, 12 heads, input ids (1, 128)
bert_base.onnx  12 of them, 768 wide, as BERT-base has; only where it is asked for
linear.onnx     20 MatMul of 5808 x 5808 with a Relu between: 2.7 GB; only with --large
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import nn


class Residual(nn.Module):
    """A body of convolutions beside a shortcut."""

    def __init__(self, body: nn.Sequential, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Relu(body + shortcut)."""
        return torch.relu(self.body(x) + self.shortcut(x))


def bottleneck(inside: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions."""
    outside = 4 * width
    body = nn.Sequential(
        nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
    )  # fmt: skip
    return Residual(body, inside, outside, stride)


def basic(inside: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    body = nn.Sequential(
        nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
    )  # fmt: skip
    return Residual(body, inside, width, stride)


def resnet(block: Callable[[int, int, int], Residual], counts: tuple[int, ...], widening: int) -> nn.Module:
    """Stem, four stages of residual blocks, mean and classifier."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            layers.append(block(inside, 64 << stage, 2 if stage and not index else 1))
            inside = widening * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def resnet50() -> nn.Module:
    """3, 4, 6 and 3 bottlenecks."""
    return resnet(bottleneck, (3, 4, 6, 3), 4)


def resnet18() -> nn.Module:
    """Twice two basic blocks in each of four stages; He's initialization, activations of order 1."""
    torch.manual_seed(0)
    model = resnet(basic, (2, 2, 2, 2), 1)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.0)
            nn.init.normal_(layer.bias, 0, 0.1)
            layer.momentum = None
    with torch.no_grad():
        for feed in samples("resnet18", 4, seed=1):
            model.train()(torch.from_numpy(feed["x"]))
    return model


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
    if name in ("encoder", "bert_base"):
        return [{"ids": random.integers(0, 1000, (1, 128))} for _ in range(count)]
    feeds = [{"x": random.normal(size=(1, 3, 224, 224)).astype(np.float32)} for _ in range(count)]
    if name == "resnet18":
        # Patches of 16 x 16: of plain noise, the mean of the last layer is the same for every sample.
        for feed in feeds:
            feed["x"] = 0.3 * feed["x"] + np.kron(feed["x"][:, :, :14, :14], np.ones((16, 16), np.float32))
    return feeds


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "encoder": Encoder,
    "resnet18": resnet18,
    "bert_base": lambda: Encoder(12, 768),
}
"""Name -> what makes a model."""


def export(folder: Path, names: Sequence[str] = ("resnet50", "encoder", "resnet18")) -> None:
    """Write models where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name}.onnx"
        if path.exists():
            continue
        torch.manual_seed(0)
        model = MODELS[name]()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.momentum is not None:
                nn.init.uniform_(norm.weight, 0.5, 1.0)
                nn.init.uniform_(norm.running_var, 0.5, 1.5)
                # The exporter stores equal biases once, and a shared bias is not corrected.
                nn.init.normal_(norm.bias, 0, 0.1)
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
    parser.add_argument("names", nargs="*", default=["resnet50", "encoder", "resnet18"])
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    export(arguments.folder, arguments.names)
    if arguments.large:
        export_linear(arguments.folder)
    sys.stdout.write("\n".join(sorted(p.name for p in arguments.folder.iterdir())) + "\n")
