"""GPTQ in ONNX models: the textbook's codes, every parameter counts, and rounding to nearest is beaten."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.core.granularity import PerChannel, PerGroup
from quark.core.metrics import sqnr
from quark.core.quantize import compute_qparams
from quark.core.solvers import gptq as solver
from quark.core.spec import spec
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.onnx import CalibMethod, GPTQConfig, Int4Spec, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.algorithms.rounding import gptq
from quark.onnx.calibration.qparams import onnx_range
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from tests.core.test_gptq import textbook
from tests.models.onnx_zoo import Builder, Reader, cnn, images, mlp, outputs, run
from tests.models.onnx_zoo import feed as noise

Array = np.ndarray[Any, Any]
MIXING = np.random.default_rng(7).normal(size=(32, 32)) * np.linspace(0.1, 2, 32)[:, None]
LAYER = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())


def correlated(count: int = 4, seed: int = 1, rows: int = 128) -> list[dict[str, Array]]:
    """Feeds whose channels have much to do with each other, as those of a trained model."""
    random = np.random.default_rng(seed)
    return [{"x": np.float32(random.normal(size=(rows, 32)) @ MIXING)} for _ in range(count)]


def quantized(model: onnx.ModelProto, feeds: Any, *algorithms: Any, **options: Any) -> onnx.ModelProto:
    config = QConfig(LAYER, algo_config=list(algorithms), **options)
    done = ModelQuantizer(config).quantize_model(model, None, Reader(feeds))
    assert done is not None
    onnx.checker.check_model(done)
    return done


def dense(transposed: bool = False, wide: int = 24) -> onnx.ModelProto:
    """One MatMul, or one Gemm with transB and a factor."""
    b = Builder()
    values = b.random.normal(0, 1, (32, wide))
    weight = b.constant("w", values.T if transposed else values)
    if transposed:
        b.node("Gemm", ["x", weight, b.constant("c", b.random.normal(0, 1, wide))], "y", transB=1, alpha=0.5)
    else:
        b.node("MatMul", ["x", weight], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", wide]})


def attention() -> onnx.ModelProto:
    """Three MatMul that read one tensor, then one that reads their sum."""
    b = Builder()
    parts = [b.node("MatMul", ["x", b.constant(n, b.random.normal(0, 0.2, (32, 32)))], f"{n}x") for n in "qkv"]
    total = b.node("Tanh", [b.node("Add", [b.node("Add", parts[:2], "qk"), parts[2]], "qkvx")], "joined")
    b.node("MatMul", [total, b.constant("o", b.random.normal(0, 0.2, (32, 32)))], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", 32]})


def stored(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def decoded(model: onnx.ModelProto, name: str) -> Array:
    """A weight as ONNX Runtime reads it."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    decoder = next(n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == f"{name}_quantized")
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(decoder.output[0]))
    return outputs(model, noise(model))[0]


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [16, -1])
def test_the_written_codes_are_those_of_the_textbook(
    size: int, transposed: bool, order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimal brain quantization by its definition, on the second moments of all samples."""
    monkeypatch.setattr(gptq, "REFINEMENTS", 0)
    feeds, model = correlated(3), dense(transposed)
    config = GPTQConfig(bits=4, group_size=size, per_channel=True, act_order=order, perc_damp=0.02)
    done = quantized(model, feeds, config)
    weight = stored(model)["w"]
    rows = weight if transposed else weight.T
    x = np.concatenate([feed["x"] for feed in feeds]).astype(np.float64)
    hessian = solver.damped(x.T @ x, 0.02)
    columns = np.argsort(-np.diagonal(x.T @ x), kind="stable") if order else np.arange(32)
    rule = onnx_range(spec("int4", PerChannel(0) if size == -1 else PerGroup(1, size)))
    assert rule is not None
    scale = np.asarray(compute_qparams(rows, rule).scale)
    scale = np.repeat(scale.reshape(len(rows), -1), 32 // scale[0].size, 1)

    def rounder(i: int, work: Array) -> Array:
        step = scale[:, columns[i]]
        return np.float32(np.clip(np.rint(work[i] / step), -7, 7) * step)

    expected = np.empty_like(rows)
    expected[:, columns] = textbook(rows[:, columns], hessian[columns][:, columns], rounder)
    found = decoded(done, "w")
    found = found if transposed else found.T
    # But for values within float32 of a tie.
    assert (~np.isclose(found, expected, atol=1e-5)).sum() <= 2
    assert not np.isclose(found, np.clip(np.rint(rows / scale), -7, 7) * scale, atol=1e-5).all()


FORMS: dict[str, tuple[GPTQConfig, dict[str, Any]]] = {
    "channel": (GPTQConfig(bits=4, per_channel=True), {}),
    "tensor": (GPTQConfig(bits=4), {}),
    "group": (GPTQConfig(bits=4, group_size=16), {}),
    "group asymmetric": (GPTQConfig(bits=4, group_size=16, weight_symmetric=False), {}),
    "3 bits": (GPTQConfig(bits=3, group_size=16), {}),
    "nodes": (GPTQConfig(), {"UseMatMulNBits": True, "MatMulNBitsParams": {"Algorithm": "GPTQ", "GroupSize": 16}}),
    "nodes of 2 bits": (
        GPTQConfig(),
        {
            "UseMatMulNBits": True,
            "MatMulNBitsParams": {"Algorithm": "GPTQ", "GroupSize": 16, "Bits": 2, "Symmetric": False},
        },
    ),
    "activations too": (GPTQConfig(bits=4, per_channel=True), {"WeightsOnly": False}),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_beats_rounding_to_nearest_on_the_same_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = FORMS[name]
    held = correlated(1, seed=9)[0]
    done = quantized(mlp(), correlated(), config, **options)
    with monkeypatch.context() as context:
        nearest_columns = lambda goal, upper, rounder: np.stack([rounder(i, goal) for i in range(len(goal))])  # noqa: E731
        context.setattr(solver, "solve", nearest_columns)
        context.setattr(gptq, "REFINEMENTS", 0)
        nearest = quantized(mlp(), correlated(), config, **options)
    ours, theirs = stored(done), stored(nearest)
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours if key.endswith(("_scale", "_zero_point")))
    reference = run(mlp(), held)
    assert sqnr(reference, run(done, held)) > sqnr(reference, run(nearest, held)) + 2
    decoders = [n for n in done.graph.node if n.op_type == "QuantizeLinear"]
    assert bool(decoders) == ("WeightsOnly" in options)


@pytest.mark.slow
def test_every_parameter_reaches_the_weights() -> None:
    base = {"bits": 4, "group_size": 16}

    def made(**changed: Any) -> dict[str, Array]:
        return stored(quantized(mlp(), correlated(2), GPTQConfig(**{**base, **changed})))

    plain, name = made(), "w2_quantized"
    assert plain["w2_scale"].shape == (4, 16) and made(group_size=32)["w2_scale"].shape == (2, 16)
    assert made(group_size=-1)["w2_scale"].shape == ()
    assert made(group_size=-1, per_channel=True)["w2_scale"].shape == (16,)
    for bits in range(2, 9):
        codes = made(bits=bits)[name].astype(int)
        assert abs(codes).max() == 2 ** (bits - 1) - 1
        assert 0 <= made(bits=bits, weight_symmetric=False)[name].astype(int).max() <= 2**bits - 1
    assert not made()["w2_zero_point"].astype(int).any()
    assert made(weight_symmetric=False)["w2_zero_point"].astype(int).any()
    assert np.array_equal(made(block_size=7)[name], plain[name])
    for changed in ({"act_order": True}, {"perc_damp": 1.0}, {"mse": True}):
        assert not np.array_equal(made(**changed)[name], plain[name])
    assert not np.array_equal(made(mse=True)["w2_scale"], plain["w2_scale"])


@pytest.mark.parametrize("options", [{}, {"WeightsOnly": False}])
@pytest.mark.parametrize("size", [32, -1])
def test_scales_of_least_error_beat_those_of_the_range(size: int, options: dict[str, Any]) -> None:
    config = {"bits": 3, "group_size": size, "per_channel": True}
    held = correlated(1, seed=9)[0]
    plain, fitted = (quantized(mlp(), correlated(), GPTQConfig(mse=mse, **config), **options) for mse in (False, True))
    reference = run(mlp(), held)
    assert sqnr(reference, run(fitted, held)) > sqnr(reference, run(plain, held)) + 0.5


def test_an_option_a_config_and_an_argument_say_the_same() -> None:
    first = quantized(mlp(), correlated(), GPTQConfig(bits=4, per_channel=True))
    second = quantized(mlp(), correlated(), UseGPTQ=True, GPTQParams={"Bits": 4, "PerChannel": True})
    third = ModelQuantizer(QConfig(LAYER)).quantize_model(
        mlp(), None, Reader(correlated()), algorithms=[GPTQConfig(bits=4, per_channel=True)]
    )
    assert third is not None
    assert first.SerializeToString() == second.SerializeToString() == third.SerializeToString()


def test_layers_that_read_one_tensor_share_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    factor = solver.factor
    monkeypatch.setattr(solver, "factor", lambda h, damp: sizes.append(len(h)) or factor(h, damp))
    done = quantized(attention(), correlated(), GPTQConfig(bits=4, per_channel=True))
    assert sizes == [32, 32]
    assert sum(node.op_type == "DequantizeLinear" for node in done.graph.node) == 4


@pytest.mark.slow
def test_what_is_quantized_beside_it() -> None:
    """Only what GPTQ solves, all weights, or activations too: the documented model is the first."""

    def codes(**options: Any) -> set[str]:
        return {name for name in stored(quantized(cnn(), images(2), GPTQConfig(), **options)) if "_quantized" in name}

    weights = codes(WeightsOnly=True)
    assert codes() == {"fc_w_quantized"} < weights and "stem_w_quantized" in weights
    assert codes(OpTypesToQuantize=["Conv", "Gemm"]) == weights < codes(WeightsOnly=False)
    own = {QLayerConfig(weight=Int4Spec(), input_tensors=Int8Spec()): ["hidden_node"]}
    done = ModelQuantizer(QConfig(LAYER, specific_layer_config=own, algo_config=[GPTQConfig()])).quantize_model(
        mlp(), None, Reader(correlated())
    )
    assert done is not None
    assert abs(stored(done)["w1_quantized"].astype(int)).max() == 7
    assert abs(stored(done)["w2_quantized"].astype(int)).max() == 127


def test_a_weight_that_others_read_stays_as_it_was() -> None:
    b = Builder()
    weight = b.constant("w", b.random.normal(0, 1, (32, 32)))
    hidden = b.node("MatMul", ["x", b.constant("a", b.random.normal(0, 1, (32, 32)))], "hidden")
    b.node("MatMul", [b.node("Add", [hidden, weight], "sum"), weight], "y")
    model = b.model({"x": [32, 32]}, {"y": [32, 32]})
    nearest = quantized(model, [], WeightsOnly=True)
    assert np.array_equal(stored(quantized(model, correlated(2, rows=32), GPTQConfig()))["w"], stored(nearest)["w"])


def test_what_cannot_be_done_is_refused() -> None:
    relu = Builder()
    relu.node("Conv", ["x", relu.constant("w", relu.random.normal(size=(4, 3, 1, 1)))], "y")
    for model, feeds, config, kind, message in [
        (mlp(), None, GPTQConfig(), CalibrationError, "GPTQConfig needs calibration data"),
        (mlp(), [], GPTQConfig(), CalibrationError, "no sample"),
        (mlp(), correlated(1, rows=0), GPTQConfig(), CalibrationError, "hidden_node: .*at least one row"),
        (mlp(), correlated(), GPTQConfig(bits=9), ConfigError, "bits 2 to 8"),
        (mlp(), correlated(), GPTQConfig(bits=4, group_size=24), ConfigError, "group_size=24"),
        (mlp(), correlated(), GPTQConfig(block_size=0), ConfigError, "block_size from 1"),
    ]:
        with pytest.raises(kind, match=message):
            done = ModelQuantizer(QConfig(LAYER, algo_config=[config]))
            done.quantize_model(model, None, feeds if feeds is None else Reader(feeds))
    one = relu.model({"x": ["n", 3, 4, 4]}, {"y": ["n", 4, 4, 4]})
    with pytest.raises(ConfigError, match="GPTQConfig: nothing in this model qualifies"):
        quantized(one, [noise(one)], GPTQConfig(), WeightsOnly=True, AllowNoop=False)
    with pytest.raises(ConfigError, match=r"asked for: MatMul, Gemm \(GPTQConfig\) with a constant weight"):
        quantized(one, [noise(one)], GPTQConfig())
    with pytest.raises(ConfigError, match=r"bits=2, MatMulNBitsParams.Bits=4"):
        quantized(mlp(), correlated(), GPTQConfig(bits=2), UseMatMulNBits=True)
    dynamic = get_default_config("UINT8_DYNAMIC_QUANT")
    dynamic.extra_options = {"UseGPTQ": True}
    with pytest.raises(NotSupportedError, match="GPTQ with dynamic"):
        ModelQuantizer(Config(dynamic))


def test_few_rows_are_damped_by_how_few_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than columns are enough, and what they tell wrongly is not trusted."""
    held, feeds = correlated(1, seed=9)[0], correlated(1, rows=8)

    def found() -> float:
        return sqnr(run(mlp(), held), run(quantized(mlp(), feeds, GPTQConfig(bits=4, per_channel=True)), held))

    damped = found()
    monkeypatch.setattr(solver, "OF_FEW", 0.0)
    assert damped > found() + 1 > 11


def test_it_is_as_good_as_onnxruntimes(tmp_path: Any) -> None:
    """The same bits, blocks and data; asymmetric, as theirs is."""
    from onnxruntime.quantization import CalibrationDataReader, matmul_nbits_quantizer

    class Theirs(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = correlated()

        def get_next(self) -> Any:
            return self.feeds.pop(0) if self.feeds else None

    held = correlated(1, seed=9)[0]
    algorithm = matmul_nbits_quantizer.GPTQWeightOnlyQuantConfig(Theirs(), block_size=16)
    other = matmul_nbits_quantizer.MatMulNBitsQuantizer(mlp(), is_symmetric=False, block_size=16, algo_config=algorithm)
    other.process()
    other.model.save_model_to_file(str(tmp_path / "theirs.onnx"), False)
    parameters = {"Algorithm": "GPTQ", "GroupSize": 16, "Symmetric": False}
    ours = quantized(mlp(), correlated(), UseMatMulNBits=True, MatMulNBitsParams=parameters)
    reference = run(mlp(), held)
    assert sqnr(reference, run(ours, held)) >= sqnr(reference, run(str(tmp_path / "theirs.onnx"), held))
