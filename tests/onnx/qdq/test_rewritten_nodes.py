"""What takes the place of a node computes what that did, whatever its attributes say, and whether they are written.

torch.onnx writes attributes at their defaults, which another operator may not know at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import NothingToQuantizeError, StructureError
from quark.onnx import ModelQuantizer
from quark.onnx.graph.edit import carried_over
from quark.onnx.operators import RECURRENT, RULES
from quark.onnx.placement.kernels import DYNAMIC_KERNELS
from tests.contracts.test_presets import NOW, config
from tests.models.onnx_zoo import Array, outputs

OPSET = 17
QUICK = ("A8W8", "BF16", "INT8_CPU_DYNAMIC", "INT8_CPU_WEIGHTS")
DYNAMIC = ("INT8_CPU_DYNAMIC", "UINT8_DYNAMIC_QUANT")
LEAST = {"MX4": 2, "MXFP4E2M1": 5, "MX6": 9, "MATMUL_NBITS": 9}
"""Least SQNR in dB; 12 where nothing is said: another axis, or order, gives less than 3."""

BASE: dict[str, dict[str, Any]] = {
    "Gather": {},
    "Conv": {},
    "Gemm": {},
    "MatMul": {},
    **{name: {"hidden_size": 16} for name in RECURRENT},
}
"""Op types that some configuration rewrites -> what they need."""
OTHERS: dict[str, list[dict[str, Any]]] = {
    "Gather": [{"axis": 1}, {"axis": -1}, {"axis": -2}],
    "Conv": [
        {"pads": [1, 1, 1, 1]},
        {"strides": [2, 2]},
        {"dilations": [2, 2]},
        {"auto_pad": "SAME_UPPER"},
        {"group": 4},
        {"kernel_shape": [3, 3]},
    ],
    "Gemm": [{"alpha": 0.5}, {"beta": 2.0}, {"transB": 1}, {"transA": 1}],
    "MatMul": [{"stacked": True}],
    "LSTM": [{"direction": "reverse"}, {"clip": 0.5}, {"input_forget": 1},
             {"activations": ["Sigmoid", "Tanh", "Relu"]}],
    "GRU": [{"direction": "reverse"}, {"clip": 0.5}, {"linear_before_reset": 1}],
    "RNN": [{"direction": "reverse"}, {"activations": ["Relu"]}],
}  # fmt: skip
"""Op type -> attributes that change what it computes; `stacked`: a weight of several matrices."""
NOT_IN_RUNTIME = {"layout"}
"""Attributes that ONNX Runtime knows at their default only."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def model(op_type: str, attributes: dict[str, Any]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A node of this op type with constant weights, and a sample."""
    attributes = dict(attributes)
    random = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    inputs: dict[str, Array] = {"x": random.normal(size=(16, 40)).astype(np.float32)}
    outputs_of = ["y"]
    if op_type == "Gather":
        arrays["w"] = random.normal(size=(40, 40)).astype(np.float32)
        inputs = {"x": np.array([3, 11, 0, 7])}
    elif op_type == "Conv":
        arrays["w"] = random.normal(size=(8, 8 // attributes.get("group", 1), 3, 3)).astype(np.float32)
        arrays["b"] = random.normal(size=8).astype(np.float32)
        inputs = {"x": random.normal(size=(2, 8, 9, 9)).astype(np.float32)}
    elif op_type in ("Gemm", "MatMul"):
        rows = 16 if attributes.get("transA") else 40
        shape = (24, rows) if attributes.get("transB") else (rows, 24)
        if attributes.pop("stacked", False):
            shape, inputs = (3, *shape), {"x": random.normal(size=(2, 3, 16, 40)).astype(np.float32)}
        arrays["w"] = random.normal(size=shape).astype(np.float32)
        if op_type == "Gemm":
            arrays["b"] = random.normal(size=24).astype(np.float32)
    else:
        rows = 16 * GATES[op_type]
        arrays["w"] = random.normal(0, 0.3, (1, rows, 12)).astype(np.float32)
        arrays["r"] = random.normal(0, 0.2, (1, rows, 16)).astype(np.float32)
        arrays["b"] = random.normal(0, 0.1, (1, 2 * rows)).astype(np.float32)
        inputs = {"x": random.normal(size=(5, 3, 12)).astype(np.float32)}
    names = ["w", "x"] if op_type == "Gather" else ["x", *arrays]
    node = helper.make_node(op_type, names, outputs_of, "node", **attributes)
    kind = TensorProto.INT64 if op_type == "Gather" else TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind, inputs["x"].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9), inputs


def defaults(op_type: str) -> dict[str, Any]:
    """The attributes of an op type that have a default, at it."""
    schema = onnx.defs.get_schema(op_type, OPSET)
    given = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    return {name: helper.get_attribute_value(value) for name, value in given.items()}


def check(preset: str, op_type: str, attributes: dict[str, Any]) -> None:
    source, sample = model(op_type, {**BASE[op_type], **attributes})
    expected = outputs(source, sample)[0]
    try:
        done = ModelQuantizer(config(preset)).quantize_model(source, None, [sample])
    except NothingToQuantizeError:
        assert op_type not in DYNAMIC_KERNELS or preset not in DYNAMIC
        return
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    found = outputs(done, sample, optimise=True)[0]
    assert found.shape == expected.shape
    assert sqnr(expected, found) > LEAST.get(preset, 12), f"{op_type} with {attributes}"


def test_every_operator_that_is_rewritten_is_here() -> None:
    stored = {name for name, rule in {**RULES, **RECURRENT}.items() if rule.stored}
    assert set(BASE) == set(OTHERS) == {*DYNAMIC_KERNELS, *stored}
    for op_type, others in OTHERS.items():
        told = {name for other in others for name in other} | NOT_IN_RUNTIME
        assert {*defaults(op_type)} <= told, op_type


@pytest.mark.parametrize("preset", QUICK)
def test_attributes_may_be_written_out_at_their_defaults(preset: str) -> None:
    for op_type in BASE:
        check(preset, op_type, defaults(op_type))


@pytest.mark.parametrize("preset", QUICK)
def test_attributes_keep_their_meaning(preset: str) -> None:
    for op_type, others in OTHERS.items():
        for attributes in others:
            check(preset, op_type, attributes)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in NOW if name not in QUICK])
def test_attributes_keep_their_meaning_in_every_configuration(preset: str) -> None:
    for op_type, others in OTHERS.items():
        for attributes in [defaults(op_type), *others]:
            check(preset, op_type, attributes)


def test_an_attribute_that_the_other_operator_lacks_is_refused() -> None:
    (node,) = ir.from_proto(model("LSTM", {"hidden_size": 16, "layout": 1})[0]).graph
    with pytest.raises(StructureError, match="node has layout=1, which DynamicQuantizeLSTM does not know"):
        carried_over(node, "DynamicQuantizeLSTM", "com.microsoft")
