"""Models apart from their weights, as sessions take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from quark.errors import DamageError
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.model_file import SMALL, infer_shapes, load, split_weights, to_proto
from quark.onnx_ops.saving import files_read, message_without_weights
from tests.models.onnx_zoo import Builder, Reader, cnn, images, run


def test_codes_computed_when_read_see_their_weight_while_it_is_split_off() -> None:
    """A weight that one node reads in float and another as codes, which are small enough to stay in the message."""
    b, size = Builder(), SMALL // 4
    w = b.constant("w", b.random.normal(0, 1, (1, size)))
    b.constant("codes", np.zeros((1, size), np.float32))
    sums = b.node("Add", ["x", b.node("Mul", [w, "codes"], "decoded")], "y")
    model = load(b.model({"x": [1, size]}, {sums: [1, size]}))
    weight, codes = (model.graph.initializers[name] for name in ("w", "codes"))
    lazy = ir.LazyTensor(lambda: ir.tensor(weight.const_value.numpy().astype(np.int8)), dtype=ir.DataType.INT8,
                         shape=ir.Shape([1, size]), name="codes")  # fmt: skip
    codes.const_value = lazy
    proto, weights = split_weights(model)
    inside = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert list(weights) == ["w"] and codes.const_value is lazy and weight.const_value.nbytes == SMALL
    plain = {tensor.name: tensor for tensor in message_without_weights(model).graph.initializer}
    for message in (inside, plain):
        np.testing.assert_array_equal(numpy_helper.to_array(message["codes"]), weights["w"].astype(np.int8))


def test_the_spectrum_of_stft_has_half_of_the_bins_where_nothing_is_said() -> None:
    """The default of the operator is one side; shape inference of onnx takes it for the whole."""
    b = Builder()
    b.integers("hop", 50)
    b.node("STFT", ["x", "hop", b.constant("window", np.hanning(64))], "y")
    source = b.model({"x": [1, 500, 1]}, {"y": [1, "frames", "bins", 2]})
    source.graph.output[0].type.tensor_type.ClearField("shape")
    model = load(source)
    infer_shapes(model)
    feed = {"x": b.random.normal(size=(1, 500, 1)).astype(np.float32)}
    expected = run(source, feed)
    assert list(model.graph.outputs[0].shape) == list(expected.shape) == [1, 9, 33, 2]
    np.testing.assert_array_equal(run(to_proto(model), feed), expected)


@pytest.mark.slow
def test_a_message_holds_the_weights_that_lie_beside_the_file(tmp_path: Path) -> None:
    """So a session of it needs no folder: in memory, for mixed precision, and where lost outputs are traced."""
    source, whole = tmp_path / "in.onnx", cnn()
    onnx.save_model(cnn(), source, save_as_external_data=True, location="in.data", size_threshold=0)
    model = load(source)
    assert {tensor.data_location for tensor in to_proto(model).graph.initializer} == {TensorProto.DEFAULT}
    assert files_read(model) == {tmp_path / "in.data"}  # the model itself still reads them there
    for name in ("A8W8", "S16S16_MIXED_S8S8"):
        config = Config(get_default_config(name))
        made = [ModelQuantizer(config).quantize_model(each, None, Reader(images())) for each in (source, whole)]
        assert all(made)
        np.testing.assert_array_equal(*(run(each, images()[0]) for each in made if each is not None))
    lost = ModelQuantizer(Config(get_default_config("XINT8")))
    lost.settings = replace(lost.settings, least_sqnr=1000.0)
    with pytest.raises(DamageError, match=r"Most is lost at \S+ \("):
        lost.quantize_model(source, tmp_path / "out.onnx", Reader(images()))
