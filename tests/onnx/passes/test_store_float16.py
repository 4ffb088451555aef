"""Large float constants as float16: half the size, the outputs near, and folded when the file is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper, numpy_helper

from quark.core.metrics import sqnr
from quark.onnx.passes.store_float16 import store_float16

RNG = np.random.default_rng(0)


def model(**weights: np.ndarray) -> onnx.ModelProto:
    """y = x @ w1 + x @ w2 ..., each (64, 32)."""
    nodes = [helper.make_node("MatMul", ["x", name], [f"y_{name}"], name) for name in weights]
    nodes.append(helper.make_node("Sum", [f"y_{name}" for name in weights], ["y"], "sum"))
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, size]) for n, size in (("x", 64), ("y", 32)))
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], constants), ir_version=9)
    made.opset_import[0].version = 17
    return made


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0])


def test_half_the_size_and_the_same_outputs_but_for_the_last_digits(tmp_path: Path) -> None:
    made, x = model(w=RNG.normal(size=(64, 32))), RNG.normal(size=(2, 64)).astype(np.float32)
    changed = ir.from_proto(made)
    assert store_float16(changed) == 1 and store_float16(changed) == 0
    done = ir.to_proto(changed)
    onnx.checker.check_model(done, full_check=True)
    assert done.ByteSize() < 0.6 * made.ByteSize()
    half = next(numpy_helper.to_array(t) for t in done.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16)
    exact = x @ half.astype(np.float32)
    np.testing.assert_allclose(run(done, x), exact, rtol=1e-5, atol=1e-5)
    assert sqnr(run(made, x), run(done, x)) > 66
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(done.SerializeToString(), options)
    assert "Cast" not in {node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node}


def test_what_float16_cannot_hold_stays() -> None:
    large, tiny = RNG.normal(size=(64, 32)), 1e-8 * RNG.normal(size=(64, 32))
    large[3, 4] = 1e5
    changed = ir.from_proto(model(large=large, tiny=tiny))
    assert store_float16(changed) == 0
    assert {tensor.data_type for tensor in ir.to_proto(changed).graph.initializer} == {onnx.TensorProto.FLOAT}
