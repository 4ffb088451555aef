"""UserCustomOpLibPath: a float model with an operator of its own is calibrated, quantized and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from quark.base.native import library
from quark.errors import ConfigError, QuarkError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx_ops.library import SOURCE
from tests.models.onnx_sessions import exact_options
from tests.models.onnx_zoo import Reader


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the operator OwnRound of the domain own.ops: that of BFP16 under another name."""
    source = tmp_path_factory.mktemp("own") / "own_ops.cpp"
    text = SOURCE.read_text(encoding="utf-8")
    assert '26, "com.amd.quark"' in text and 'named("BFPQuantizeDequantize"' in text
    text = text.replace('26, "com.amd.quark"', '26, "own.ops"')
    source.write_text(text.replace('named("BFPQuantizeDequantize"', 'named("OwnRound"'), encoding="utf-8")
    try:
        return library(source, "a library of the tests", "nothing")
    except QuarkError as error:
        pytest.skip(str(error))


def model() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.standard_normal((8, 8)).astype(np.float32), name) for name in "ab"]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node(
            "OwnRound", ["h"], ["r"], name="own", domain="own.ops", bfp_method="to_bfp", bit_width=16, axis=1
        ),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    infos = [helper.make_tensor_value_info(name, 1, [4, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own.ops", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def feeds() -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((4, 8)).astype(np.float32)} for _ in range(3)]


def quantize(output: Path | None, **options: Any) -> onnx.ModelProto | None:
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), extra_options=options)
    return ModelQuantizer(config).quantize_model(model(), output, Reader(feeds()))


def run(proto: onnx.ModelProto, path: Path) -> Any:
    options = exact_options()
    options.register_custom_ops_library(str(path))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds()[0])[0]


@pytest.mark.slow
@pytest.mark.parametrize("folder", [False, True])
def test_a_model_with_an_operator_of_its_own(own: Path, folder: bool, tmp_path: Path) -> None:
    with pytest.raises(QuarkError, match="OwnRound"):
        quantize(None)
    place = own
    if folder:
        (tmp_path / "libraries").mkdir()
        place = tmp_path / "libraries" / own.name
        place.write_bytes(own.read_bytes())
        (tmp_path / "libraries" / "notes.txt").write_text("no library")
        place = place.parent
    output = tmp_path / "q.onnx"
    # EvalMetrics and FillAllValueInfo open sessions of their own, and so does saving.
    quantize(output, UserCustomOpLibPath=str(place), EvalMetrics=True, FillAllValueInfo=True)
    quantized = onnx.load(output)
    assert [node.op_type for node in quantized.graph.node if node.domain == "own.ops"] == ["OwnRound"]
    expected, found = run(model(), own), run(quantized, own)
    assert 0 < np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent.so"):
        with pytest.raises(ConfigError, match="expected a library of operators, or a folder"):
            quantize(None, UserCustomOpLibPath=str(place))
    wrong = tmp_path / "wrong.so"
    wrong.write_text("no library")
    with pytest.raises(ConfigError, match=r"wrong\.so is no library of operators"):
        quantize(None, UserCustomOpLibPath=str(wrong))
