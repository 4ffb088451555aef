"""Models and samples for the ONNX flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.fingerprint.outputs import MODELS, OUT
from benchmarks.fingerprint.torch_models import language_model, tokens
from quark.onnx import ModelQuantizer
from tests.models.onnx_zoo import ZOO, Builder, cnn, feed, images, mlp, vectors

Feeds = list[dict[str, np.ndarray]]
Network = tuple[onnx.ModelProto, Feeds]


def digits() -> Network:
    """The example classifier and 32 of its images."""
    data = np.load(MODELS / "digits_cnn" / "data.npz")
    seen = (data["calibration_images"][:32] / 16).astype(np.float32)
    return onnx.load(MODELS / "digits_cnn" / "model.onnx"), [{"image": batch} for batch in np.split(seen, 8)]


def features() -> onnx.ModelProto:
    """What the other networks lack: activations behind convolutions, Pad, Slice, pools, Mul and Add, live MatMul."""
    b = Builder(2)
    x = b.conv("x", "first", (4, 8, 3))
    slope = b.constant("slope", b.random.uniform(0.1, 0.3, (8, 1, 1)))
    x = b.node("LeakyRelu", [x], "leaky", alpha=0.11)
    x = b.node("PRelu", [b.conv(x, "second", (8, 8, 3), norm=False), slope], "prelu")
    x = b.node("Relu", [b.conv(x, "third", (8, 8, 3), group=8, norm=False)], "relu")
    x = b.node("Mul", [x, b.node("Sigmoid", [b.conv(x, "fourth", (8, 8, 1), norm=False)], "sigmoid")], "gated")
    x = b.node("Add", [x, b.node("HardSigmoid", [x], "hard")], "sum")
    x = b.node("Gelu", [b.conv(x, "fifth", (8, 8, 1), norm=False)], "gelu")
    names = [b.constant(f"norm_{name}", b.random.uniform(0.5, 1.5, 8)) for name in ("scale", "bias")]
    x = b.node("Relu", [b.node("InstanceNormalization", [x, *names], "instance")], "instance_relu")
    x = b.node("Pad", [x, b.integers("pads", [0, 0, 1, 1, 0, 0, 1, 1])], "padded")
    x = b.node("Slice", [x, *(b.integers(f"cut{i}", [value]) for i, value in enumerate((1, 17, 2)))], "cut")
    x = b.node("AveragePool", [x], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    x = b.node("Clip", [x, b.constant("zero", np.array(0.0)), b.constant("six", np.array(6.0))], "clipped")
    x = b.node("Reshape", [x, b.integers("shape", [0, 8, -1])], "flat")
    scores = b.node("MatMul", [b.node("Transpose", [x], "turned", perm=[0, 2, 1]), x], "scores")
    mixed = b.node(
        "MatMul",
        [b.node("Softmax", [scores], "soft", axis=-1), b.node("Transpose", [x], "values", perm=[0, 2, 1])],
        "mixed",
    )
    mean = b.node("ReduceMean", [mixed, b.integers("axis", [1])], "mean", keepdims=0)
    b.node("Gemm", [mean, b.constant("w", b.random.normal(0, 0.5, (8, 5))), b.constant("c", np.ones(5))], "y")
    return b.model({"x": ["n", 4, 16, 16]}, {"y": ["n", 5]}, 20)


def uneven() -> onnx.ModelProto:
    """The same with scales so far apart that an NPU's shifts do not reach."""
    model = features()
    for name, factor in {"second_w": 64.0, "third_w": 2.0**-10, "fourth_w": 2.0**-9}.items():
        (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(factor), name))
    return model


class Logits(torch.nn.Module):
    """The example language model, without its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model(torch.float32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (1, n)."""
        return self.model(input_ids=ids, use_cache=False).logits


@cache
def exported() -> bytes:
    """The example language model as torch exports it."""
    file = Path("exported.onnx")
    torch.onnx.export(
        Logits().eval(), (tokens()[0],), file, dynamo=True, opset_version=18, external_data=False, verbose=False,
        input_names=["ids"],
    )  # fmt: skip
    return file.read_bytes()


def llama() -> Network:
    return onnx.load_from_string(exported()), [{"ids": batch.numpy()} for batch in tokens()]


def small(make: Callable[[], onnx.ModelProto]) -> Network:
    """A model and one sample of noise."""
    model = make()
    return model, [feed(model)]


NETWORKS: dict[str, Callable[[], Network]] = {
    **{name: partial(small, make) for name, make in ZOO.items()},
    "features": partial(small, features),
    "uneven": partial(small, uneven),
    "cnn": lambda: (cnn(), images()),
    "mlp": lambda: (mlp(), vectors()),
    "digits": digits,
    "llama": llama,
}


def quantize(config: Any, network: str, samples: bool = True, file: str = "model.onnx") -> None:
    """A network under a config, as a file."""
    model, feeds = NETWORKS[network]()
    ModelQuantizer(config).quantize_model(model, str(OUT / file), feeds if samples else None)
