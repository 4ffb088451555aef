"""Quantizing leaves no trace but its result: not in configs, not in the process, not in the working folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.onnx import CalibMethod, Int8Spec, Int16Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.config import presets
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from tests.models.onnx_zoo import Reader, cnn, images

NAMES = ("A8W8", "XINT8", "BF16", "MXINT8", "U8S8_AAWS", "VINT8", "UINT8_DYNAMIC_QUANT")


def quantized(config: Any) -> onnx.ModelProto:
    done = ModelQuantizer(config).quantize_model(cnn(), None, Reader(images(2)))
    assert done is not None
    return done


@pytest.mark.slow
def test_one_run_changes_neither_its_config_nor_the_next_run() -> None:
    configs = {name: Config(get_default_config(name)) for name in NAMES} | {"VINT8_QCONFIG": presets.VINT8_QCONFIG}
    before = {name: config.to_dict() for name, config in configs.items()}
    first = {name: quantized(config).SerializeToString() for name, config in configs.items()}
    again = {name: quantized(configs[name]).SerializeToString() for name in reversed(configs)}
    assert first == again
    assert {name: config.to_dict() for name, config in configs.items()} == before
    assert {name: get_default_config(name).to_dict() for name in NAMES} == {
        name: Config(get_default_config(name)).global_quant_config.to_dict() for name in NAMES
    }


def test_nothing_is_written_beside_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("cwd", "out"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    quantizer = ModelQuantizer(Config(get_default_config("XINT8")))
    assert quantizer.quantize_model(cnn(), tmp_path / "out" / "m.onnx", Reader(images(2))) is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["m.onnx"]


def test_a_proto_takes_layers_of_their_own() -> None:
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    own = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
    done = quantized(QConfig(layer, specific_layer_config={own: ["y_node"]}))
    kinds = {tensor.name: tensor.data_type for tensor in done.graph.initializer}
    assert kinds["fc_w_quantized"] == onnx.TensorProto.INT16
    assert kinds["last_w_quantized"] == onnx.TensorProto.INT8


def test_asymmetric_int8_uses_all_its_codes() -> None:
    """The lowest value of a range gets -128, the highest 127."""
    activation = Int8Spec(symmetric=False, calibration_method=CalibMethod.MinMax)
    weight = Int8Spec(symmetric=False, calibration_method=CalibMethod.MinMax)
    done = quantized(QConfig(QLayerConfig(input_tensors=activation, weight=weight)))
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in done.graph.initializer}
    assert (found["fc_w_quantized"].min(), found["fc_w_quantized"].max()) == (-128, 127)
    values = np.concatenate([feed["x"] for feed in images(2)])
    assert found["x_scale"] == pytest.approx((values.max() - values.min()) / 255, rel=1e-6)
    assert found["x_zero_point"] == np.rint(-128 - values.min() / found["x_scale"])
