"""Weights behind Cast and Mul: the values of DequantizeLinear, computed once when a file is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.onnx import Config, ModelQuantizer, get_default_config
from tests.models.onnx_zoo import cnn, images, mlp, run, vectors


def written(model: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    config = get_default_config("INT8_CPU_WEIGHTS")
    config.extra_options.update(options)
    done = ModelQuantizer(Config(config)).quantize_model(model)
    assert done is not None
    return done


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("make", (cnn, mlp))
def test_the_values_are_those_of_dequantize_linear(make: object, symmetric: bool) -> None:
    model, feed = (cnn(), images()[0]) if make is cnn else (mlp(), vectors()[0])
    folded, decoded = (written(model, Target=target, WeightSymmetric=symmetric) for target in ("ort_x64", "generic"))
    kinds = {node.op_type for node in folded.graph.node}
    assert "DequantizeLinear" not in kinds and {"Cast", "Mul"} <= kinds and ("Sub" in kinds) == (not symmetric)
    assert "DequantizeLinear" in {node.op_type for node in decoded.graph.node}
    np.testing.assert_array_equal(unoptimised(folded, feed), unoptimised(decoded, feed))


def unoptimised(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed)[0])


def test_onnx_runtime_folds_them_when_it_loads_the_file(tmp_path: Path) -> None:
    model = cnn()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(written(model).SerializeToString(), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node]
    assert "Cast" not in kinds and kinds.count("Conv") == sum(node.op_type == "Conv" for node in model.graph.node)


def test_the_file_is_small_and_near_float() -> None:
    model, feed = mlp(), vectors()[0]
    done = written(model)
    floats = [tensor for tensor in done.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    assert all(np.prod(tensor.dims) < 256 for tensor in floats)
    x, y = (run(each, feed).astype(np.float64) for each in (model, done))
    assert 10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2)) > 36
