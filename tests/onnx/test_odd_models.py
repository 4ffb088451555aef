"""Odd models: under every kind of scheme a right result in stock ONNX Runtime, or a clear error and no file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quark.core.metrics import sqnr
from quark.errors import CalibrationError, ConfigError, FormatError, QuarkError
from quark.onnx import (
    BFloat16Spec,
    CalibMethod,
    Int4Spec,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
)
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from quark.onnx.graph.model_file import load
from tests.commands.program import quark
from tests.models import onnx_odd as odd
from tests.models.onnx_zoo import Builder, Reader, cnn, feed, images, outputs, run

MIN_MAX = UInt8Spec(calibration_method=CalibMethod.MinMax)
CHANNELS = QLayerConfig(input_tensors=MIN_MAX, weight=Int8Spec(quant_granularity=QuantGranularity.Channel))
GROUPS = QLayerConfig(input_tensors=MIN_MAX, weight=Int4Spec(quant_granularity=QuantGranularity.Group))
PAIRS = {"DedicatedQDQPair": True, "AddQDQPairToWeight": True, "SkipPreprocess": True}
SCHEMES: dict[str, tuple[Any, float]] = {
    "A8W8": (Config(get_default_config("A8W8")), 25),
    "channels": (QConfig(CHANNELS), 25),
    "ort_x64": (QConfig(CHANNELS, Target="ort_x64"), 25),
    "pairs": (QConfig(QLayerConfig(input_tensors=MIN_MAX, weight=Int8Spec()), **PAIRS), 25),
    "XINT8": (Config(get_default_config("XINT8")), 15),
    "INT16": (Config(get_default_config("INT16_CNN_DEFAULT")), 60),
    "MXINT8": (Config(get_default_config("MXINT8")), 22),
    "BF16": (Config(get_default_config("BF16")), 38),
    "dynamic": (Config(get_default_config("UINT8_DYNAMIC_QUANT")), 25),
    "int4 weights": (QConfig(GROUPS, WeightsOnly=True, BlockSize=16), 12),
}
"""Scheme -> config, least SQNR in dB."""

NOTHING = "Nothing to quantize"
LEFT = {"ort_x64": {"weights_that_are_inputs", "divisors_of_all_sizes"}}
LEFT["dynamic"] = {"weights_that_are_inputs", "divisors_of_all_sizes"}
LEFT["int4 weights"] = {"weights_that_are_inputs", "divisors_of_all_sizes"}
"""Scheme -> models without a node that it can quantize."""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", odd.RIGHT, ids=lambda make: make.__name__)
def test_a_right_result(make: odd.Make, scheme: str, tmp_path: Path) -> None:
    config, least = SCHEMES[scheme]
    model, target = make(), tmp_path / "out.onnx"
    before = model.SerializeToString()
    feeds = [odd.sample(model), odd.sample(model, seed=2, size=5)]
    if make.__name__ in LEFT.get(scheme, ()):
        with pytest.raises(ConfigError, match=NOTHING):
            ModelQuantizer(config).quantize_model(model, target, Reader(feeds))
        assert not list(tmp_path.iterdir())
        return
    ModelQuantizer(config).quantize_model(model, target, Reader(feeds))
    assert model.SerializeToString() == before
    onnx.checker.check_model(str(target))
    expected = outputs(model, feeds[0], optimise=True)
    for optimise in (False, True):
        for reference, found in zip(expected, outputs(str(target), feeds[0], optimise), strict=True):
            assert found.shape == reference.shape and np.isfinite(found).all()
            assert sqnr(reference, found) > least


def changed(**fields: Any) -> onnx.ModelProto:
    model = odd.linear()
    for name, value in fields.items():
        setattr(model, name, value)
    return model


def of_opset(version: int) -> onnx.ModelProto:
    model = odd.linear()
    model.opset_import[0].version = version
    return model


def with_weight(**fields: Any) -> onnx.ModelProto:
    model = odd.linear()
    model.graph.initializer[0].MergeFrom(onnx.TensorProto(**fields))
    return model


def of_nodes(*steps: tuple[str, list[str], str], made: Any = None, name: str = "") -> onnx.ModelProto:
    b = odd.Odd()
    b.weight("w", 8, 8)
    for op_type, read, output in steps:
        b.raw(op_type, read, [output])
        b.nodes[-1].name = name or b.nodes[-1].name
    graph = onnx.helper.make_graph(b.nodes, "g", odd.infos(odd.ROW), odd.infos(made or {}), b.initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


PRODUCT, Y = ("MatMul", ["x", "w"], "y"), {"y": ["n", 8]}
BAD: dict[str, tuple[Any, type[QuarkError], str]] = {
    "nothing": (None, FormatError, "path or a ModelProto, got NoneType"),
    "no nodes": (of_nodes(made={"x": ["n", 8]}), FormatError, "has no operators"),
    "no outputs": (of_nodes(PRODUCT), FormatError, "has no outputs"),
    "only constants": (of_nodes(("RandomNormalLike", ["w"], "y"), made={"y": [8, 8]}), ConfigError, NOTHING),
    "no rule": (of_nodes(("RandomNormalLike", ["x"], "y"), made=Y), ConfigError, "has RandomNormalLike; asked for"),
    "float64": (odd.all_in_float64(), ConfigError, "not in float32"),
    "a cycle": (of_nodes(("Add", ["h", "x"], "y"), ("Neg", ["y"], "h"), made=Y), FormatError, "cycle"),
    "an input from nowhere": (of_nodes(("Add", ["h", "x"], "y"), made=Y), FormatError, "reads 'h', which nothing"),
    "an op that does not exist": (
        of_nodes(PRODUCT, ("Expp", ["y"], "z"), made={"z": ["n", 8]}),
        QuarkError,
        "Expp",
    ),
    "opset 99": (of_opset(99), FormatError, "opset 99"),
    "IR version 99": (changed(ir_version=99), FormatError, "IR version 99"),
    "bytes that lack": (
        with_weight(raw_data=b"1234"),
        FormatError,
        r"'w' is damaged: it has 4 bytes, .* 256",
    ),
    "dimensions that differ": (
        with_weight(dims=[2]),
        FormatError,
        r"'w' is damaged: it has 256 bytes, .* needs",
    ),
}


@pytest.mark.parametrize("scheme", ["A8W8", "BF16", "weights"])
@pytest.mark.parametrize("name", BAD)
def test_a_clear_error_and_no_file(name: str, scheme: str, tmp_path: Path) -> None:
    model, error, message = BAD[name]
    layer = QLayerConfig(input_tensors=BFloat16Spec() if scheme == "BF16" else Int8Spec(), weight=Int8Spec())
    config = SCHEMES[scheme][0] if scheme in SCHEMES else QConfig(layer, WeightsOnly=True)
    feeds = [{"x": np.ones((3, 8), np.float64 if name == "float64" else np.float32)}]
    for target in (tmp_path / "out.onnx", None):
        with pytest.raises(error, match=message):
            ModelQuantizer(config).quantize_model(model, target, Reader(feeds))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 100])
def test_external_data_that_is_truncated(kept: int, tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").write_bytes((tmp_path / "w.bin").read_bytes()[:kept])
    with pytest.raises(FormatError, match=rf"'stem_w' is truncated.*w.bin, of {kept}"):
        ModelQuantizer(SCHEMES["BF16"][0]).quantize_model(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "w.bin"]


def test_external_data_of_a_body_must_be_inside_the_folder(tmp_path: Path) -> None:
    model = odd.a_loop()
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    outside = onnx.TensorProto(name="k", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../secret.bin")
    loop.attribute[0].g.initializer.append(outside)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=r"'k' in the body .* lies outside the model's folder: '\.\./secret"):
        ModelQuantizer(SCHEMES["BF16"][0]).quantize_model(tmp_path / "m.onnx", tmp_path / "out.onnx")


@pytest.mark.slow
def test_damaged_files_raise_no_other_error(tmp_path: Path) -> None:
    """Files cut off anywhere and with bytes flipped: quantized, or refused as QuarkError."""
    raw, random = cnn().SerializeToString(), np.random.default_rng(0)
    feeds, refused = images(1), 0
    for trial in range(60):
        damaged = bytearray(raw)
        if trial % 2:
            damaged = damaged[: random.integers(1, len(raw))]
        else:
            for place in random.integers(0, len(raw), 20):
                damaged[place] = random.integers(0, 256)
        (tmp_path / "m.onnx").write_bytes(bytes(damaged))
        try:
            ModelQuantizer(SCHEMES["int4 weights"][0]).quantize_model(tmp_path / "m.onnx", tmp_path / "out.onnx", feeds)
        except QuarkError:
            refused += 1
    assert 30 <= refused < 60


def test_samples_may_differ_in_size_and_some_be_empty() -> None:
    feeds = [{"x": images(1)[0]["x"][:size]} for size in (0, 1, 4, 2)]
    quantizer = ModelQuantizer(SCHEMES["A8W8"][0])
    done = quantizer.quantize_model(cnn(), None, Reader(feeds))
    whole = quantizer.quantize_model(cnn(), None, Reader(feeds[2:3]))
    assert done is not None and done == whole
    with pytest.raises(CalibrationError, match="No calibration sample has values"):
        quantizer.quantize_model(cnn(), None, Reader(feeds[:1]))


def test_a_sample_on_which_the_model_fails_is_named() -> None:
    b = odd.Odd()
    hidden = b.node("MatMul", ["x", b.weight("w", 8, 8)], "h")
    b.node("Reshape", [hidden, b.integers("shape", [2, 16])], "y")
    model = b.finish(odd.ROW, {"y": [2, 16]})
    with pytest.raises(CalibrationError, match=r"fails on a sample \(x: float32 \[3, 8\]\).*y_node"):
        ModelQuantizer(SCHEMES["A8W8"][0]).quantize_model(model, None, Reader([odd.sample(model)]))


@pytest.mark.parametrize("name", [name for name in BAD if BAD[name][0] is not None])
def test_the_command_line_says_it_in_one_line(name: str, tmp_path: Path) -> None:
    model, _, message = BAD[name]
    (tmp_path / "m ä.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.ones((3, 8), np.float64 if name == "float64" else np.float32))
    before = sorted(tmp_path.iterdir())
    line = ["quantize", tmp_path / "m ä.onnx", "--config", "A8W8", "--calib", tmp_path / "x.npz"]
    done = quark(*line, "-o", tmp_path / "out.onnx")
    assert done.code == 1 and re.search(message, done.err)
    assert done.err.startswith("quark: ") and done.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("version", [11, 13])
def test_an_output_of_split_may_be_left_out(version: int) -> None:
    b = Builder()
    b.nodes.append(helper.make_node("Split", [b.conv("x", "c", (3, 6, 1), norm=False)], ["one", "", "two"], axis=1))
    b.node("Concat", ["one", "two"], "y", axis=1)
    proto = b.model({"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]}, version)
    (split,) = [node for node in load(proto).graph if node.op_type == "Split"]
    assert all(value.name for value in split.outputs)  # the runtime would end the process
    done = ModelQuantizer(QConfig(CHANNELS)).quantize_model(proto, None, Reader([feed(proto)]))
    assert done is not None and outputs(done, feed(proto))[0].shape == (1, 4, 4, 4)


def a8w8(**options: Any) -> QConfig:
    return QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec()), **options)


def test_nodes_of_one_name_are_quantized_and_only_a_scope_that_names_them_is_refused() -> None:
    model = of_nodes(("MatMul", ["x", "w"], "h"), ("MatMul", ["h", "w"], "y"), made=Y, name="same")
    feeds = [{"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}]
    done = ModelQuantizer(a8w8()).quantize_model(model, None, feeds)
    assert done is not None and len({node.name for node in done.graph.node}) == len(done.graph.node)
    for option in ({"exclude": ["same"]}, {"NodesToQuantize": ["same"]}):
        with pytest.raises(ConfigError, match="several nodes have the name 'same'"):
            ModelQuantizer(a8w8(**option)).quantize_model(model, None, feeds)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["y_nodes"], "exclude: no node has the name 'y_nodes'. Did you mean 'y_node'"),
        ([(["y_node"], ["h_node"])], "nothing lies between y_node and h_node"),
        ([(["g_node"], ["y_node"])], "exclude: no node has the name 'g_node'"),
    ],
)
def test_a_scope_that_means_nothing_names_what_could_be_meant(exclude: list[Any], message: str) -> None:
    model = of_nodes(("MatMul", ["x", "w"], "h"), ("MatMul", ["h", "w"], "y"), made=Y)
    feeds = [{"x": np.ones((4, 8), np.float32)}]
    with pytest.raises(ConfigError, match=message):
        ModelQuantizer(a8w8(exclude=exclude)).quantize(model, None, feeds)


def test_scripts_are_warned_of_names_that_no_node_has(caplog: pytest.LogCaptureFixture) -> None:
    model, feeds = of_nodes(PRODUCT, made=Y), [{"x": np.ones((4, 8), np.float32)}]
    with caplog.at_level("WARNING", logger="quark"):
        done = ModelQuantizer(a8w8(exclude=["y_nodes", "^nowhere.*"])).quantize_model(model, None, feeds)
    warned = [text for record in caplog.records if "Changes nothing" in (text := record.getMessage())]
    assert len(warned) == 2 and "'y_nodes'" in warned[0] and "nowhere" in warned[1]
    assert done is not None and any(node.op_type == "QuantizeLinear" for node in done.graph.node)


def test_a_size_of_minus_one_is_an_open_one(tmp_path: Path) -> None:
    """Exporters write it, and the runtime takes it for unknown."""
    model = of_nodes(PRODUCT, made=Y)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    feeds = [{"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}]
    done = ModelQuantizer(a8w8()).quantize_model(model, None, feeds)
    assert done is not None and not done.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1
    assert np.allclose(outputs(done, feeds[0])[0], outputs(model, feeds[0])[0], atol=0.1)


@pytest.mark.parametrize(("version", "inlined"), [(17, True), (16, False)])
def test_what_functions_hold_is_quantized(version: int, inlined: bool) -> None:
    """But where a function has another opset than the model, in which its nodes may mean something else."""
    model = odd.a_local_function()
    model.functions[0].opset_import[0].version = version
    made = ModelQuantizer(SCHEMES["A8W8"][0]).quantize_model(model, None, Reader([odd.sample(model)]))
    assert made is not None and bool(made.functions) == (not inlined)
    assert sum(node.op_type == "MatMul" for node in made.graph.node) == 2 + inlined
    sources = {name: node.op_type for node in made.graph.node for name in node.output}
    products = [node for node in made.graph.node if node.op_type == "MatMul"]
    assert {sources[name] for node in products for name in node.input} == {"DequantizeLinear"}


@pytest.mark.parametrize("fill", [float("nan"), float("-inf"), -3.4e38])
@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "MXINT8"])
def test_what_missing_rows_are_filled_with_stays_in_float(fill: float, preset: str) -> None:
    """As models of graphs do where an atom is absent: NaN for what no one is to read."""
    b = Builder()
    filled = helper.make_tensor("fill", TensorProto.FLOAT, [1], [fill])
    product = b.node("MatMul", ["x", b.constant("w", b.random.normal(size=(64, 32)))], "product")
    other = b.node("ConstantOfShape", [b.node("Shape", [product], "shape")], "other", value=filled)
    there = b.node("Less", ["x0", b.constant("most", np.array(1e30))], "there")
    b.node("Where", [there, product, other], "y")
    model = b.model({"x": ["n", 64], "x0": ["n", 1]}, {"y": ["n", 32]})
    sample = {"x": b.random.normal(size=(8, 64)).astype(np.float32), "x0": np.zeros((8, 1), np.float32)}
    done = ModelQuantizer(Config(get_default_config(preset))).quantize_model(model, None, Reader([sample]))
    assert done is not None
    assert sqnr(run(model, sample), run(done, sample)) > 25
    assert "other" not in {n.input[0] for n in done.graph.node if n.op_type == "QuantizeLinear"}
