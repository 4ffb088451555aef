"""Train the quantized classifier of handwritten digits: int4 weights and activations, one scale for each tensor.

Prints held-out accuracy after quantization and after two epochs of training, in eager and in graph mode, for scales
that stay as calibrated and for learned ones. Needs scikit-learn for the training images; takes a minute on one core.
For a module of your own, put it in place of `float_model`, and the steps of its training in place of `train`: they stay
as they were, and the calibrated module trains like any other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType
from quark.torch.quantization.observer.observer import (
    LSQObserver,
    ObserverBase,
    PerTensorMinMaxObserver,
    TQTObserver,
)

sys.path.append(str(Path(__file__).parent / "models"))
from train_digits_cnn import HELD_OUT, DigitsCNN, shifted

SCALES: dict[str, type[ObserverBase]] = {
    "fixed": PerTensorMinMaxObserver,
    "LSQ": LSQObserver,
    "TQT": TQTObserver,
}
Digits = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Digits, Digits]:
    """Training and held-out images (n, 1, 8, 8) with labels."""
    data = load_digits()
    images = torch.tensor((data.images[:, None] / 16).astype(np.float32))
    labels = torch.tensor(data.target)
    order = np.random.default_rng(0).permutation(len(labels))
    return tuple((images[rows], labels[rows]) for rows in (order[HELD_OUT:], order[:HELD_OUT]))  # type: ignore[return-value]


def float_model() -> DigitsCNN:
    """The trained classifier, from the ONNX file beside its training script."""
    file = onnx.load(Path(__file__).parent / "models" / "digits_cnn" / "model.onnx")
    weights = {entry.name: torch.tensor(numpy_helper.to_array(entry)) for entry in file.graph.initializer}
    model = DigitsCNN()
    model.load_state_dict(weights, strict=False)  # without the counters of batches
    return model.eval()


def int4(observer: type[ObserverBase]) -> QTensorConfig:
    """Symmetric int4 with one scale for the tensor."""
    return QTensorConfig(
        dtype=Dtype.int4,
        observer_cls=observer,
        qscheme=QSchemeType.per_tensor,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
    )


def quantized(images: torch.Tensor, observer: type[ObserverBase], mode: QuantizationMode) -> nn.Module:
    """The classifier in int4, calibrated."""
    layer = QLayerConfig(weight=int4(observer), input_tensors=int4(observer))
    model: nn.Module = float_model()
    if mode is QuantizationMode.fx_graph_mode:
        shapes = ({0: torch.export.Dim("images")},)
        model = torch.export.export(model, (images[:2],), dynamic_shapes=shapes).module()
    config = QConfig(global_quant_config=layer, quant_mode=mode, log_severity_level=2)
    return ModelQuantizer(config).quantize_model(model, [images[:128]])


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Train like any module: the optimizer sees weights, biases and learned scales."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    steps = epochs * (len(images) // 16)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images))[: len(images) // 16 * 16].view(-1, 16):
            loss = cross_entropy(model(shifted(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the images that are recognised, in percent."""
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).float().mean())


def main(words: list[str] | None = None) -> float:
    """Quantize, train, freeze, print; returns the lowest accuracy of a trained model, from 0 to 1."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--epochs", type=int, default=2)
    args = arguments.parse_args(words)
    lowest = 100.0
    torch.set_num_threads(1)
    training, held_out = digits()
    table = Table("mode", "scales", "quantized", "trained", title=f"float: {accuracy(float_model(), *held_out):.2f} %")
    for mode in QuantizationMode:
        for name, observer in SCALES.items():
            model = quantized(training[0], observer, mode)
            before = accuracy(model, *held_out)
            train(model, *training, args.epochs)
            model = ModelQuantizer.freeze(model)
            after = accuracy(model, *held_out)
            lowest = min(lowest, after)
            table.add_row(mode.name, name, f"{before:.2f} %", f"{after:.2f} %")
    Console().print(table)
    return lowest / 100


if __name__ == "__main__":
    main()
