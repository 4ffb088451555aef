"""What a report reads off two ONNX files, against ONNX Runtime, numpy and the formula of the range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from quark.core.metrics import ChannelFit, sqnr
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.evaluation.layer_weights import LayerWeights, _fitted_both_ways, value_ranges
from quark.onnx.evaluation.ort_fusion import KINDS, inspect_fusion, kernel_graph
from tests.models.onnx_zoo import cnn, images


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    before, after = root / "float.onnx", root / "a8w8.onnx"
    onnx.save(cnn(), before)
    ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(before, after, images())
    return before, after


@pytest.mark.slow
def test_weights_are_those_that_the_runtime_decodes(files: tuple[Path, Path]) -> None:
    before, after = files
    weights = LayerWeights(before, after)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(before).graph.initializer}
    codes = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(after).graph.initializer}
    makers = {name: node for node in onnx.load(after).graph.node for name in node.output}
    normalized = {node.output[0] for node in onnx.load(before).graph.node if node.op_type == "BatchNormalization"}
    relus = {node.input[0]: node.output[0] for node in onnx.load(before).graph.node if node.op_type == "Relu"}
    normalized |= {relus[name] for name in normalized if name in relus}
    for tensor, (name, read) in weights.names.items():
        pair = weights.pair(tensor)
        assert pair is not None
        node = makers[read]
        code, scale, zero = (codes[each].astype(np.float32) for each in node.input)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        shape = [-1 if scale.size > 1 and i == axis else 1 for i in range(code.ndim)]
        np.testing.assert_array_equal(pair[0], stored[name])
        np.testing.assert_array_equal(pair[1], (code - zero.reshape(shape)) * scale.reshape(shape))
        found = weights.sqnr(tensor)
        if tensor in normalized:  # its factors went into the weight, so that the plain difference says nothing
            assert found >= ChannelFit(0).update(*pair).sqnr
            assert found > sqnr(*pair) + 6
        else:
            assert found == sqnr(*pair) or found > sqnr(*pair) + 6  # or equalized
    assert normalized & weights.names.keys()
    assert weights.pair("nothing") is None and weights.sqnr("nothing") is None


def test_factors_along_both_axes_are_no_damage() -> None:
    rng = np.random.default_rng(0)
    weight, noise = rng.normal(size=(2, 16, 24, 3, 3))
    rows, columns = np.exp(rng.normal(size=(16, 1, 1, 1))), np.exp(rng.normal(size=(1, 24, 1, 1)))
    assert _fitted_both_ways(weight, weight * rows * columns) > 100
    noisy = _fitted_both_ways(weight, (weight + 0.1 * noise) * rows * columns)
    assert noisy == pytest.approx(sqnr(weight, weight + 0.1 * noise), abs=0.6)
    assert noisy > ChannelFit(0).update(weight, weight * rows * columns).sqnr + 10
    assert _fitted_both_ways(weight[0, 0, 0], weight[0, 0, 0]) == -np.inf


@pytest.mark.slow
def test_ranges_are_what_the_codes_reach_and_histograms_what_flows(files: tuple[Path, Path]) -> None:
    before, after = files
    report = compare_models(before, after, images())
    found = value_ranges(before, after, report.layers, images(), LayerWeights(before, after), most=2)
    outputs = [each for each in found if each.title.endswith("(output)")]
    assert len(outputs) == 2 and len(found) == 4
    model = onnx.load(after)
    codes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    encoders = {node.input[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    plain = onnx.load(before)
    for each in outputs:
        name = each.title.removesuffix(" (output)")
        scale, zero = (codes[read] for read in encoders[name].input[1:])
        limits = np.iinfo(zero.dtype)
        expected = [(limit - float(zero)) * float(scale) for limit in (limits.min, limits.max)]
        assert each.clip == pytest.approx(expected)
        graph = onnx.ModelProto.FromString(plain.SerializeToString())
        graph.graph.output.append(onnx.ValueInfoProto(name=name))
        session = onnxruntime.InferenceSession(graph.SerializeToString())
        values = np.concatenate([session.run([name], feed)[0].ravel() for feed in images()])
        np.testing.assert_array_equal(np.histogram(values, each.edges)[0], each.counts)


@pytest.mark.slow
def test_the_drawn_graph_is_that_of_the_float_model(files: tuple[Path, Path]) -> None:
    before, after = files
    nodes = kernel_graph(after, inspect_fusion(after))
    drawn = {node.label for node in nodes}
    plain = [node for node in onnx.load(before).graph.node if node.op_type != "Constant"]
    assert len(nodes) <= len(plain) and any(KINDS[node.kind] == "integer" for node in nodes)
    assert {label.split()[0] for label in drawn} <= {node.op_type for node in plain}
    assert not [label for label in drawn if "QuantizeLinear" in label]
    # Every node but the first reads one before it, through its Q/DQ.
    assert all(node.reads and max(node.reads) < i for i, node in enumerate(nodes) if i)
    assert {node.kind for node in kernel_graph(before, inspect_fusion(before))} == {KINDS.index("float")}
