"""A frozen layer does what the float layer does, and nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.core.spec import LayerSpec, spec
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.linear import QuantLinear


def test_a_frozen_layer_calls_no_quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantLinear.from_float(nn.Linear(4, 4), LayerSpec(weight=spec("int8"), input=spec("int8")))
    calls: list[FakeQuantize] = []
    monkeypatch.setattr(FakeQuantize, "forward", lambda self, x, extras=None: (calls.append(self), x)[1])
    layer(torch.zeros(2, 4))
    assert calls == [layer.quantizer("input"), layer.quantizer("weight")]
    for role, mode in (("weight", Mode.frozen), ("input", Mode.off)):
        quantizer = layer.quantizer(role)
        assert isinstance(quantizer, FakeQuantize)
        quantizer.mode = mode
    layer(torch.zeros(2, 4))
    assert len(calls) == 2
