"""Models that are quantized in part: what has codes stays bit for bit, and the rest is quantized around it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static

from quark.core.metrics import sqnr
from quark.onnx import Int4Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity, UInt8Spec
from quark.onnx.graph.model_file import read, to_proto
from quark.onnx.passes import PASSES
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, run, vectors

LAYERS = ["a", "depth", "last", "y"]
"""Of `cnn`, which the first tool leaves in float."""


def by_onnxruntime(form: QuantFormat, folder: Path, model: onnx.ModelProto, feeds: Any, left: list[str]) -> Any:
    source, target = folder / "float.onnx", folder / "part.onnx"
    onnx.save(model, source)
    names = [node.name for node in model.graph.node if any(node.name.startswith(name) for name in left)]
    if form is None:
        quantize_dynamic(source, target, nodes_to_exclude=names)
    else:
        quantize_static(source, target, Reader(feeds), quant_format=form, nodes_to_exclude=names)
    return onnx.load(target)


def codes(model: onnx.ModelProto) -> Counter[Any]:
    """Nodes that hold or compute codes, with the bytes of their constants and their attributes; names apart."""
    constants = {
        tensor.name: (tensor.data_type, numpy_helper.to_array(tensor).tobytes()) for tensor in model.graph.initializer
    }
    return Counter(
        (
            node.op_type,
            tuple(constants.get(name, "live") for name in node.input),
            tuple(sorted(attribute.SerializeToString() for attribute in node.attribute)),
        )
        for node in model.graph.node
        if "Linear" in node.op_type or "Integer" in node.op_type or "NBits" in node.op_type
    )


def float_weights(model: onnx.ModelProto) -> list[str]:
    return [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1 and np.prod(tensor.dims) > 256
    ]


@pytest.mark.parametrize("config", ["A8W8", "INT8_CPU", "INT8_CPU_DYNAMIC", "BF16"])
@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=["QDQ", "QOperator"])
def test_a_model_that_another_tool_left_partly_in_float_is_finished(
    form: QuantFormat, config: str, tmp_path: Path
) -> None:
    part = by_onnxruntime(form, tmp_path, cnn(), images(), LAYERS)
    assert float_weights(part)
    done = ModelQuantizer(config).quantize_model(part, None, Reader(images()))
    assert done is not None and not codes(part) - codes(done) and not float_weights(done)
    # As they are: to be exact without VNNI, ONNX Runtime moves weights to uint8, and has no QLinearConv of int8 inputs.
    assert sqnr(run(part, images()[0], optimise=False), run(done, images()[0], optimise=False)) > 25


def test_a_tensor_that_has_codes_gets_no_others(tmp_path: Path) -> None:
    part = by_onnxruntime(QuantFormat.QDQ, tmp_path, cnn(), images(), LAYERS)
    done = ModelQuantizer("A8W8").quantize_model(part, None, Reader(images()))
    assert done is not None
    makers = {name: node for node in done.graph.node for name in node.output}
    again = [
        node.name
        for node in done.graph.node
        if node.op_type == "QuantizeLinear"
        and node.input[0] in makers
        and makers[node.input[0]].op_type == "DequantizeLinear"
    ]
    readers = Counter(node.input[0] for node in done.graph.node if node.op_type == "QuantizeLinear")
    assert not again and set(readers.values()) == {1}


def test_dynamic_layers_and_blocks_of_four_bits_keep_their_codes(tmp_path: Path) -> None:
    dynamic = by_onnxruntime(None, tmp_path, mlp(), vectors(), ["y"])
    four = QLayerConfig(input_tensors=UInt8Spec(), weight=Int4Spec(quant_granularity=QuantGranularity.Group))
    left = {"UseMatMulNBits": True, "MatMulNBitsParams": {"GroupSize": 32, "Symmetric": True, "Bits": 4}}
    blocks = ModelQuantizer(QConfig(four, exclude=["y_node"], **left)).quantize_model(mlp())
    decoded = ModelQuantizer(QConfig(four, exclude=["y_node"], WeightsOnly=True, BlockSize=32)).quantize_model(mlp())
    for part in (dynamic, blocks, decoded):
        assert part is not None and float_weights(part) == ["w2"]
        for config in ("A8W8", "INT8_CPU_DYNAMIC", "INT8_CPU_WEIGHTS"):
            done = ModelQuantizer(config).quantize_model(part, None, Reader(vectors()))
            assert done is not None and not codes(part) - codes(done) and "w2" not in float_weights(done)
            assert sqnr(run(part, vectors()[0]), run(done, vectors()[0])) > 25


def test_scales_are_not_stored_as_float16() -> None:
    b = Builder()
    scale = b.constant("s", b.random.uniform(1e-3, 2e-3, 2048))
    b.initializers.append(numpy_helper.from_array(b.random.integers(-9, 9, (4, 2048)).astype(np.int8), "codes"))
    b.node("MatMul", ["x", b.node("DequantizeLinear", ["codes", scale], "w", axis=1)], "y")
    model = read(b.model({"x": ["n", 4]}, {"y": ["n", 2048]}))
    assert PASSES["store_float16"](model) == 0 and "s" in {t.name for t in to_proto(model).graph.initializer}
