"""Means of what layers give, from what they read, are those that ONNX Runtime's layers have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quark.onnx.algorithms.rescaling import linear_means
from quark.onnx.algorithms.rescaling.linear_means import LinearMeans
from tests.models.onnx_zoo import Builder, outputs

LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "padded": ("Conv", (2, 4, 7, 6), (5, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    "strides and uneven pads": ("Conv", (2, 4, 8, 7), (5, 4, 3, 2), {"pads": [0, 1, 2, 0], "strides": [2, 3]}),
    "groups, dilated": ("Conv", (2, 6, 9, 9), (4, 3, 3, 3), {"group": 2, "dilations": [2, 1], "pads": [2, 0, 1, 3]}),
    "same upper": ("Conv", (3, 4, 7, 8), (4, 1, 3, 4), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ("Conv", (1, 2, 7, 8), (3, 2, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    "valid": ("Conv", (1, 2, 7, 8), (3, 2, 4, 3), {"auto_pad": "VALID"}),
    "one axis": ("Conv", (2, 3, 11), (4, 3, 5), {"pads": [4, 2], "strides": [2]}),
    "three axes": ("Conv", (1, 2, 4, 5, 6), (3, 2, 1, 2, 3), {"pads": [0, 1, 1, 0, 0, 1]}),
    "transposed": ("ConvTranspose", (2, 4, 5, 6), (4, 3, 3, 2), {"strides": [2, 2], "pads": [1, 0, 2, 1], "group": 2}),
    "transposed further": (
        "ConvTranspose", (1, 2, 5, 4), (2, 3, 3, 3), {"strides": [3, 2], "output_padding": [2, 1], "dilations": [1, 2]},
    ),
    "Gemm": ("Gemm", (3, 6), (4, 6), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "MatMul": ("MatMul", (2, 5, 6), (6, 4), {}),
}  # fmt: skip


def layer_of(name: str) -> tuple[onnx.ModelProto, Builder, LinearMeans]:
    """A model of one layer, its builder, and the means of that layer."""
    op_type, shape, weight, attributes = LAYERS[name]
    b = Builder()
    channels = weight[1] * attributes.get("group", 1) if op_type == "ConvTranspose" else weight[0]
    more = [] if op_type == "MatMul" else [b.constant("b", b.random.normal(0, 1, channels))]
    b.node(op_type, ["x", b.constant("w", b.random.normal(0.2, 1, weight)), *more], "y", **attributes)
    model = b.model({"x": list(shape)}, {"y": [None] * len(shape)})
    (node,) = ir.from_proto(model).graph
    layer = LinearMeans.of(node)
    assert layer is not None
    return model, b, layer


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_means_are_those_of_the_layer(name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(linear_means, "_AT_ONCE", 0)
    op_type, shape, _, _ = LAYERS[name]
    model, b, layer = layer_of(name)
    x = np.float32(b.random.normal(0.5, 1, shape))
    found = layer(layer.inputs(x))
    y = outputs(model, {"x": x})[0].astype(np.float64)
    rest = tuple(range(1, y.ndim - 1)) if op_type in ("Gemm", "MatMul") else tuple(range(2, y.ndim))
    expected = y.mean(rest)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected).min() > 1e-3


@pytest.mark.parametrize("name", LAYERS)
def test_sums_of_codes_are_decoded_as_their_values_are(name: str) -> None:
    _, b, layer = layer_of(name)
    x = b.random.integers(0, 256, LAYERS[name][1]).astype(np.float32)
    scale, zero = (ir.Value(name=n, const_value=ir.tensor(a)) for n, a in (("s", np.float32(0.1)), ("z", np.uint8(70))))
    decoder = ir.node("DequantizeLinear", [None, scale, zero])
    expected = layer.inputs(np.float32(0.1) * (x - 70))
    np.testing.assert_allclose(layer.of_codes(layer.inputs(x), x.shape[2:], decoder), expected, atol=1e-4)


def test_of_other_layers_the_means_do_not_follow() -> None:
    def layer(op_type: str, inputs: list[str], **attributes: Any) -> LinearMeans | None:
        node = onnx.helper.make_node(op_type, inputs, ["y"], **attributes)
        return LinearMeans.of(ir.from_proto(node))

    assert layer("MatMul", ["x", "computed"]) is None
    assert layer("Relu", ["x"]) is None
    assert layer("Gemm", ["x", "w"], transA=1) is None
    assert layer("ConvTranspose", ["x", "w"], output_shape=[9, 9]) is None
