"""Where precisions meet: one pair or two, and who follows whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.onnx import Int8Spec, Int16Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, run

WIDE = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
NARROW = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())


def quantized(model: onnx.ModelProto, data: Any, own: dict[Any, Any], base: QLayerConfig = WIDE, **options: Any) -> Any:
    config = QConfig(base, specific_layer_config=own, UseQDQContribOps=False, **options)
    made = ModelQuantizer(config).quantize_model(model, None, Reader(data))
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    return made


def steps(model: onnx.ModelProto, node: str, index: int = 0) -> list[str]:
    """The types of the pairs through which a node reads an input, from the writer on."""
    made = {name: n for n in model.graph.node for name in n.output}
    tensors = {i.name: i for i in model.graph.initializer}
    name, found = next(n for n in model.graph.node if n.name == node).input[index], []
    while name in made and made[name].op_type in ("QuantizeLinear", "DequantizeLinear"):
        if made[name].op_type == "DequantizeLinear":
            found.append(str(numpy_helper.to_array(tensors[made[name].input[2]]).dtype))
        name = made[name].input[0]
    return found[::-1]


def pooled() -> onnx.ModelProto:
    """Conv, MaxPool, Transpose, Conv: the tensors between share one scale."""
    b = Builder()
    x = b.node("MaxPool", [b.conv("x", "a", (3, 8, 3), norm=False)], "pool", kernel_shape=[2, 2], strides=[2, 2])
    b.conv(b.node("Transpose", [x], "turned", perm=[0, 1, 3, 2]), "b", (8, 4, 3), norm=False)
    return b.model({"x": ["n", 3, 16, 16]}, {"b_conv": ["n", 4, 8, 8]}, 21)


@pytest.mark.slow
def test_two_pairs_where_precisions_meet() -> None:
    """`stem` is read by a_conv, of its own precision, and by the Add beside it; `a` goes back to the global one."""
    model, own = cnn(21), {NARROW: ["a_conv_node"]}
    one, two = quantized(model, images(), own), quantized(model, images(), own, EnableDualQuantNodePairs=True)
    assert (steps(one, "a_conv_node"), steps(one, "sum_node")) == (["int8"], ["int8"])
    assert (steps(two, "a_conv_node"), steps(two, "sum_node")) == (["int16", "int8"], ["int16"])
    assert (steps(one, "b_conv_node"), steps(two, "b_conv_node")) == (["int8"], ["int8", "int16"])
    assert not [node for node in two.graph.node if node.op_type == "Identity"]
    feed = images(seed=1)[0]
    float_out = run(model, feed)
    assert np.square(run(two, feed) - float_out).sum() < np.square(run(one, feed) - float_out).sum()


def test_both_pairs_have_the_range_of_the_tensor() -> None:
    """Symmetric: scale = largest magnitude / largest code, of the same magnitude."""
    made = quantized(cnn(21), images(), {NARROW: ["a_conv_node"]}, EnableDualQuantNodePairs=True)
    scales = {i.name: numpy_helper.to_array(i) for i in made.graph.initializer if i.name.endswith("_scale")}
    assert scales["stem_dual_scale"] * 127 == np.float32(scales["stem_scale"] * 32767)


def test_bias_has_the_scale_of_the_pair_it_is_behind() -> None:
    made = quantized(cnn(21), images(), {NARROW: ["a_conv_node"]}, EnableDualQuantNodePairs=True)
    tensors = {i.name: numpy_helper.to_array(i) for i in made.graph.initializer}
    by_output = {node.output[0]: node for node in made.graph.node}
    conv = next(node for node in made.graph.node if node.name == "a_conv_node")
    x, weight, bias = (tensors[by_output[name].input[1]] for name in conv.input)
    np.testing.assert_allclose(bias, np.float64(x) * weight, rtol=1e-6)


def test_an_input_of_the_model_has_the_widest_type_first() -> None:
    b = Builder()
    b.conv("x", "a", (3, 4, 3), norm=False)
    b.conv("x", "b", (3, 4, 3), norm=False)
    model = b.model({"x": ["n", 3, 16, 16]}, {"a_conv": ["n", 4, 16, 16], "b_conv": ["n", 4, 16, 16]}, 21)
    for own, base in (({NARROW: ["a_conv_node"]}, WIDE), ({WIDE: ["b_conv_node"]}, NARROW)):
        made = quantized(model, images(), own, base, EnableDualQuantNodePairs=True)
        assert (steps(made, "a_conv_node"), steps(made, "b_conv_node")) == (["int16", "int8"], ["int16"])


@pytest.mark.slow
def test_statistics_files_know_the_tensors_of_the_model_only(tmp_path: Any) -> None:
    file, own = tmp_path / "statistics.npz", {NARROW: ["a_conv_node"]}
    options: dict[str, Any] = {"EnableDualQuantNodePairs": True}
    first = quantized(cnn(21), images(), own, Statistics=str(file), **options)
    again = quantized(cnn(21), (), own, Statistics=str(file), **options)
    assert first == again == quantized(cnn(21), images(), own, **options)
    with np.load(file) as held:
        assert not [name for name in held["names"] if "dual" in name]


def test_what_shares_a_scale_follows_or_does_not() -> None:

    def kinds(layer: str, **changes: Any) -> list[list[str]]:
        plain = ModelQuantizer(QConfig(WIDE, specific_layer_config={NARROW: [layer]})).settings
        settings = replace(plain, qdq=replace(plain.qdq, **changes))
        made = to_proto(quantize(load(pooled()), settings, Reader(images())))
        return [steps(made, name) for name in ("pool_node", "turned_node", "b_conv_node")]

    assert kinds("b_conv_node") == [["int16"], ["int16"], ["int8"]]
    assert kinds("b_conv_node", propagate_specs=True) == [["int8"], ["int8"], ["int8"]]
    assert kinds("b_conv_node", propagate_specs=True, dual_pairs=True) == [["int16"], ["int16"], ["int16", "int8"]]
    assert kinds("a_conv_node") == [["int8"], ["int16"], ["int16"]]
    assert kinds("a_conv_node", dual_pairs=True) == [["int8", "int16"], ["int16"], ["int16"]]
    assert kinds("a_conv_node", propagate_specs=True, dual_pairs=True) == [["int8"], ["int8"], ["int8", "int16"]]


def aligned(moved: bool) -> onnx.ModelProto:
    """A Concat of small values, which a convolution reads too, and of values 500 times as large."""
    b = Builder()
    small = b.node("Relu", [b.conv("x", "a", (3, 8, 3), norm=False)], "small")
    large = b.node("Mul", [b.conv(small, "c", (8, 8, 3), norm=False), b.constant("k", np.full((1, 8, 1, 1), 500.0))],
                   "large")  # fmt: skip
    bounds = [b.integers(name, [value]) for name, value in (("starts", 0), ("ends", 8), ("axes", 1))]
    joined = b.node("Slice", [small, *bounds], "part") if moved else small
    both = b.node("Concat", [joined, large], "both", axis=1)
    b.node("Identity", [b.conv(both, "e", (16, 4, 3), norm=False)], "z")
    b.node("Identity", [b.conv(small, "d", (8, 8, 3), norm=False)], "y")
    return b.model({"x": ["n", 3, 16, 16]}, {"y": ["n", 8, 16, 16], "z": ["n", 4, 16, 16]})


@pytest.mark.parametrize("moved", [False, True])
def test_what_others_read_too_keeps_its_scale_beside_an_aligned_concat(moved: bool) -> None:
    source, (feed, *_) = aligned(moved), images()
    for name in ("A8W8", "XINT8"):
        made = ModelQuantizer(name).quantize_model(source, None, Reader(images()))
        assert made is not None
        onnx.checker.check_model(made, full_check=True)
        assert sqnr(run(source, feed), run(made, feed)) > 25
        codes = {n.output[0]: n for n in made.graph.node if n.op_type == "QuantizeLinear"}
        concat = next(n for n in made.graph.node if n.op_type == "Concat")
        decoders = [next(n for n in made.graph.node if name in n.output) for name in concat.input]
        scales = [codes[decoder.input[0]].input[1] for decoder in decoders]
        values = {i.name: float(numpy_helper.to_array(i)) for i in made.graph.initializer if i.name in scales}
        assert len(set(values.values())) == 1  # what the Concat reads has one scale
