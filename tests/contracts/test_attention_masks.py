"""Every named configuration on attention whose mask comes by any road, as any number: as near float as without one."""

from __future__ import annotations

import math

import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer
from tests.contracts.test_presets import NOW, config
from tests.models.onnx_attention import MULTIPLIED, ROADS, SOFTMAXES, VALUES, attention, attention_feeds
from tests.models.onnx_zoo import Array, run

LEAST = {"XINT8": 21, "XINT8_QCONFIG": 21, "VINT8": 21, "VINT8_QCONFIG": 21}
"""Least SQNR in dB of types of 8 bits; 24 where nothing is said."""
MAY_LOSE = 3
"""In dB, to the same block with a mask of zeros."""


def quality(preset: str, road: str, value: float, softmax: str = "Softmax", opset: int = 17) -> float:
    """SQNR in dB of the outputs of a quantized block to those of ONNX Runtime on the float one."""
    model = attention(road, value, softmax, opset)
    feeds = attention_feeds(model, value)
    return sqnr(run(model, feeds[0]), _quantized(preset, model, feeds, softmax))


def _quantized(preset: str, model: onnx.ModelProto, feeds: list[dict[str, Array]], softmax: str) -> Array:
    done = ModelQuantizer(config(preset)).quantize_model(model, None, feeds)
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    return run(done, feeds[0])


def possible(road: str, value: float) -> bool:
    return math.isfinite(value) or road not in MULTIPLIED


@pytest.mark.parametrize(
    ("preset", "road", "value"),
    [
        ("A8W8", "computed", -1e4),
        ("A8W8", "given", -65504.0),
        ("A8W8", "chained", -1e9),
        ("A16W8", "constant_with_bias", -1e9),
        ("XINT8", "computed", -1e4),
        ("XINT8", "filled_and_added", -1e2),
        ("BFP16", "given", -1e4),
    ],
)
def test_finite_masks_cost_nothing(preset: str, road: str, value: float) -> None:
    assert quality(preset, road, value) > LEAST.get(preset, 24)


def test_a_softmax_that_is_written_out_is_one() -> None:
    assert quality("A8W8", "filled", -1e4, "written out", 11) > 24


@pytest.mark.slow
@pytest.mark.parametrize("preset", NOW)
def test_masks_of_every_road_and_number(preset: str) -> None:
    for road in ROADS:
        unmasked = quality(preset, road, -0.0)
        for value in (value for value in VALUES if possible(road, value)):
            masked = quality(preset, road, value)
            assert masked > unmasked - MAY_LOSE, f"{road} of {value}: {masked:.1f} dB, {unmasked:.1f} without"


@pytest.mark.slow
@pytest.mark.parametrize("opset", [11, 13, 21])
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("preset", ["A8W8", "A16W8", "XINT8"])
def test_masks_before_every_form_of_a_softmax(preset: str, softmax: str, opset: int) -> None:
    for road in ROADS:
        for value in (-1e2, -1e4, VALUES[-2]):
            assert quality(preset, road, value, softmax, opset) > LEAST.get(preset, 24), f"{road} of {value}"
