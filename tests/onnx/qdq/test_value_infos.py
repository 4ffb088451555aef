"""FillAllValueInfo: every tensor of the quantized model has its type and shape, and they are those at run time."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.onnx import ModelQuantizer, QConfig
from tests.models.onnx_zoo import Reader, branches, cnn, feed, images, outputs

pytestmark = pytest.mark.slow


def quantized(name: str, model: onnx.ModelProto, data: object, fill: bool = True) -> onnx.ModelProto:
    config = QConfig.get_default_config(name)
    config.global_quant_config.extra_options["FillAllValueInfo"] = fill
    made = ModelQuantizer(config).quantize_model(model, None, data)
    assert made is not None
    return made


def shapes(model: onnx.ModelProto) -> dict[str, tuple[int, list[int | str]]]:
    """Tensor -> element type and dimensions, where both are there."""
    infos = (*model.graph.value_info, *model.graph.output)
    types = {info.name: info.type.tensor_type for info in infos if info.type.tensor_type.HasField("shape")}
    return {
        name: (kind.elem_type, [d.dim_value or d.dim_param for d in kind.shape.dim])
        for name, kind in types.items()
        if kind.elem_type
    }


def made(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output if name]


@pytest.mark.parametrize("name", ["A8W8", "XINT8", "BF16", "BFP16", "MX4"])
def test_every_tensor_has_the_type_and_shape_that_it_has_at_run_time(name: str) -> None:
    """Against ONNX Runtime, which has no bfloat16 outputs: every other tensor is one, for one sample."""
    plain = quantized(name, cnn(), Reader(images()), fill=False)
    assert set(made(plain)) - set(shapes(plain))
    model = quantized(name, cnn(), Reader(images()))
    found = shapes(model)
    assert set(made(model)) == set(found) & set(made(model))
    inside = [tensor for tensor in made(model) if tensor != "y" and found[tensor][0] != TensorProto.BFLOAT16]
    open_ended = onnx.ModelProto()
    open_ended.CopyFrom(model)
    del open_ended.graph.value_info[:]
    open_ended.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in inside)
    sample = images()[0]
    for tensor, array in zip(["y", *inside], outputs(open_ended, sample), strict=True):
        kind, dims = found[tensor]
        assert kind == helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
        sizes = [sample["x"].shape[0] if size == "n" else size for size in dims]
        assert sizes == list(np.shape(array)), tensor


def test_what_only_a_run_shows_has_open_sizes_where_the_inputs_have() -> None:
    """MatMulNBits is an operator of the runtime, of which ONNX knows nothing."""
    weight = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float32)
    for rows, expected in (("n", ["", 32]), (4, [4, 32])):
        infos = [helper.make_tensor_value_info("x", 1, [rows, 128]), helper.make_tensor_value_info("y", 1, [rows, 32])]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"), helper.make_node("Relu", ["h"], ["y"])]
        graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        found = shapes(quantized("MATMUL_NBITS", model, None))
        assert found["h"][1] in (expected, [rows, 32])


def test_weights_that_a_body_of_if_reads_too_are_whole_after_it() -> None:
    model = quantized("A8W8", branches(), Reader([feed(branches(), seed) for seed in range(2)]))
    assert set(made(model)) == set(shapes(model)) & set(made(model))
