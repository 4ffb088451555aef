"""The matrices of com.microsoft Attention and the tables of its embeddings, stored as codes; ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quark.core.metrics import sqnr
from quark.onnx import Int4Spec, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity, UInt8Spec
from quark.onnx import quantize_dynamic as dynamic
from tests.models.onnx_zoo import Array, Builder, outputs, stored

HIDDEN, HEADS, ROWS = 32, 4, 40
CODES = ("qkv", "words")
CHANNEL, GROUP = QuantGranularity.Channel, QuantGranularity.Group


def encoder(matrices: dict[str, Array] | None = None) -> onnx.ModelProto:
    """Tokens to embeddings to one attention, as the optimizer of onnxruntime.transformers writes a BERT."""
    b = Builder()
    wide = {"qkv": b.random.normal(0, 0.2, (HIDDEN, 3 * HIDDEN)), "words": b.random.normal(0, 1, (ROWS, HIDDEN))}
    for name, array in wide.items():
        b.constant(name, (matrices or {}).get(name, array))
    for name, shape in {"places": (8, HIDDEN), "gamma": (HIDDEN,), "beta": (HIDDEN,), "bias": (3 * HIDDEN,)}.items():
        b.constant(name, b.random.normal(0, 0.5, shape))
    embedded = ["tokens", "", "words", "places", "", "gamma", "beta"]
    fused: Any = {"domain": "com.microsoft"}
    b.nodes.append(helper.make_node("EmbedLayerNormalization", embedded, ["h", "unused"], name="embed", **fused))
    b.nodes.append(
        helper.make_node("Attention", ["h", "qkv", "bias"], ["y"], name="attention", num_heads=HEADS, **fused)
    )
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT32, [2, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8, HIDDEN])
    graph = helper.make_graph(b.nodes, "g", [tokens], [y], b.initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


FEED = {"tokens": np.random.default_rng(1).integers(0, ROWS, (2, 8)).astype(np.int32)}


def weights_only(model: onnx.ModelProto, weight: Any) -> onnx.ModelProto:
    config = QConfig(QLayerConfig(weight=weight), WeightsOnly=True, BlockSize=16)
    made = ModelQuantizer(config).quantize_model(model)
    assert made is not None
    return made


def as_it_comes(model: onnx.ModelProto, per_channel: bool) -> onnx.ModelProto:
    made = dynamic(model, per_channel=per_channel)
    assert made is not None
    return made


MAKERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "int8": lambda: weights_only(encoder(), Int8Spec()),
    "channel": lambda: weights_only(encoder(), Int8Spec(quant_granularity=CHANNEL)),
    "uint8": lambda: weights_only(encoder(), UInt8Spec(symmetric=False)),
    "group": lambda: weights_only(encoder(), Int4Spec(quant_granularity=GROUP)),
    "dynamic": lambda: as_it_comes(encoder(), False),
    "dynamic_channel": lambda: as_it_comes(encoder(), True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_runtime_reads_what_the_codes_say(name: str) -> None:
    """The runtime decodes the matrices; the float model with them computes the same."""
    made = MAKERS[name]()
    nodes = {node.name: node for node in made.graph.node}
    shown = onnx.ModelProto()
    shown.CopyFrom(made)
    read = (nodes["attention"].input[1], nodes["embed"].input[2])
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in read)
    decoded = dict(zip(CODES, outputs(shown, FEED), strict=True))
    for tensor, array in decoded.items():
        assert tensor not in stored(made)  # the float matrix is gone
        assert 15 < sqnr(stored(encoder())[tensor], array) < 60
    expected, got = outputs(encoder(decoded), FEED)[0], outputs(made, FEED)[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)  # float32 sums of 32 products of a few units


def test_small_tables_stay_in_float() -> None:
    assert "places" in stored(MAKERS["int8"]())


def test_eight_bits_are_decoded_when_the_file_is_loaded() -> None:
    """A DequantizeLinear of the table would decode all its rows in each run: 2.05 times the time of a float MiniLM."""
    assert not {"DequantizeLinear"} & {node.op_type for node in MAKERS["int8"]().graph.node}


def test_static_activations_leave_them_as_they_are() -> None:
    b, model = Builder(), encoder()
    w = b.constant("w", b.random.normal(0, 1, (HIDDEN, 4)))
    b.node("MatMul", ["y", w], "z")
    model.graph.node.extend(b.nodes)
    model.graph.initializer.extend(b.initializers)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 8, 4]))
    config = QConfig(QLayerConfig(UInt8Spec(), weight=Int8Spec()))
    made = ModelQuantizer(config).quantize_model(model, None, [FEED])
    assert made is not None
    assert {"qkv", "words"} <= {*stored(made)}
