"""dump_model: the codes and floats of one sample, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from quark.errors import CalibrationError, ConfigError
from quark.onnx import ModelQuantizer, QConfig, dump_model
from tests.models.onnx_zoo import Reader, cnn, images

pytestmark = pytest.mark.slow
FEED = images(1)[0]


@pytest.fixture(scope="module")
def quantized() -> onnx.ModelProto:
    model = ModelQuantizer(QConfig.get_default_config("S8S8_AAWS")).quantize_model(cnn(), None, Reader(images()))
    assert model is not None
    return model


def test_codes_of_activations_and_weights_are_those_of_the_runtime(quantized: onnx.ModelProto, tmp_path: Path) -> None:
    dump_model(quantized, Reader([FEED]), output_dir=tmp_path / "dump")
    decoders = {node.output[0]: node.input[0] for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    stored = {i.name: numpy_helper.to_array(i) for i in quantized.graph.initializer}
    assert {f.name for f in (tmp_path / "dump").iterdir()} == {
        f"{n}{end}" for n in decoders for end in (".bin", ".txt")
    }
    probe = onnx.ModelProto()
    probe.CopyFrom(quantized)
    computed = [name for name in decoders.values() if name not in stored]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    arrays = stored | dict(zip(computed, session.run(computed, FEED), strict=True))
    assert len(computed) > 5 and len(computed) < len(decoders)
    for name, source in decoders.items():
        codes = np.fromfile(tmp_path / "dump" / f"{name}.bin", arrays[source].dtype)
        np.testing.assert_array_equal(codes, arrays[source].ravel())
        np.testing.assert_array_equal(np.loadtxt(tmp_path / "dump" / f"{name}.txt", ndmin=1), codes)


def test_floats_of_every_node(tmp_path: Path) -> None:
    model = cnn()
    with pytest.raises(ConfigError, match="dump_float=True"):
        dump_model(model, Reader([FEED]), output_dir=tmp_path / "dump")
    assert not (tmp_path / "dump").exists()
    onnx.save(model, tmp_path / "m.onnx")
    dump_model(str(tmp_path / "m.onnx"), [FEED], dump_float=True, output_dir=str(tmp_path / "dump"))
    names = [node.output[0] for node in model.graph.node]
    assert len(list((tmp_path / "dump").iterdir())) == 2 * len(names)
    found = np.fromfile(tmp_path / "dump" / "y_float.bin", np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(found, session.run(None, FEED)[0].ravel(), rtol=1e-5, atol=1e-5)


def test_names_with_slashes_and_without_data(quantized: onnx.ModelProto, tmp_path: Path) -> None:
    text = quantized.SerializeToString().replace(b"stem_w_DequantizeLinear_Output", b"/tem_w_DequantizeLinear_Output")
    dump_model(onnx.ModelProto.FromString(text), None, {"x": [2, 3, 16, 16]}, output_dir=tmp_path / "dump")
    assert any(file.name.startswith("_tem_w") for file in (tmp_path / "dump").iterdir())
    (tmp_path / "dump" / "notes.md").write_text("of the user")
    dump_model(quantized, Reader([FEED]), output_dir=tmp_path / "dump")
    files = {file.name for file in (tmp_path / "dump").iterdir()}
    assert "notes.md" in files and any(name.startswith("stem_w") for name in files), "a second run writes into it"
    with pytest.raises(CalibrationError, match="gives none"):
        dump_model(quantized, Reader([]), output_dir=tmp_path / "other")
