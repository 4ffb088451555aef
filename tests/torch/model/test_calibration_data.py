"""Calibration data that a model cannot be calibrated with is an error that shows the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError
from quark.torch import ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from tests.models.torch_zoo import mlp

STATIC = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int8"), input=spec("int8"))))
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))


class Masked(nn.Module):
    """A forward with an optional second argument, and one for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(128, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, labels: Any = None) -> torch.Tensor:
        y: torch.Tensor = self.one(x)
        return y if mask is None else y * mask[:, None]


def calibrate(data: Any, model: nn.Module | None = None) -> nn.Module:
    return ModelQuantizer(STATIC).quantize_model(model or mlp(), data)


def failing() -> Iterator[torch.Tensor]:
    yield X
    raise OSError("the disk is gone")


WRONG = {
    "tensor": (X, r"is a Tensor, which is one batch: pass a list of batches, \[batch\]"),
    "array": (X.numpy(), "is a ndarray, which is one batch"),
    "dict": ({"x": X}, "is a dict, which is one batch"),
    "path": ("data.pt", "is a str; possible: a DataLoader, a list"),
    "number": (3, "is a int; possible"),
    "shape": ([X, X[:, :64]], r"does not take calibration batch 1, float32 \(4, 64\): RuntimeError: mat1 and mat2"),
    "dtype": ([X.long()], r"calibration batch 0, int64 \(4, 128\): RuntimeError"),
    "name": ([{"z": X}], r"calibration batch 0, dict \(z: float32 \(4, 128\)\): TypeError"),
    "generator": (failing(), "failed at batch 1: OSError: the disk is gone"),
    "strings": ([np.array(["a"])], "batch 0 is no array of numbers"),
    "zeros": ([X * 0, X * 0], "All 2 calibration batches hold zeros"),
    "denormal": ([X * 1e-42], "All 1 calibration batches hold zeros"),
    "pairs": (
        DataLoader(TensorDataset(X, X, torch.arange(4))),
        r"holds 3 items, and forward takes 1 \(x\)\. Pass",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_the_data_is_said(kind: str) -> None:
    data, message = WRONG[kind]
    model = mlp()
    with pytest.raises(CalibrationError, match=message):
        calibrate(data, model)
    assert torch.equal(model(X), mlp()(X))


def test_labels_are_left_out_where_forward_takes_none() -> None:
    alone = calibrate(DataLoader(TensorDataset(X), batch_size=2))
    labelled = calibrate(DataLoader(TensorDataset(X, torch.arange(4)), batch_size=2))
    assert torch.equal(alone(X), labelled(X))
    with pytest.raises(CalibrationError, match="holds 2 items"):  # floats may be anything
        calibrate([(X, torch.rand(4))])


def test_labels_are_not_passed_as_another_argument() -> None:
    with pytest.raises(CalibrationError, match=r"as labels are, which forward would take as its optional 'mask'"):
        calibrate([(X, torch.arange(4))], Masked())
    calibrate([(X, torch.rand(4))], Masked())
    calibrate([{"x": X, "mask": torch.arange(4)}], Masked())
    calibrate([(X, None, torch.arange(4))], Masked())


def test_the_cause_is_kept_and_errors_of_ours_stay_what_they_are() -> None:
    with pytest.raises(CalibrationError) as caught:
        calibrate(failing())
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(NonFiniteError):
        calibrate([X / 0])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_memory_that_is_short_is_no_fault_of_the_data(error: Exception) -> None:
    class Full(Masked):
        def forward(self, x: torch.Tensor, mask: Any = None, labels: Any = None) -> torch.Tensor:
            raise error

    with pytest.raises(type(error)) as caught:
        calibrate([X], Full())
    assert caught.value is error


def test_numpy_batches_are_tensors() -> None:
    read_only = X.numpy().copy()
    read_only.flags.writeable = False
    expected = calibrate([X])(X)
    for data in ([X.numpy()], [read_only], [[X.numpy()]], [{"x": X.numpy()}]):
        assert torch.equal(calibrate(data)(X), expected)


@pytest.mark.parametrize("model", ["folder", None, 3, nn.Linear])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module"):
        ModelQuantizer(STATIC).quantize_model(model, [X])
