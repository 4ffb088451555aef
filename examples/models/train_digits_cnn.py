"""Train the small convolutional classifier of the ONNX demos and tests, and export it to ONNX.

The images are the handwritten digits of scikit-learn, 8 by 8. The network has the parts that quantizers treat each in
its own way: a residual Add, a depthwise convolution, a Concat, both poolings and a Gemm; BatchNormalization stays in
the exported graph. Writes ``model.onnx`` and ``data.npz`` (calibration and held-out images with labels).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

CALIBRATION, HELD_OUT = 128, 597


class ConvNorm(nn.Sequential):
    """A convolution of stride 1 that keeps the size, then BatchNormalization."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs))


class DigitsCNN(nn.Module):
    """Images (n, 1, 8, 8) in [0, 1] to logits (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(1, 16)
        self.first, self.second = ConvNorm(16, 16), ConvNorm(16, 16)
        self.depthwise, self.pointwise = ConvNorm(16, 16, groups=16), ConvNorm(16, 32, 1)
        self.narrow, self.wide = ConvNorm(32, 16, 1), ConvNorm(32, 32)
        self.last = ConvNorm(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Compute the logits."""
        stem = functional.relu(self.stem(image))
        block = functional.relu(stem + self.second(functional.relu(self.first(stem))))
        separable = functional.relu(self.pointwise(functional.relu(self.depthwise(block))))
        pooled = functional.max_pool2d(separable, 2)
        both = torch.cat([functional.relu(self.narrow(pooled)), functional.relu(self.wide(pooled))], dim=1)
        mean = functional.adaptive_avg_pool2d(functional.relu(self.last(both)), 1)
        return self.head(mean.flatten(1))


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move each batch by up to one pixel in both directions."""
    down, right = (int(step) for step in torch.randint(-1, 2, (2,)))
    return torch.roll(images, (down, right), (2, 3))


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> DigitsCNN:
    """Train with AdamW and a one-cycle rate."""
    model = DigitsCNN()
    steps = epochs * (len(images) // 32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for _ in range(epochs):
        order = torch.randperm(len(images))[: len(images) // 32 * 32]
        for chosen in order.view(-1, 32):
            loss = functional.cross_entropy(model(shifted(images[chosen])), labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def export(model: DigitsCNN, path: Path) -> None:
    """Write the model with a batch of any size; PRESERVE and no folding leave BatchNormalization in the graph."""
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, 8, 8),),
        path,
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        opset_version=17,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
    )


def main() -> None:
    """Split the digits, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "digits_cnn", help="folder to write to")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training images")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    images = (digits.images[:, None] / 16).astype(np.float32)
    model = train(torch.tensor(images[training]), torch.tensor(digits.target[training]), options.epochs)
    with torch.no_grad():
        found = model(torch.tensor(images[held_out])).argmax(1).numpy()
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    print(f"held-out accuracy {(found == digits.target[held_out]).mean():.2%} of {HELD_OUT}")

    options.output.mkdir(parents=True, exist_ok=True)
    export(model, options.output / "model.onnx")
    splits = {"calibration": training[:CALIBRATION], "heldout": held_out}
    arrays = {f"{name}_images": digits.images[rows, None].astype(np.uint8) for name, rows in splits.items()}
    arrays |= {f"{name}_labels": digits.target[rows].astype(np.uint8) for name, rows in splits.items()}
    np.savez_compressed(options.output / "data.npz", **arrays)


if __name__ == "__main__":
    main()
