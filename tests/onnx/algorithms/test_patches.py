"""Rows times the weight are what ONNX Runtime computes, for every kind of layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quark.errors import NotSupportedError
from quark.onnx.algorithms.rounding.patches import product_of
from quark.onnx.graph.model_file import load
from tests.models.onnx_zoo import Builder, run

CONVS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 7, 6), (4, 3, 3, 3), {}),
    "padded unevenly": ((2, 3, 7, 6), (4, 3, 3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "dilated": ((2, 3, 9, 9), (4, 3, 3, 3), {"dilations": [2, 3], "pads": [2, 2, 2, 2]}),
    "groups": ((2, 4, 6, 6), (6, 2, 3, 3), {"group": 2, "strides": [2, 2]}),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "same upper": ((2, 3, 7, 6), (4, 3, 4, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    "same lower": ((2, 3, 7, 6), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
    "one axis": ((3, 2, 11), (5, 2, 3), {"strides": [2], "pads": [2, 0]}),
    "three axes": ((2, 2, 5, 4, 3), (3, 2, 2, 2, 2), {"pads": [1, 0, 0, 0, 1, 1]}),
}
TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 4, 5), (3, 4, 3, 3), {}),
    "strided": ((2, 3, 4, 5), (3, 4, 3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 2]}),
    "dilated": ((2, 3, 4, 5), (3, 4, 3, 3), {"strides": [2, 1], "dilations": [1, 2], "pads": [3, 1, 2, 0]}),
    "groups": ((2, 4, 4, 4), (4, 3, 2, 2), {"group": 2, "strides": [2, 2]}),
    "one axis": ((2, 3, 6), (3, 2, 4), {"strides": [2], "pads": [1, 1]}),
}
DENSE: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "MatMul": ("MatMul", (3, 4, 5, 6), (6, 7), {}),
    "MatMul of rows": ("MatMul", (3, 6), (6, 7), {}),
    "Gemm": ("Gemm", (3, 6), (6, 7), {"alpha": 0.5}),
    "Gemm transposed": ("Gemm", (6, 3), (7, 6), {"transA": 1, "transB": 1}),
}
CASES = [
    *(("Conv", *case) for case in CONVS.values()),
    *(("ConvTranspose", *case) for case in TRANSPOSED.values()),
    *DENSE.values(),
]
NAMES = [*CONVS, *(f"transposed {name}" for name in TRANSPOSED), *DENSE]


@pytest.mark.parametrize(("op_type", "shape", "weight_shape", "attributes"), CASES, ids=NAMES)
def test_rows_times_the_weight_are_the_outputs(
    op_type: str, shape: tuple[int, ...], weight_shape: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    b = Builder()
    x = b.random.normal(0, 1, shape).astype(np.float32)
    weight = b.random.normal(0, 1, weight_shape).astype(np.float32)
    b.node(op_type, ["x", b.constant("w", weight)], "y", **attributes)
    proto = b.model({"x": list(shape)}, {"y": [f"n{i}" for i in range(len(shape))]})
    y = run(proto, {"x": x})
    product = product_of(next(iter(load(proto).graph)), weight)
    matrix = product.matrix(weight)
    np.testing.assert_array_equal(product.native(matrix), weight)
    sizes = product.shape(y)
    chosen = b.random.permutation(int(np.prod(sizes)))[: max(1, int(np.prod(sizes)) * 3 // 4)]
    for sample in range(len(y)):
        rows = product.rows(x, sample, sizes, chosen)
        groups, _, columns = matrix.shape
        got = np.einsum("rgk,gok->rgo", rows.reshape(-1, groups, columns), matrix).reshape(len(rows), -1)
        np.testing.assert_allclose(got, product.outputs(y, sample, chosen), rtol=1e-4, atol=1e-4)


def test_what_is_no_product_of_one_matrix_is_refused() -> None:
    b = Builder()
    weight = b.random.normal(0, 1, (2, 6, 7)).astype(np.float32)
    b.node("MatMul", ["x", b.constant("w", weight)], "y")
    node = next(iter(load(b.model({"x": [2, 3, 6]}, {"y": [f"n{i}" for i in range(3)]})).graph))
    with pytest.raises(NotSupportedError, match="a weight of 3 axes; possible: 2"):
        product_of(node, weight)
