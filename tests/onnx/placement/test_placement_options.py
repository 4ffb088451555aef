"""The options that say where Q/DQ stand and how constants are stored: each is seen in the written file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from quark.core.metrics import sqnr
from quark.core.spec import spec
from quark.errors import ConfigError, NotSupportedError
from quark.onnx.config.config import QConfig, QLayerConfig
from quark.onnx.config.enums import CalibMethod, ExtendedQuantType, QuantGranularity, QuantType
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.tensor_specs import BFloat16Spec, BFP16Spec, Int8Spec, Int16Spec, UInt8Spec, XInt8Spec
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.placement.placement import Placement
from quark.onnx.placement.shared_scales import free_relu_zero
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, run, vectors

MIN_MAX = CalibMethod.MinMax


def written(make: Callable[[], onnx.ModelProto], feeds: list[Any], activation: Any = None, weight: Any = None,
            **options: Any) -> onnx.ModelProto:  # fmt: skip
    layer = QLayerConfig(
        input_tensors=activation or Int8Spec(calibration_method=MIN_MAX),
        weight=weight or Int8Spec(calibration_method=MIN_MAX),
    )
    model = to_proto(quantize(load(make()), lower(QConfig(layer, **options)), Reader(feeds)))
    onnx.checker.check_model(model, full_check=True)
    names = [node.name for node in model.graph.node] + [name for node in model.graph.node for name in node.output]
    assert len(names) == len(set(names))
    assert sqnr(run(make(), feeds[0]), run(model, feeds[0])) > 15
    return model


def node(model: onnx.ModelProto, name: str) -> Any:
    return next(node for node in model.graph.node if node.name == name)


def names(model: onnx.ModelProto) -> set[str]:
    return {node.name for node in model.graph.node}


def arrays(model: onnx.ModelProto) -> dict[str, Any]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def functions() -> onnx.ModelProto:
    """One node of each kind that may be fused with the one after it."""
    b = Builder()
    weight = b.constant("w", b.random.normal(0, 0.3, (4, 4, 1, 1)))
    ones, zeros, slope = (b.constant(name, np.full(4, value)) for name, value in (("o", 1), ("z", 0), ("s", 0.25)))
    slope = b.constant("slope", np.full((4, 1, 1), 0.25))

    def conv(x: str, name: str) -> str:
        return b.node("Conv", [x, weight], name, kernel_shape=[1, 1])

    x = b.node("Relu", [conv("x", "c1")], "relu")
    x = b.node("Clip", [conv(x, "c2"), b.constant("low", np.array(0.0)), b.constant("high", np.array(6.0))], "clip")
    x = b.node("LeakyRelu", [conv(x, "c3")], "leaky", alpha=0.1)
    x = b.node("PRelu", [conv(x, "c4"), slope], "prelu")
    x = b.node("Gelu", [conv(x, "c5")], "gelu")
    x = b.node("Mul", [x, b.constant("k", np.full((1, 4, 1, 1), 1.5))], "mul")
    x = b.node("Add", [b.constant("a", np.full((1, 4, 1, 1), 0.5)), x], "add")
    x = b.node("InstanceNormalization", [x, ones, zeros], "norm")
    x = b.node("LeakyRelu", [x], "after", alpha=0.1)
    b.node("Sigmoid", [b.node("Tanh", [x], "tanh")], "y")
    return b.model({"x": ["n", 4, 4, 4]}, {"y": ["n", 4, 4, 4]}, opset=20)


def squares() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=(8, 4, 4, 4)).astype(np.float32)} for _ in range(2)]


@pytest.mark.parametrize(
    ("options", "tensor", "removes"),
    [
        ({"RemoveQDQConvRelu": False}, "c1", False),
        ({"RemoveQDQConvClip": False}, "c2", False),
        ({"RemoveQDQConvLeakyRelu": False}, "c3", False),
        ({"RemoveQDQConvPRelu": False}, "c4", False),
        ({"RemoveQDQConvGelu": True}, "c5", True),
        ({"RemoveQDQMulAdd": True}, "mul", True),
        ({"RemoveQDQInstanceNorm": True}, "norm", True),
        ({"RemoveQDQBetweenOps": [("Tanh", "Sigmoid")]}, "tanh", True),
    ],
)
def test_what_stands_between_two_nodes(options: dict[str, Any], tensor: str, removes: bool) -> None:
    plain, asked = (names(written(functions, squares(), **chosen)) for chosen in ({}, options))
    pair = {f"{tensor}_QuantizeLinear", f"{tensor}_DequantizeLinear"}
    more, less = (plain, asked) if removes else (asked, plain)
    assert more - less == pair and not less - more


def test_pairs_that_cannot_be_removed_are_refused() -> None:
    for wrong in ([("Conv",)], ["Conv,Relu"], [("Conv", "LSTM")]):
        with pytest.raises(ConfigError, match="RemoveQDQBetweenOps"):
            written(functions, squares(), RemoveQDQBetweenOps=wrong)


def test_outputs_that_are_not_quantized() -> None:
    plain = names(written(mlp, vectors()))
    by_type = names(written(mlp, vectors(), OpTypesToExcludeOutputQuantization=["MatMul"]))
    # `hidden` is an input of the quantized Add, which still asks for it.
    assert plain - by_type == {"y_QuantizeLinear", "y_DequantizeLinear"}
    by_name = names(written(mlp, vectors(), NodesToExcludeOutputQuantization=["y_node"]))
    assert by_name == by_type
    with pytest.raises(ConfigError, match="NodesToExcludeOutputQuantization.*y_nod"):
        written(mlp, vectors(), NodesToExcludeOutputQuantization=["y_nod"])


def two_readers() -> onnx.ModelProto:
    """`x` is read by two nodes, `t` by one node and the graph output."""
    b = Builder()
    b.node("Relu", ["x"], "t")
    b.node("Add", [b.node("Sigmoid", ["x"], "s"), "t"], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 32], "t": ["n", 32]})


def test_a_pair_for_each_reader() -> None:
    model = written(two_readers, vectors(), DedicatedQDQPair=True)
    for suffix, reader in (("_1", "t_node"), ("_2", "s_node")):
        decoder = node(model, f"x_DequantizeLinear{suffix}")
        assert decoder.output[0] == f"x_DequantizeLinear_Output{suffix}" == node(model, reader).input[0]
        assert decoder.input[0] == node(model, f"x_QuantizeLinear{suffix}").output[0]
        assert decoder.input[1] == "x_scale"
    assert node(model, "t_DequantizeLinear").output[0] == "t"
    assert node(model, "y_node").input[1] == "t_DequantizeLinear_Output_1"
    assert {"s_QuantizeLinear", "y_QuantizeLinear"} <= names(model)
    plain = written(two_readers, vectors())
    assert np.array_equal(run(plain, vectors()[0], optimise=False), run(model, vectors()[0], optimise=False))


def test_a_dequantize_for_each_reader() -> None:
    model = written(two_readers, vectors(), DedicateDQNode=True)
    assert {"x_QuantizeLinear", "x_DequantizeLinear_1", "x_DequantizeLinear_2"} <= names(model)
    assert node(model, "x_DequantizeLinear_1").input[0] == node(model, "x_DequantizeLinear_2").input[0]
    counts = Counter(node.op_type for node in model.graph.node)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"]) == (4, 6)
    cast = written(two_readers, vectors(), BFloat16Spec(), BFloat16Spec(), DedicateDQNode=True, BF16QDQToCast=True)
    assert {"x_QuantizeLinear", "x_DequantizeLinear_1", "x_DequantizeLinear_2"} <= names(cast)


@pytest.mark.slow
def test_weights_in_float_behind_a_pair() -> None:
    model = written(cnn, images(), AddQDQPairToWeight=True)
    plain = written(cnn, images())
    assert arrays(model)["fc_w"].dtype == np.float32 and "fc_w_quantized" not in arrays(model)
    assert node(model, "fc_w_QuantizeLinear").input[0] == "fc_w"
    assert node(model, "y_node").input[1] == "fc_w_DequantizeLinear_Output"
    (feed,) = images(1)
    assert np.array_equal(run(plain, feed, optimise=False), run(model, feed, optimise=False))


def test_channel_axes_are_those_of_integer_kernels() -> None:
    channel = Int8Spec(calibration_method=MIN_MAX, quant_granularity=QuantGranularity.Channel)
    plain = written(mlp, vectors(), weight=channel)
    assert arrays(plain)["w1_scale"].shape == (64,)
    for axis in (1, -1):
        assert written(mlp, vectors(), weight=channel, QDQOpTypePerChannelSupportToAxis={"MatMul": axis}) == plain
    for axis in (0, 5):
        with pytest.raises(NotSupportedError, match=rf"axis {axis} of the weight \[32, 64\] of hidden_node"):
            written(mlp, vectors(), weight=channel, QDQOpTypePerChannelSupportToAxis={"MatMul": axis})
    with pytest.raises(ConfigError, match="'Relu'"):
        written(mlp, vectors(), QDQOpTypePerChannelSupportToAxis={"Relu": 1})


def test_a_bias_of_its_own_type_in_some_layers() -> None:
    """Its scale is that of its own range; other biases stay int32, and an op without a bias has no use for the spec."""
    own = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec(), bias=Int16Spec())
    for where in ({"specific_layer_config": {own: ["y_node"]}}, {"layer_type_config": {own: ["Gemm", "Relu"]}}):
        stored = arrays(written(cnn, images(), **where))
        bias = arrays(cnn())["fc_b"]
        assert stored["fc_b_quantized"].dtype == np.int16
        assert stored["fc_b_scale"] == pytest.approx(np.abs(bias).max() / 32767)
        # x (1 / scale), as here, and x / scale may lie on two sides of a tie.
        assert np.abs(stored["fc_b_quantized"] * stored["fc_b_scale"] - bias).max() <= stored["fc_b_scale"] * 0.501
        assert any(value.dtype == np.int32 for value in stored.values())


def test_int16_biases() -> None:
    wide, model = written(cnn, images()), written(cnn, images(), Int16Bias=True)
    codes, exact = arrays(model)["y_node_fc_b_quantized"], arrays(wide)["y_node_fc_b_quantized"]
    assert codes.dtype == np.int16 and exact.dtype == np.int32
    bias, scale = arrays(cnn())["fc_b"], arrays(model)["y_node_fc_b_quantized_scale"]
    product = arrays(wide)["y_node_fc_b_quantized_scale"]
    assert scale == pytest.approx(max(product, np.abs(bias).max() / 32767))
    assert np.abs(codes * scale - bias).max() <= scale / 2 * 1.001
    assert node(model, "fc_b_DequantizeLinear").domain == "com.microsoft"


@pytest.mark.parametrize("granularity", [QuantGranularity.Tensor, QuantGranularity.Channel])
def test_weight_scales_under_which_an_int32_bias_fits(granularity: QuantGranularity) -> None:
    def tiny() -> onnx.ModelProto:
        b = Builder()
        weight = b.random.normal(0, 1e-9, (4, 4, 1, 1))
        b.node("Conv", ["x", b.constant("w", weight), b.constant("b", np.array([1.0, -2.0, 3.0, 50.0]))], "y")
        return b.model({"x": ["n", 4, 4, 4]}, {"y": ["n", 4, 4, 4]})

    weight = Int8Spec(calibration_method=MIN_MAX, quant_granularity=granularity)

    def largest_error(model: onnx.ModelProto) -> float:
        codes, scale = arrays(model)["y_node_b_quantized"], arrays(model)["y_node_b_quantized_scale"]
        return float(np.abs(codes.astype(np.float64) * scale - [1, -2, 3, 50]).max())

    layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=MIN_MAX), weight=weight)
    fitted = written(tiny, squares(), weight=weight)
    assert largest_error(fitted) < 1e-6
    plain = to_proto(
        quantize(
            load(tiny()),
            lower(QConfig(layer, AdjustWeightScaleForInt32Bias=False)),
            Reader(squares()),
        )
    )
    assert largest_error(plain) > 1
    coarse = written(tiny, squares(), XInt8Spec(), XInt8Spec(), EnableNPUCnn=False, Int32Bias=True)
    assert largest_error(coarse) < 1e-6 and np.frexp(arrays(coarse)["w_scale"])[0] == 0.5


@pytest.mark.slow
def test_a_zero_point_for_the_outputs_of_relu() -> None:
    plain, model = written(cnn, images()), written(cnn, images(), UseUnsignedReLU=True)
    assert arrays(plain)["stem_zero_point"] == 0 and arrays(model)["stem_zero_point"] == -128
    assert arrays(model)["stem_scale"] == pytest.approx(arrays(plain)["stem_scale"] * 127 / 255)
    assert arrays(model)["point_zero_point"] == -128  # Clip(0, 6)
    assert arrays(model)["x_zero_point"] == 0
    (feed,) = images(1)
    better = sqnr(run(cnn(), feed), run(model, feed)) - sqnr(run(cnn(), feed), run(plain, feed))
    assert better > 0.3
    middle = written(cnn, images(), UInt8Spec(symmetric=True, calibration_method=MIN_MAX), UseUnsignedReLU=True)
    assert arrays(middle)["stem_zero_point"] == 0 and arrays(middle)["x_zero_point"] == 128


@pytest.mark.parametrize(
    ("dtype", "freed"),
    [
        ("int8", {"relu", "from_zero", "by_attribute"}),
        ("int16", {"relu", "from_zero", "by_attribute"}),
        ("fp8_e4m3", ()),
    ],
)
def test_only_what_is_never_negative_gets_a_zero_point_and_only_in_integers(dtype: str, freed: set[str]) -> None:
    b = Builder()
    zero, below, above = (b.constant(name, np.array(value)) for name, value in (("z", 0.0), ("l", -1.0), ("h", 6.0)))
    b.node("Relu", ["x"], "relu")
    b.node("Clip", ["relu", zero, above], "from_zero")
    b.node("Clip", ["from_zero", below, above], "from_below")
    b.node("Clip", ["from_below", "", zero], "to_zero")
    b.node("LeakyRelu", ["to_zero"], "leaky")
    graph = load(b.model({"x": ["n"]}, {"leaky": ["n"]})).graph
    old = ir.node("Clip", graph.inputs, {"min": 0.0, "max": 6.0}, name="by_attribute")
    old.outputs[0].name = "by_attribute"
    symmetric, nodes = spec(dtype), [*graph, old]
    placement = Placement({node.outputs[0]: symmetric for node in nodes}, nodes=nodes)
    free_relu_zero(placement)
    assert {value.name for value, one in placement.activations.items() if not one.symmetric} == {*freed}
    assert all(one.dtype == symmetric.dtype for one in placement.activations.values())


# Single tensors ------------------------------------------------------------------------------------------------------


def overridden(tensor: str, **entry: Any) -> onnx.ModelProto:
    return written(cnn, images(), TensorQuantOverrides={tensor: [entry]})


@pytest.mark.slow
def test_types_of_single_tensors() -> None:
    kinds = {name: array.dtype for name, array in arrays(overridden("last", quant_type=QuantType.QInt16)).items()}
    # `mean`, `flat` and `pooled` have scales of their own.
    assert kinds["last_zero_point"] == np.int16
    assert {name for name, kind in kinds.items() if kind == np.int16} == {"last_zero_point"}
    weight = arrays(overridden("fc_w", quant_type=ExtendedQuantType.QInt16))
    assert weight["fc_w_quantized"].dtype == np.int16
    assert weight["fc_w_scale"] == pytest.approx(np.abs(arrays(cnn())["fc_w"]).max() / 32767)
    mixed = written(cnn, images(), MixedPrecisionTensor={ExtendedQuantType.QInt16: ["last", "fc_w"]})
    assert arrays(mixed)["fc_w_quantized"].dtype == arrays(mixed)["last_zero_point"].dtype == np.int16


def test_tensors_that_share_a_scale_follow_an_override() -> None:
    model = arrays(overridden("mean", quant_type=QuantType.QInt16, symmetric=False))
    assert model["mean_zero_point"].dtype == model["flat_zero_point"].dtype == np.int16
    assert model["mean_zero_point"] == model["flat_zero_point"] == -32768
    with pytest.raises(ConfigError, match="'flat'.*share its scale"):
        entries = {"mean": [{"quant_type": QuantType.QInt16}], "flat": [{"quant_type": QuantType.QUInt16}]}
        written(cnn, images(), TensorQuantOverrides=entries)


@pytest.mark.slow
def test_scales_and_ranges_of_single_tensors() -> None:
    given = arrays(overridden("last", scale=0.5, zero_point=3))
    assert (given["last_scale"], given["last_zero_point"]) == (0.5, 3)
    ranged = arrays(overridden("last", rmin=-2.0, rmax=25.4))
    assert ranged["last_scale"] == pytest.approx(0.2) and ranged["last_zero_point"] == 0
    weight = arrays(overridden("fc_w", rmin=-1.27, rmax=1.0))
    assert weight["fc_w_scale"] == pytest.approx(0.01)
    channel = arrays(overridden("fc_w", axis=1))
    np.testing.assert_allclose(channel["fc_w_scale"], np.abs(arrays(cnn())["fc_w"]).max(0) / 127, rtol=1e-6)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"lost": [{"symmetric": True}]}, ConfigError, "no quantized tensor is named 'lost'.*last"),
        ({"last": [{"scale": 1.0}]}, ConfigError, "scale and zero_point go together"),
        ({"last": [{"symetric": True}]}, ConfigError, "'symetric'.*symmetric"),
        ({"last": {"symmetric": True}}, ConfigError, "list of one dict"),
        ({"last": [{"quant_type": "QInt8"}]}, ConfigError, "expected a QuantType"),
        ({"last": [{"quant_type": ExtendedQuantType.QBFP}]}, NotSupportedError, "QBFP"),
        ({"last": [{"reduce_range": True}]}, NotSupportedError, "reduce_range"),
        ({"last": [{"axis": 1}]}, ConfigError, "only a weight"),
        ({"fc_w": [{"axis": 0}]}, ConfigError, "channels of this weight"),
    ],
)
def test_overrides_that_say_nothing_sensible(entries: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        written(cnn, images(), TensorQuantOverrides=entries)


@pytest.mark.parametrize(("outside", "shared"), [(9.0, False), (0.0, True)])
def test_a_value_from_outside_of_a_crop_has_room_in_the_scale(outside: float, shared: bool) -> None:
    def crop() -> onnx.ModelProto:
        b = Builder()
        roi = b.constant("roi", np.array([0, 0, 0.1, 0.1, 1, 1, 1.4, 0.8]))
        inputs = [b.conv("x", "c", (3, 4, 1), norm=False), roi, b.constant("s", np.array([1, 1, 1.5, 2]))]
        b.node("Resize", inputs, "y", mode="linear", coordinate_transformation_mode="tf_crop_and_resize",
               extrapolation_value=outside)  # fmt: skip
        return b.model({"x": [1, 3, 16, 16]}, {"y": [None] * 4})

    feeds = [{"x": 0.2 * feed["x"][:1]} for feed in images()]
    model = written(crop, feeds)
    values, (resize,) = arrays(model), [n for n in model.graph.node if n.op_type == "Resize"]
    before, after = (
        next(values[n.input[1]] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.output[0] == name)
        for name in (resize.input[0], "y")
    )
    assert (before == after) == shared
    assert sqnr(run(crop(), feeds[0]), run(model, feeds[0])) > 25


def test_nothing_of_a_block_format_stands_between_what_is_fused() -> None:
    for fused in (False, True):
        model = written(cnn, images(), BFP16Spec(), BFP16Spec(), RemoveFusedQDQ=fused)
        producers = {name: node.op_type for node in model.graph.node for name in node.output}
        relus = [node for node in model.graph.node if node.op_type == "Relu"]
        assert relus and "BFPQuantizeDequantize" not in {producers[node.input[0]] for node in relus}
