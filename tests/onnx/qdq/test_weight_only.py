"""Dynamic and weight-only quantization in stock ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.metrics import sqnr
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.spec import spec
from quark.errors import ConfigError, NotSupportedError
from quark.onnx import (
    Int4Spec,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    QuantType,
    UInt4Spec,
    get_default_config,
    quantize_dynamic,
    quantize_static,
)
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.config.config import Config, QuantizationConfig
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.passes import PASSES
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, outputs, run, vectors

MODELS = {"cnn": (cnn, images), "mlp": (mlp, vectors)}
FP8 = {"activation_type": QuantType.QFLOAT8E4M3FN, "weight_type": QuantType.QFLOAT8E4M3FN}
EVERY = pytest.mark.parametrize("model", MODELS)


def dense(k: int = 40, n: int = 12, transposed: bool = False) -> onnx.ModelProto:
    """One MatMul, or one Gemm with transB; k is no multiple of a block, columns differ in size."""
    b = Builder()
    values = b.random.normal(0, 1, (k, n)) * np.linspace(0.1, 2, n)
    weight = b.constant("w", values.T if transposed else values)
    if transposed:
        b.node("Gemm", ["x", weight, b.constant("c", b.random.normal(0, 1, n))], "y", transB=1)
    else:
        b.node("MatMul", ["x", weight], "y")
    return b.model({"x": ["n", k]}, {"y": ["n", n]})


def nbits(**parameters: Any) -> QConfig:
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    return QConfig(layer, UseMatMulNBits=True, MatMulNBitsParams=parameters)


@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_in_fp8_are_core_s(per_channel: bool) -> None:
    config = QuantizationConfig(**FP8, per_channel=per_channel, extra_options={"WeightsOnly": True})
    model = ModelQuantizer(Config(config)).quantize_model(dense(), None, Reader([]))
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    decoder = next(node for node in model.graph.node if node.op_type == "DequantizeLinear")
    codes, scale, zero = (stored[name] for name in decoder.input)
    assert codes.data_type == zero.data_type == TensorProto.FLOAT8E4M3FN and model.opset_import[0].version == 19
    weight = numpy_helper.to_array(next(tensor for tensor in dense().graph.initializer if tensor.name == "w"))
    wanted = fake_quantize(weight, None, spec("fp8_e4m3", granularity=PerChannel(1) if per_channel else PerTensor()))
    found = numpy_helper.to_array(codes).astype(np.float32) * numpy_helper.to_array(scale)
    np.testing.assert_array_equal(found, wanted)
    feed = vectors(1)[0]["x"][:, :1] * np.ones((1, 40), np.float32)
    np.testing.assert_allclose(run(model, {"x": feed}), feed @ wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotSupportedError, match="Activations in FLOAT8E4M3FN.*WeightsOnly=True"):
        ModelQuantizer(Config(QuantizationConfig(**FP8))).quantize_model(dense(), None, Reader([]))


def weight_only(model: onnx.ModelProto, weight: Any, **options: Any) -> onnx.ModelProto:
    config = QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=weight), WeightsOnly=True, **options)
    done = ModelQuantizer(config).quantize_model(model)
    assert done is not None
    onnx.checker.check_model(done)
    return done


@EVERY
@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
def test_dynamic_is_as_good_as_onnxruntimes(model: str, kind: QuantType, tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic as theirs

    make, feeds = MODELS[model]
    ours = quantize_dynamic(make(), weight_type=kind, per_channel=True)
    assert ours is not None
    onnx.checker.check_model(ours)
    folded = load(make())
    PASSES["fold_batch_norm"](folded)
    onnx.save(to_proto(folded), tmp_path / "float.onnx")
    theirs(tmp_path / "float.onnx", tmp_path / "theirs.onnx", per_channel=True, weight_type=kind)
    feed = feeds()[0]
    reference = run(make(), feed)
    found = sqnr(reference, run(ours, feed))
    assert found > 34 and found >= sqnr(reference, run(str(tmp_path / "theirs.onnx"), feed)) - 0.3
    kernels = {n.op_type for n in ours.graph.node}
    assert kernels >= {"DynamicQuantizeLinear", "MatMulInteger"} and "MatMul" not in kernels and "Gemm" not in kernels
    floats = [n for n in ours.graph.node if n.op_type == "Conv"]
    groups = [a.i for n in floats for a in n.attribute if a.name == "group"]
    assert len(groups) == len(floats) and all(group > 1 for group in groups)  # depthwise ones alone


def test_dynamic_for_a_cpu_stores_the_weights_of_convolutions_per_channel() -> None:
    """A channel a thousand times as loud as the others takes nothing of them.

    Each channel has a scale of its own, and the input is not quantized: the error is at most a step (half of it from
    the zero point, which is rounded too) at each of 3 * 3 * 3 inputs of at most 1.
    """
    b = Builder()
    weight = b.random.uniform(-1, 1, (8, 3, 3, 3)).astype(np.float32)
    weight[0] *= 1000
    conv = b.node("Conv", ["x", b.constant("w", weight)], "conv", kernel_shape=[3, 3])
    flat = b.node("Flatten", [conv], "flat")
    b.node("MatMul", [flat, b.constant("m", b.random.normal(0, 0.3, (32, 4)))], "y")
    model = b.model({"x": [1, 3, 4, 4]}, {"conv": [1, 8, 2, 2], "y": [1, 4]})
    done = ModelQuantizer(Config(get_default_config("INT8_CPU_DYNAMIC"))).quantize_model(model)
    assert done is not None
    kinds = [node.op_type for node in done.graph.node]
    assert "Conv" in kinds and "MatMulInteger" in kinds and "MatMul" not in kinds and "ConvInteger" not in kinds
    (codes,) = (t for t in done.graph.initializer if list(t.dims) == list(weight.shape))
    assert codes.data_type == onnx.TensorProto.UINT8
    feed = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 3, 4, 4)).astype(np.float32)}
    steps = np.ptp(weight.reshape(8, -1), axis=1) / 255
    errors = np.abs(outputs(done, feed)[0] - outputs(model, feed)[0]).max(axis=(0, 2, 3))
    assert (errors <= steps * 27).all()
    preset = get_default_config("UINT8_DYNAMIC_QUANT")
    preset.extra_options["RefineWeightScales"] = False
    noisy = ModelQuantizer(Config(preset)).quantize_model(model)
    assert noisy is not None
    one_scale = np.abs(outputs(noisy, feed)[0] - outputs(model, feed)[0]).max(axis=(0, 2, 3))
    assert one_scale[1:].max() > 10 * errors[1:].max()


def test_dynamic_handles_a_transposed_gemm_and_a_shared_input() -> None:
    model = dense(transposed=True)
    other = model.graph.node.add()
    other.CopyFrom(model.graph.node[0])
    other.name, other.output[0] = "second", "z"
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["n", 12]))
    feed = {"x": np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32)}
    done = quantize_dynamic(model, per_channel=True)
    assert done is not None and sqnr(run(model, feed), run(done, feed)) > 38
    assert sum(n.op_type == "DynamicQuantizeLinear" for n in done.graph.node) == 1
    assert [o.name for o in done.graph.output] == ["y", "z"]


def test_the_dynamic_preset_and_its_exclusions() -> None:
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.nodes_to_exclude = ["hidden_node"]
    done = ModelQuantizer(Config(config)).quantize_model(mlp())
    assert done is not None
    assert [n.op_type for n in done.graph.node if "MatMul" in n.op_type] == ["MatMul", "MatMulInteger"]
    with pytest.raises(ConfigError, match="Nothing to quantize"):
        quantize_dynamic(mlp(), op_types_to_quantize=["Sigmoid"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [16, 32])
def test_matmul_nbits_computes_what_the_core_says(bits: int, symmetric: bool, size: int) -> None:
    model = dense()
    config = nbits(GroupSize=size, Bits=bits, Symmetric=symmetric, AccuracyLevel=1)
    done = ModelQuantizer(config).quantize_model(model)
    assert done is not None
    onnx.checker.check_model(done)
    (node,) = done.graph.node
    assert (node.op_type, node.domain, node.name) == ("MatMulNBits", "com.microsoft", "y_node")
    weight = numpy_helper.to_array(model.graph.initializer[0])
    tensor = onnx_range(
        spec(f"{'int' if symmetric else 'uint'}{bits}", PerGroup(0, size, pad=True), symmetric=symmetric)
    )
    assert tensor is not None
    x = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    expected = x @ fake_quantize(weight, compute_qparams(weight, tensor), tensor)
    np.testing.assert_allclose(run(done, {"x": x}), expected, rtol=1e-5, atol=1e-5)


def lp_error(weight: Any, model: onnx.ModelProto) -> float:
    """Mean |W - W'|^0.7, the error that HQQ makes small; the rows of W' are what the model makes of unit vectors."""
    found = run(model, {"x": np.eye(len(weight), dtype=np.float32)})
    return float(np.mean(np.abs(weight - found) ** 0.7))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_hqq_loses_less_than_rounding(bits: int, symmetric: bool) -> None:
    model = dense(72, 24)
    weight = np.random.default_rng(0).standard_t(3, (72, 24)).astype(np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    done = {}
    for algorithm in ("DEFAULT", "HQQ"):
        config = nbits(Algorithm=algorithm, GroupSize=32, Bits=bits, Symmetric=symmetric)
        made = ModelQuantizer(config).quantize_model(model)
        assert made is not None
        onnx.checker.check_model(made)
        done[algorithm] = made
    zeros = next(numpy_helper.to_array(i) for i in done["HQQ"].graph.initializer if i.name == "w_zero_point")
    assert zeros.shape == (24, 3) and zeros.dtype == np.float32 and not np.array_equal(zeros, np.rint(zeros))
    assert lp_error(weight, done["HQQ"]) < 0.95 * lp_error(weight, done["DEFAULT"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_hqq_is_as_good_as_that_of_onnx_runtime() -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, MatMulNBitsQuantizer

    model = dense(128, 32)
    weight = (0.1 * np.random.default_rng(0).standard_t(3, (128, 32))).astype(np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    theirs = MatMulNBitsQuantizer(
        onnx.load_from_string(model.SerializeToString()), algo_config=HQQWeightOnlyQuantConfig(block_size=32, bits=4)
    )
    theirs.process()
    ours = ModelQuantizer(nbits(Algorithm="HQQ", GroupSize=32)).quantize_model(model)
    assert ours is not None
    assert lp_error(weight, ours) <= lp_error(weight, theirs.model.model)


@pytest.mark.parametrize("algorithm", ["DEFAULT", "HQQ"])
def test_a_float16_model_gets_float16_blocks(algorithm: str) -> None:
    model = dense()
    weight = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    config = nbits(GroupSize=16, Algorithm=algorithm)
    config.extra_options["QuantizeFP16"] = True
    done = ModelQuantizer(config).quantize_model(model)
    assert done is not None
    onnx.checker.check_model(done)
    kinds = {i.name: i.data_type for i in done.graph.initializer}
    assert kinds["w_scale"] == kinds.get("w_zero_point", TensorProto.FLOAT16) == TensorProto.FLOAT16
    x = np.random.default_rng(0).normal(size=(64, 40)).astype(np.float16)
    found = run(done, {"x": x})
    assert found.dtype == np.float16 and sqnr(run(model, {"x": x}).astype(np.float32), found.astype(np.float32)) > 18


@pytest.mark.parametrize("weight", [Int4Spec, UInt4Spec, Int8Spec])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocked_weights_decode_to_the_core(weight: Any, transposed: bool) -> None:
    model = dense(transposed=transposed)
    done = weight_only(model, weight(quant_granularity=QuantGranularity.Group), BlockSize=16)
    assert done.opset_import[0].version == 21
    decoder = next(n for n in done.graph.node if n.op_type == "DequantizeLinear")
    done.graph.output.append(onnx.helper.make_empty_tensor_value_info(decoder.output[0]))
    import onnxruntime

    session = onnxruntime.InferenceSession(done.SerializeToString())
    found = session.run([decoder.output[0]], {"x": np.zeros((1, 40), np.float32)})[0]
    array = numpy_helper.to_array(model.graph.initializer[0])
    kind = weight().data_type.core
    tensor = onnx_range(spec(kind, PerGroup(int(transposed), 16, pad=True), symmetric=not kind.startswith("u")))
    assert tensor is not None
    assert np.array_equal(found, fake_quantize(array, compute_qparams(array, tensor), tensor))


@EVERY
def test_four_bits_are_smaller_and_run(model: str) -> None:
    make, feeds = MODELS[model]
    done = weight_only(make(), Int4Spec(quant_granularity=QuantGranularity.Group))
    assert done.ByteSize() < 0.6 * make().ByteSize()
    assert sqnr(run(make(), feeds()[0]), run(done, feeds()[0], optimise=False)) > 14


def test_wrong_parameters_are_refused() -> None:
    for parameters, message in [
        ({"GroupSise": 32}, "Did you mean 'GroupSize'"),
        ({"GroupSize": 24}, "GroupSize=24"),
        ({"GroupSize": 512}, "GroupSize=512.*Possible: 16, 32, 64, 128, 256"),
        ({"Bits": 5}, "Bits=5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ModelQuantizer(nbits(**parameters))
    with pytest.raises(NotSupportedError, match="HQQ has float zero points"):
        ModelQuantizer(nbits(Algorithm="HQQ", Bits=8))
    with pytest.raises(ConfigError, match="Algorithm: 'HQK'. Did you mean 'HQQ'"):
        ModelQuantizer(nbits(Algorithm="HQK"))
    with pytest.raises(NotSupportedError, match="4-bit activations"):
        ModelQuantizer(QConfig(QLayerConfig(input_tensors=Int4Spec(), weight=Int4Spec())))


def test_quantize_static_takes_the_fields_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "out.onnx"
    assert quantize_static(cnn(), path, Reader(images()), per_channel=True, extra_options={"FoldRelu": True}) is None
    assert sqnr(run(cnn(), images()[0]), run(str(path), images()[0])) > 28
    with pytest.raises(ConfigError, match="per_channel"):
        quantize_static(cnn(), path, Reader(images()), per_chanel=True)


@pytest.mark.parametrize("preset", ["INT8_CPU_DYNAMIC", "UINT8_DYNAMIC_QUANT", "INT8_CPU_WEIGHTS"])
def test_the_errors_of_a_depthwise_kernel_cancel(preset: str) -> None:
    b = Builder()
    weight = b.random.normal(0, 0.3, (16, 1, 3, 3))
    b.node("Conv", ["x", b.constant("w", weight)], "y", kernel_shape=[3, 3], group=16)
    model = b.model({"x": [1, 16, 8, 8]}, {"y": [1, 16, 6, 6]})
    # Neighbours alike, as in an image.
    feed = {"x": (5 + np.random.default_rng(0).normal(0, 0.2, (1, 16, 8, 8))).astype(np.float32)}
    kept = []
    for refined in (False, True):
        config = get_default_config(preset)
        config.per_channel = True
        config.extra_options["RefineWeightScales"] = refined
        done = ModelQuantizer(Config(config)).quantize_model(model)
        assert done is not None
        kept.append(sqnr(run(model, feed), run(done, feed)))
    assert kept[1] > kept[0] + 3
