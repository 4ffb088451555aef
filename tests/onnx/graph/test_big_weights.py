"""Checks of models whose weights may be larger than memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.errors import FormatError
from quark.onnx.graph import model_file
from quark.onnx.graph.model_file import load
from quark.onnx.graph.sessions import require_loads
from tests.models.onnx_zoo import Builder

OFF = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def saved(folder: Path) -> Path:
    b = Builder()
    b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 1, (800, 800)))], "h")
    b.node("MatMul", ["h", b.constant("v", b.random.normal(0, 1, (800, 800)))], "y")
    file = folder / "model.onnx"
    model = b.model({"x": [1, 800]}, {"y": [1, 800]})
    onnx.save(model, file, save_as_external_data=True, location="model.data", size_threshold=0)
    return file


def test_weights_in_a_file_are_mapped_by_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(*_: Any) -> None:
        raise AssertionError("the runtime copies arrays that it is given")

    monkeypatch.setattr(model_file, "split_weights", copies)
    model = load(saved(tmp_path))
    assert np.asarray(model.graph.initializers["w"].const_value).shape == (800, 800)


def test_the_check_folds_no_weights_of_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    real = onnxruntime.InferenceSession

    def session(source: Any, options: Any, **rest: Any) -> Any:
        levels.append(options.graph_optimization_level)
        return real(source, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    require_loads(saved(tmp_path), "The model")
    assert levels == [OFF]


def test_what_the_runtime_refuses_is_refused_with_weights_in_a_file(tmp_path: Path) -> None:
    file = saved(tmp_path)
    proto = onnx.load(file, load_external_data=False)
    proto.graph.node[0].op_type = "Conv"
    onnx.save(proto, file)
    with pytest.raises(FormatError):
        load(file)
