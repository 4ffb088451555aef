"""SimplifyModelOptions: onnxslim runs with the options, and what it makes is checked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.errors import ConfigError, FormatError, MissingDependencyError, StructureError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from tests.models.onnx_zoo import Reader, clutter, cnn, feed, images, outputs


def quantized(model: onnx.ModelProto, data: Any, **options: Any) -> onnx.ModelProto:
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), extra_options=options)
    made = ModelQuantizer(config).quantize_model(model, None, Reader(data))
    assert made is not None
    return made


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets another function stand for `onnxslim.slim`."""

    def replace(function: Any) -> None:
        monkeypatch.setattr("quark.errors._is_installed", lambda package: True)
        monkeypatch.setitem(sys.modules, "onnxslim", SimpleNamespace(slim=function))

    return replace


def test_options_reach_onnxslim_and_its_model_is_quantized(replaced: Any) -> None:
    """A stand-in that renames the nodes: the names in the result show whose model was quantized."""
    seen = []

    def slim(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        seen.append(options)
        for node in model.graph.node:
            node.name = f"slim_{node.name}"
        return model

    replaced(slim)
    options = {"skip_fusion_patterns": ["EliminationSlice"], "model_check": True}
    made = quantized(cnn(), images(1), SimplifyModelOptions=options)
    assert seen == [options] and "slim_y_node" in {node.name for node in made.graph.node}
    for off in ({"SimplifyModel": False}, {"SkipPreprocess": True}):
        quantized(cnn(), images(1), SimplifyModelOptions=options, **off)
    quantized(cnn(), images(1), SimplifyModelOptions={})
    assert len(seen) == 1


def test_a_model_that_computes_something_else_is_refused(replaced: Any) -> None:
    def slim(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "fc_b")
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 1, bias.name))
        return model

    replaced(slim)
    with pytest.raises(StructureError, match="onnxslim does not keep what the model computes"):
        quantized(cnn(), images(1), SimplifyModelOptions={"verbose": False})


def test_what_onnxslim_says_is_one_error(replaced: Any) -> None:
    def slim(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        raise AttributeError("no such thing")

    replaced(slim)
    with pytest.raises(FormatError, match="onnxslim does not simplify the model: no such thing"):
        quantized(cnn(), images(1), SimplifyModelOptions={"verbose": False})


def test_unknown_options_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("model_chek", "outputs", "dump_to_disk"):
        with pytest.raises(ConfigError, match=f"SimplifyModelOptions: '{key}'"):
            quantized(cnn(), images(1), SimplifyModelOptions={key: True})
    monkeypatch.setattr("quark.errors._is_installed", lambda package: package != "onnxslim")
    with pytest.raises(MissingDependencyError, match=r"onnxslim.*openquark\[slim\]"):
        quantized(cnn(), images(1), SimplifyModelOptions={"verbose": False})


@pytest.mark.slow
def test_onnxslim_itself() -> None:
    """It computes what our own pass leaves: fewer nodes, same outputs."""
    pytest.importorskip("onnxslim")
    sample = feed(clutter())
    plain = quantized(clutter(), [sample])
    slim = quantized(clutter(), [sample], SimplifyModelOptions={"model_check": True})
    assert len(slim.graph.node) <= len(plain.graph.node)
    for one, other in zip(outputs(plain, sample), outputs(slim, sample), strict=True):
        assert np.array_equal(one, other)
