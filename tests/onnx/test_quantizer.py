"""The ONNX flow from Settings to a file that stock ONNX Runtime runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.compat.onnx_tools import TOOLS
from quark.core.granularity import PerChannel
from quark.core.metrics import sqnr
from quark.core.spec import LayerSpec, spec
from quark.errors import (
    CalibrationError,
    ConfigError,
    FormatError,
    NonFiniteError,
    NotSupportedError,
    OutputExistsError,
    QuarkError,
)
from quark.onnx import Int8Spec, Int16Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec, quantize_static
from quark.onnx.config.settings import QDQSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.passes import PASSES
from quark.onnx.search.settle import quantize
from quark.onnx_ops.saving import save
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, run, vectors

U8 = spec("uint8", symmetric=False)
S8 = spec("int8")
CHANNEL = spec("int8", PerChannel(0))
POF2 = spec("int8", observer="pof2_min_mse")
A8W8 = Settings(SpecSettings(LayerSpec(weight=S8, input=S8)), qdq=QDQSettings(align=("Concat",), contrib_domain=True))
U8S8 = Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=U8)), qdq=QDQSettings(fold_relu=True))
SETTINGS = {
    "a8w8": (A8W8, 28),
    "u8s8": (U8S8, 30),
    "a16w8": (Settings(SpecSettings(LayerSpec(weight=S8, input=spec("int16")))), 30),
    "a16w16": (Settings(SpecSettings(LayerSpec(weight=spec("int16"), input=spec("uint16", symmetric=False)))), 70),
    "percentile": (Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=replace(U8, observer="percentile")))), 30),
    "mse": (Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=replace(U8, observer="mse")))), 30),
    "entropy": (Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=replace(U8, observer="entropy")))), 30),
    "pof2": (Settings(SpecSettings(LayerSpec(weight=POF2, input=POF2))), 24),
    "bf16": (
        Settings(
            SpecSettings(LayerSpec(weight=spec("bfloat16"), input=spec("bfloat16"))),
            qdq=QDQSettings(cast_bfloat16=True),
        ),
        40,
    ),
    "fp16": (Settings(SpecSettings(LayerSpec(weight=spec("float16"), input=spec("float16")))), 55),
    "weights": (Settings(SpecSettings(LayerSpec(weight=CHANNEL), weights_only=True)), 36),
}
MODELS = {"cnn": (cnn, images), "mlp": (mlp, vectors)}


def quantized(settings: Settings, make: Any = cnn, feeds: Any = images) -> onnx.ModelProto:
    return to_proto(quantize(load(make()), settings, Reader(feeds())))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_stay_near_the_float_model(name: str, model: str, tmp_path: Path) -> None:
    make, feeds = MODELS[model]
    settings, least = SETTINGS[name]
    path = tmp_path / "out.onnx"
    save(quantize(load(make()), settings, Reader(feeds())), path)
    # A sample that calibration saw: what is measured is the grid, not the luck of the ranges.
    feed = feeds()[0]
    assert sqnr(run(make(), feed), run(str(path), feed)) > least


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["u8s8", "s8s8"])
def test_not_worse_than_onnxruntimes_own_quantizer(kind: str, model: str, tmp_path: Path) -> None:
    """Same types, same data, MinMax: our output SQNR is at least theirs."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class TheirReader(Reader, CalibrationDataReader):
        pass

    make, feeds = MODELS[model]
    source, theirs = tmp_path / "float.onnx", tmp_path / "theirs.onnx"
    folded = to_proto(_folded(make()))
    onnx.save(folded, source)
    unsigned = kind == "u8s8"
    quantize_static(
        source,
        theirs,
        TheirReader(feeds()),
        quant_format=QuantFormat.QDQ,
        per_channel=unsigned,
        activation_type=QuantType.QUInt8 if unsigned else QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": not unsigned},
    )
    ours = quantized(
        Settings(SpecSettings(LayerSpec(weight=CHANNEL if unsigned else S8, input=U8 if unsigned else S8))), make, feeds
    )
    # All samples: of a single one, a product that falls on the other side of a tie is half a dB.
    reference, our_outputs, their_outputs = (
        np.concatenate([run(each, feed) for feed in feeds()]) for each in (make(), ours, str(theirs))
    )
    assert sqnr(reference, our_outputs) >= sqnr(reference, their_outputs) - 0.2


def _folded(model: onnx.ModelProto) -> Any:
    loaded = load(model)
    PASSES["fold_batch_norm"](loaded)
    return loaded


@pytest.mark.slow
def test_the_runtime_computes_what_the_core_says() -> None:
    """One MatMul: ONNX Runtime's result equals the product of core's fake-quantized operands."""
    from quark.core.quantize import compute_qparams, fake_quantize
    from quark.onnx.calibration.qparams import onnx_range

    feeds = vectors(1)
    x = feeds[0]["x"]
    settings = Settings(SpecSettings(LayerSpec(weight=S8, input=S8), nodes=("hidden_node",)))
    model = quantized(settings, mlp, lambda: feeds)
    weight = next(numpy_helper.to_array(i) for i in mlp().graph.initializer if i.name == "w1")
    s8 = onnx_range(S8)
    assert s8 is not None
    product = fake_quantize(x, compute_qparams(x, s8), s8) @ fake_quantize(weight, compute_qparams(weight, s8), s8)
    expected = fake_quantize(product, compute_qparams(x @ weight, s8), s8)
    model.graph.output.append(onnx.ValueInfoProto(name="hidden_DequantizeLinear_Output"))
    import onnxruntime

    found = onnxruntime.InferenceSession(model.SerializeToString()).run(["hidden_DequantizeLinear_Output"], feeds[0])[0]
    step = float(compute_qparams(x @ weight, s8).scale)
    # A product may fall on either side of a tie: at most one code apart, and nearly all equal.
    assert np.abs(found - expected).max() <= step * 1.001
    assert np.mean(np.abs(found - expected) < step / 2) > 0.98


def test_names_domains_and_opsets_are_the_documented_ones() -> None:
    model = quantized(A8W8)
    names = {node.name: node for node in model.graph.node}
    assert names["x_QuantizeLinear"].domain == "com.microsoft"
    assert names["x_DequantizeLinear"].output[0] == "x_DequantizeLinear_Output"
    initializers = {i.name for i in model.graph.initializer}
    assert {"x_scale", "x_zero_point", "stem_w_quantized"} <= initializers
    assert "stem_w" not in initializers
    assert names["y_QuantizeLinear"].input[0] == "y_QuantizeLinear_Input" and model.graph.output[0].name == "y"
    assert {o.domain for o in model.opset_import} == {"", "com.microsoft"} and model.producer_name == "quark.onnx"
    assert {o.domain for o in quantized(U8S8).opset_import} == {""}


def test_batch_norm_is_folded_exactly() -> None:
    model = load(cnn())
    assert PASSES["fold_batch_norm"](model) == 6
    assert PASSES["fold_batch_norm"](model) == 0
    assert all(node.op_type != "BatchNormalization" for node in model.graph)
    (feed,) = images(1)
    np.testing.assert_allclose(run(to_proto(model), feed), run(cnn(), feed), rtol=1e-4, atol=1e-4)


def test_a_relu_that_the_range_has_already_is_dropped_and_changes_nothing() -> None:
    (feed,) = images(1)
    kept, folded = quantized(replace(U8S8, qdq=replace(U8S8.qdq, fold_relu=False))), quantized(U8S8)
    assert sum(n.op_type == "Relu" for n in kept.graph.node) == 5
    assert sum(n.op_type == "Relu" for n in folded.graph.node) == 0
    assert np.array_equal(run(kept, feed, optimise=False), run(folded, feed, optimise=False))


def test_aligned_and_moved_tensors_share_one_scale() -> None:
    scales = {i.name: float(numpy_helper.to_array(i)) for i in quantized(A8W8).graph.initializer
              if i.name.endswith("_scale") and numpy_helper.to_array(i).ndim == 0}  # fmt: skip
    # A convolution reads `depth` too, under a scale of its own, which is that of the Concat where it is the widest.
    assert scales["point_scale"] == scales["depth_scale"] == scales["both_scale"] == scales["pooled_scale"]
    assert "depth_dual_scale" not in scales
    assert scales["mean_scale"] == scales["flat_scale"] != scales["last_scale"]


@pytest.mark.slow
def test_excluding_names_patterns_types_and_subgraphs() -> None:
    def decoded(settings: Settings) -> set[str]:
        return {n.name for n in quantized(settings).graph.node if n.op_type == "DequantizeLinear"}

    assert "fc_w_DequantizeLinear" in decoded(U8S8)
    assert "fc_w_DequantizeLinear" not in decoded(replace(U8S8, specs=replace(U8S8.specs, exclude=("y_node",))))
    without = decoded(replace(U8S8, specs=replace(U8S8.specs, exclude=("^(a|b)_conv.*",))))
    assert {"a_w_DequantizeLinear", "b_w_DequantizeLinear"}.isdisjoint(without)
    inside = decoded(replace(U8S8, specs=replace(U8S8.specs, exclude=((("depth_conv_node",), ("point_node",)),))))
    assert {"depth_w_DequantizeLinear", "point_w_DequantizeLinear"}.isdisjoint(inside)
    assert "last_w_DequantizeLinear" in inside
    typed = decoded(replace(U8S8, specs=replace(U8S8.specs, by_type=((("Gemm",), None),))))
    assert "fc_w_DequantizeLinear" not in typed
    mixed = quantized(
        replace(U8S8, specs=replace(U8S8.specs, by_name=((("y_node",), LayerSpec(weight=spec("int16"), input=U8)),)))
    )
    kinds = {i.name: i.data_type for i in mixed.graph.initializer}
    assert kinds["fc_w_quantized"] == onnx.TensorProto.INT16
    assert kinds["stem_w_quantized"] == onnx.TensorProto.INT8


def test_the_users_model_is_not_changed() -> None:
    model = cnn()
    before = model.SerializeToString()
    quantize(load(model), A8W8, Reader(images()))
    assert model.SerializeToString() == before


def test_old_opsets_are_raised(tmp_path: Path) -> None:
    model = mlp()
    del model.opset_import[:]
    model.opset_import.append(onnx.helper.make_opsetid("", 11))
    path = tmp_path / "out.onnx"
    save(quantize(load(model), Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=U8))), Reader(vectors())), path)
    assert onnx.load(path).opset_import[0].version == 13


def test_external_data_is_written_and_read(tmp_path: Path) -> None:
    source, target = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(cnn(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    save(quantize(load(source), A8W8, Reader(images())), target, external_data=True)
    assert (tmp_path / "out.onnx.data").exists()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["float.onnx", "out.onnx", "out.onnx.data", "weights.bin"]
    (feed,) = images(1)
    assert sqnr(run(cnn(), feed), run(str(target), feed)) > 25


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([], "yields nothing"),
        ([{"z": np.zeros((4, 3, 16, 16), np.float32)}], r"\['z'\].*x: float32"),
        ([{"x": np.zeros((4, 3, 8, 16), np.float32)}], r"'x' is float32 \[4, 3, 8, 16\].*expects"),
        ([{"x": np.zeros((4, 3, 16, 16), np.float64)}], "'x' is float64"),
        (["text"], "str"),
    ],
)
def test_readers_that_do_not_fit_are_refused(feeds: list[Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        quantize(load(cnn()), A8W8, Reader(feeds))


def test_missing_readers_and_non_finite_values_are_named() -> None:
    with pytest.raises(CalibrationError, match="need a calibration data reader"):
        quantize(load(cnn()), A8W8)
    with pytest.raises(NonFiniteError, match="'x' of the calibration sample 0 holds NaN"):
        quantize(load(cnn()), A8W8, Reader([{"x": np.full((1, 3, 16, 16), np.nan, np.float32)}]))
    broken = cnn()
    weight = next(i for i in broken.graph.initializer if i.name == "fc_w")
    array = numpy_helper.to_array(weight).copy()
    array[0, 0] = np.inf
    weight.CopyFrom(numpy_helper.from_array(array, "fc_w"))
    with pytest.raises(QuarkError, match="fc_w|y: "):
        quantize(load(broken), A8W8, Reader(images()))


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not an onnx file at all")
    with pytest.raises(FormatError, match="not an ONNX model"):
        load(bad)
    bad.write_bytes(cnn().SerializeToString()[:3000])
    with pytest.raises(FormatError):
        load(bad)
    with pytest.raises(FormatError, match="is not a file"):
        load(tmp_path / "absent.onnx")


def test_external_data_must_be_there_and_inside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(cnn(), folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (folder / "w.bin").rename(tmp_path / "w.bin")
    with pytest.raises(FormatError, match=r"missing: 'w\.bin'"):
        load(folder / "m.onnx")
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    for initializer in proto.graph.initializer:
        for entry in initializer.external_data:
            if entry.key == "location":
                entry.value = "../w.bin"
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(FormatError, match="outside the model's folder"):
        load(folder / "m.onnx")


@pytest.mark.slow
def test_quantization_between_nodes() -> None:
    def decoded(**options: Any) -> set[str]:
        config = QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), extra_options=options)
        model = ModelQuantizer(config).quantize_model(cnn(), None, Reader(images()))
        assert model is not None
        names = {n.name for n in model.graph.node if n.op_type == "DequantizeLinear"}
        return {
            layer
            for layer in ("stem", "a", "b", "depth", "point", "last", "fc")
            if f"{layer}_w_DequantizeLinear" in names
        }

    everything = {"stem", "a", "b", "depth", "point", "last", "fc"}
    assert decoded() == everything
    assert decoded(InputNodes=["a_conv_node"]) == everything - {"stem"}
    assert decoded(OutputNodes=["a_conv_node"]) == {"stem", "a"}
    assert decoded(InputNodes=["depth_conv_node"], OutputNodes=["point_node"]) == {"depth", "point"}
    old = quantize_static(cnn(), None, Reader(images()), input_nodes=["y_node"])
    assert old is not None
    assert [n.name for n in old.graph.node if "_w_" in n.name] == ["fc_w_DequantizeLinear"]
    with pytest.raises(ConfigError, match="InputNodes.*y_nod"):
        decoded(InputNodes=["y_nod"])


def test_unmatched_scopes_second_quantization_and_later_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude.*y_nod"):
        quantize(load(cnn()), replace(A8W8, specs=replace(A8W8.specs, exclude=("y_nod",))), Reader(images()))
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(load(quantized(A8W8)), A8W8, Reader(images()))
    with pytest.raises(NotSupportedError, match="fp6_e2m3 is not part of this version"):
        quantize(
            load(cnn()),
            Settings(SpecSettings(LayerSpec(weight=spec("fp6_e2m3"), input=spec("fp6_e2m3")))),
            Reader(images()),
        )
    with pytest.raises(ConfigError, match="LSTM cannot be quantized"):
        quantize(load(cnn()), replace(A8W8, specs=replace(A8W8.specs, op_types=("LSTM",))), Reader(images()))


def test_a_residual_between_float_nodes_stays_in_float_for_onnxruntime() -> None:
    """x feeds a MatMul and an Add of float nodes: only the MatMul reads codes, or their noise would stay in the sum."""
    b = Builder()
    hidden = b.node(
        "MatMul", [b.node("Tanh", ["x"], "squashed"), b.constant("w", b.random.normal(0, 0.2, (32, 32)))], "h"
    )
    b.node("Add", [b.node("Sigmoid", [hidden], "gate"), "squashed"], "y")
    model = b.model({"x": ["n", 32]}, {"y": ["n", 32]})
    settings = Settings(SpecSettings(LayerSpec(weight=CHANNEL, input=U8)), qdq=QDQSettings(target="ort_x64"))
    done = to_proto(quantize(load(model), settings, Reader(vectors())))
    nodes = {n.name: n for n in done.graph.node}
    assert nodes["h_node"].input[0] == "squashed_DequantizeLinear_Output"
    assert nodes["y_node"].input[1] == "squashed"
    generic = to_proto(
        quantize(load(model), replace(settings, qdq=replace(settings.qdq, target="generic")), Reader(vectors()))
    )
    assert {n.name: n for n in generic.graph.node}["y_node"].input[1] == "squashed_DequantizeLinear_Output"


def test_op_types_without_a_rule_are_quantized_on_request() -> None:
    """Sqrt by name, any op type by a plain rule, all of them by one switch."""
    b = Builder()
    root = b.node("Sqrt", [b.node("Abs", ["x"], "positive")], "root")
    weight = b.constant("w", b.random.normal(0, 1, (32, 32)))
    hidden = b.node("MatMul", [b.node("Floor", [b.node("Exp", [root], "grown")], "whole"), weight], "h")
    b.node("Add", [hidden, root], "y")
    model = b.model({"x": ["n", 32]}, {"y": ["n", 32]})

    def quantized_tensors(**changes: Any) -> set[str]:
        settings = replace(U8S8, specs=replace(U8S8.specs, **changes))
        done = to_proto(quantize(load(model), settings, Reader(vectors())))
        assert run(done, vectors()[0]).shape == (256, 32)
        return {n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear"}

    usual = quantized_tensors()
    assert usual == {"whole", "h", "root", "y_QuantizeLinear_Input"}
    assert quantized_tensors(extra_op_types=("Sqrt",)) == usual | {"positive"}
    assert quantized_tensors(all_op_types=True) == usual | {"x", "positive", "grown"}
    assert quantized_tensors(op_types=("Floor", "Abs")) == {"x", "positive", "grown", "whole"}
    with pytest.raises(ConfigError, match="Loop cannot be quantized"):
        quantized_tensors(extra_op_types=("Loop",))
    with pytest.raises(ConfigError, match="'Sqr'.*Did you mean 'Sqrt'"):
        quantized_tensors(extra_op_types=("Sqr",))


def test_inputs_and_outputs_keep_names_that_constants_would_have() -> None:
    b = Builder()
    b.node("Mul", [b.node("Add", ["x", "x_scale"], "sum"), "x"], "sum_zero_point")
    model = b.model({"x": ["n", 4], "x_scale": ["n", 4]}, {"sum_zero_point": ["n", 4]})
    random = np.random.default_rng(0)
    feed = {name: random.normal(size=(64, 4)).astype(np.float32) for name in ("x", "x_scale")}
    done = to_proto(quantize(load(model), U8S8, Reader([feed])))
    onnx.checker.check_model(done, full_check=True)
    assert [i.name for i in done.graph.input] == ["x", "x_scale"] and done.graph.output[0].name == "sum_zero_point"
    assert sqnr(run(model, feed), run(done, feed)) > 30


@pytest.mark.slow
def test_a_layer_of_its_own_type_has_it_at_its_inputs_and_outputs() -> None:
    """By name, and by op type; its neighbours keep theirs, and nothing shares a scale across the border."""
    own = LayerSpec(weight=S8, input=spec("int16"), output=spec("int16"))

    def kinds(**changes: Any) -> dict[str, int]:
        done = quantized(replace(U8S8, specs=replace(U8S8.specs, **changes), qdq=QDQSettings()))
        assert sqnr(run(cnn(), images()[0]), run(done, images()[0])) > 28
        types = {i.name: i.data_type for i in done.graph.initializer}
        return {n.input[0]: types[n.input[2]] for n in done.graph.node if n.op_type == "QuantizeLinear"}

    usual = kinds()
    assert set(usual.values()) == {onnx.TensorProto.UINT8}
    named = kinds(by_name=((("a_conv_node",), own),))
    assert {name for name, kind in named.items() if kind == onnx.TensorProto.INT16} == {"stem", "a"}
    pooled = kinds(by_name=((("pooled_node",), own),))
    assert {name for name, kind in pooled.items() if kind == onnx.TensorProto.INT16} == {"both", "pooled"}
    typed = kinds(by_type=((("Gemm",), own),))
    assert {name for name, kind in typed.items() if kind == onnx.TensorProto.INT16} == {
        "flat",
        "y_QuantizeLinear_Input",
    }


@pytest.mark.slow
def test_own_types_reach_the_flow_from_the_config() -> None:
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    for exceptions in ({"specific_layer_config": {wide: ["^last_.*"]}}, {"layer_type_config": {wide: ["Gemm"]}}):
        done = ModelQuantizer(QConfig(layer, **exceptions)).quantize_model(cnn(), None, Reader(images()))
        assert done is not None
        types = {i.name: i.data_type for i in done.graph.initializer}
        found = [n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear" and types[n.input[2]] == 5]
        assert len(found) == 2
    with pytest.raises(ConfigError, match="'Convv'.*Did you mean 'Conv'"):
        ModelQuantizer(QConfig(layer, layer_type_config={None: ["Convv"]})).quantize_model(
            cnn(), None, Reader(images())
        )


def test_the_float_model_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(cnn(), source)
    before = source.read_bytes()
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())
    with pytest.raises(OutputExistsError, match="model.onnx itself, which is read"):
        ModelQuantizer(QConfig(layer)).quantize_model(
            source, f"{tmp_path}/../{tmp_path.name}/model.onnx", Reader(images())
        )
    assert source.read_bytes() == before


def test_nothing_that_is_read_is_overwritten(tmp_path: Path) -> None:
    """Weights, calibration data, statistics: by the quantizer and by a tool; a link leads nowhere else."""
    source, data = tmp_path / "model.onnx", tmp_path / "x.npz"
    onnx.save(cnn(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(data, x=images()[0]["x"])
    (tmp_path / "link").symlink_to("weights.bin")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for output, statistics in [
        ("weights.bin", None), ("link", None), ("x.npz", None), ("new", "new"), ("new", "model.onnx"), ("new", "x.npz"),
        ("new", "weights.bin"),
    ]:  # fmt: skip
        options = {"Statistics": str(tmp_path / statistics)} if statistics else {}
        with pytest.raises(OutputExistsError, match="which is read"):
            quantize_static(source, tmp_path / output, calibration_data_path=str(data), extra_options=options)
    with pytest.raises(OutputExistsError, match=r"weights.bin itself, which is read"):
        TOOLS["convert_opset_version"].convert(source, tmp_path / "link", target_opset=18)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_silu_stays_in_integers_for_onnxruntime() -> None:
    """Conv, Sigmoid and Mul all have integer kernels: none is left in float between two convolutions."""
    b = Builder()
    first = b.conv("x", "one", (3, 8, 3), norm=False)
    second = b.conv(b.node("Mul", [first, b.node("Sigmoid", [first], "gate")], "silu"), "two", (8, 4, 3), norm=False)
    b.node("Flatten", [second], "y")
    model = b.model({"x": ["n", 3, 16, 16]}, {"y": ["n", 1024]})
    done = to_proto(quantize(load(model), replace(U8S8, qdq=replace(U8S8.qdq, target="ort_x64")), Reader(images())))
    assert {"one_conv", "gate", "silu"} <= {n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear"}
    assert sqnr(run(model, images()[0]), run(done, images()[0])) > 33


def test_a_dynamically_quantized_model_is_quantized_already() -> None:
    from quark.onnx import quantize_dynamic

    done = quantize_dynamic(mlp())
    assert done is not None
    with pytest.raises(ConfigError, match="quantized already: it holds DynamicQuantizeLinear"):
        quantize(load(done), U8S8, Reader(vectors()))
