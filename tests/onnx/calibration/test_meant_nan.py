"""NaN that a model replaces by itself, or gives as an output, is no fault of the data."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.errors import NonFiniteError
from quark.onnx import ModelQuantizer
from tests.models.onnx_zoo import Array, Builder, outputs

LENGTH, WIDTH = 6, 16


def attention(replaced: str) -> onnx.ModelProto:
    """x and an added mask to y and the weights p; where NaN is replaced: in `p`, in `o`, or nowhere."""
    b = Builder()

    def linear(x: str, name: str) -> str:
        return b.node("MatMul", [x, b.constant(f"{name}_w", b.random.normal(0, 0.3, (WIDTH, WIDTH)))], name)

    def without_nan(x: str, name: str) -> str:
        if name != replaced:
            return x
        return b.node("Where", [b.node("IsNaN", [x], "is_nan"), b.constant("zero", np.array(0.0)), x], f"{name}_finite")

    scores = b.node("MatMul", [linear("x", "q"), b.node("Transpose", [linear("x", "k")], "kt", perm=[0, 2, 1])], "s")
    p = without_nan(b.node("Softmax", [b.node("Add", [scores, "mask"], "masked")], "p", axis=-1), "p")
    o = without_nan(b.node("MatMul", [p, linear("x", "v")], "o"), "o")
    linear(o, "y")
    return b.model({"x": ["n", LENGTH, WIDTH], "mask": ["n", LENGTH, LENGTH]}, {"y": ["n", LENGTH, WIDTH]})


def feeds() -> list[dict[str, Array]]:
    """Texts in which one row may look at nothing."""
    random, mask = np.random.default_rng(0), np.triu(np.full((2, LENGTH, LENGTH), -np.inf, np.float32), 1)
    mask[1, 2] = -np.inf
    return [{"x": random.normal(size=(2, LENGTH, WIDTH)).astype(np.float32), "mask": mask} for _ in range(4)]


@pytest.mark.parametrize("replaced", ["p", "o"])
@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_what_the_model_replaces_is_left_to_it(preset: str, replaced: str) -> None:
    source = attention(replaced)
    done = ModelQuantizer(preset).quantize_model(source, None, feeds())
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    (expected,), (found,) = outputs(source, feeds()[0]), outputs(done, feeds()[0])
    assert np.isfinite(found).all() and sqnr(expected, found) > 27


def test_what_nothing_replaces_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        ModelQuantizer("A8W8").quantize_model(attention("nowhere"), None, feeds())


def test_outputs_are_compared_where_the_float_one_is_finite() -> None:
    b = Builder()
    b.node("Sqrt", [b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(WIDTH, WIDTH)))], "z")], "y")
    source = b.model({"x": ["n", WIDTH]}, {"y": ["n", WIDTH]})
    data = [{"x": b.random.normal(size=(32, WIDTH)).astype(np.float32)} for _ in range(4)]
    found = ModelQuantizer("INT8_CPU").recover(source, None, data, budget=30, quick=True)
    assert found.score > 15 and found.model is not None
    assert np.isnan(outputs(found.model, data[0])[0]).any()
