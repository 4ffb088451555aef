"""QuaRot: streams are found in every form that exporters write, the float model stays what it was, outliers spread."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.granularity import PerChannel
from quark.core.metrics import sqnr
from quark.core.solvers.hadamard import Rotation
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.algorithms.rescaling.quarot import rotate
from quark.onnx.config.algo_configs import QuarotConfig
from quark.onnx.config.settings import Settings, SpecSettings
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.graph.residual_stream import find_streams
from quark.onnx.search.settle import quantize
from tests.models.onnx_zoo import Array, Builder, Reader, run

WIDTH, TOKENS, VOCABULARY = 64, 12, 50
OUTLIERS = [5, 40]
SETTINGS = Settings(
    SpecSettings(LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("int8")), op_types=("MatMul", "Gemm"))
)
OPSETS = {"RMSNormalization": 23}


class Decoder(Builder):
    """Attention and a gated MLP, twice; ids (n, 12), output y (n, 12, 50). Two channels of the stream are outliers.

    Args:
        norm: Op type of the norms, "parts" for those that torch exports.
        biased: Whether linear layers have biases.
        odd: "positions", "scaled", "last" or "gemm", which may be; "sigmoid", "shown" or "post", which may not.
        turn: An orthonormal matrix that the stream is rotated by; the gains are then 1.
    """

    def __init__(self, norm: str = "parts", biased: bool = False, odd: str = "", turn: Array | None = None) -> None:
        super().__init__(3)
        self.kind, self.biased, self.odd, self.even = norm, biased, odd, turn is not None
        self.turn = np.eye(WIDTH) if turn is None else turn
        self.added: list[str] = []
        table = self.random.normal(0, 1, (VOCABULARY, WIDTH))
        table[:, OUTLIERS] += 40
        x = self.node("Gather", [self.constant("embed", table @ self.turn), "ids"], "embedded")
        if odd == "positions":
            x = self.node("Add", [x, self.constant("positions", self.random.normal(0, 5, (TOKENS, WIDTH)))], "placed")
        if odd == "scaled":
            x = self.node("Mul", [x, self.constant("factor", np.array(0.7))], "scaled")
        delta = ""
        for name in ("a", "b"):
            x, h = self.normed(x, delta, f"{name}1")
            x, h = self.normed(x, self.attention(h, name), f"{name}2")
            delta = self.gated(h, name)
        x, h = self.normed(x, delta, "final", odd == "sigmoid")
        if odd == "last":
            h = self.node("Slice", [h, *(self.integers(f"cut{i}", [v]) for i, v in enumerate((-1, 99, 1)))], "last")
        self.linear(h, "y", VOCABULARY)
        self.outputs = ["y", x] if odd == "shown" else ["y"]

    def normed(self, x: str, delta: str, name: str, squash: bool = False) -> tuple[str, str]:
        """The stream with `delta` on it, and the norm of it."""
        kind, gain = self.kind, np.ones(WIDTH) if self.even else self.random.uniform(0.5, 3, WIDTH)
        constants = [self.constant(f"{name}_gain", gain)]
        if kind.endswith("LayerNormalization") and "Simplified" not in kind:
            constants.append(self.constant(f"{name}_bias", self.random.normal(0, 0.5, WIDTH)))
        if kind.startswith("Skip") and delta:
            outputs = [f"{name}_h", "", "", f"{name}_x"]
            node = helper.make_node(
                kind, [x, delta, *constants, *self.added], outputs, domain="com.microsoft", epsilon=1e-5
            )
            self.nodes.append(node)
            return outputs[3], outputs[0]
        x = self.node("Add", [x, delta], f"{name}_x") if delta else x
        x = self.node("Sigmoid", [x], f"{name}_squashed") if squash else x
        if kind == "parts":
            h = self.node("Mul", [*constants, self.in_parts(x, name)], f"{name}_h")
        else:
            h = self.node(kind.removeprefix("Skip"), [x, *constants], f"{name}_h", epsilon=1e-5)
        return (h if self.odd == "post" else x), h

    def in_parts(self, x: str, name: str) -> str:
        two, epsilon = self.constant(f"{name}_two", np.array(2.0)), self.constant(f"{name}_eps", np.array(1e-5))
        square = self.node("Pow", [x, two], f"{name}_square")
        mean = self.node("ReduceMean", [square, self.integers(f"{name}_axes", [-1])], f"{name}_mean")
        root = self.node("Sqrt", [self.node("Add", [mean, epsilon], f"{name}_sum")], f"{name}_root")
        return self.node("Mul", [x, self.node("Reciprocal", [root], f"{name}_inverse")], f"{name}_plain")

    def linear(self, x: str, name: str, columns: int, rows: int = WIDTH, writes: bool = False) -> str:
        weight = self.random.normal(0, rows**-0.5, (rows, columns))
        if not writes:
            # As in trained models: what reads the outliers makes little of them.
            weight[OUTLIERS] /= 40
        weight = weight @ self.turn if writes else self.turn.T @ weight
        bias = self.random.normal(0, 0.2, columns)
        bias = bias @ self.turn if writes else bias
        names = [self.constant(f"{name}_w", weight.T if self.odd == "gemm" else weight)]
        if self.odd == "gemm":
            flat = self.node("Reshape", [x, self.integers(f"{name}_rows", [-1, rows])], f"{name}_flat")
            y = self.node(
                "Gemm", [flat, *names, self.constant(f"{name}_b", bias)], f"{name}_2d", transB=1, alpha=0.5, beta=2.0
            )
            return self.node("Reshape", [y, self.integers(f"{name}_shape", [-1, TOKENS, columns])], name)
        y = self.node("MatMul", [x, *names], f"{name}_mm" if self.biased else name)
        if self.biased and writes and self.kind.startswith("Skip"):
            self.added = [self.constant(f"{name}_b", bias)]
            return y
        return self.node("Add", [self.constant(f"{name}_b", bias), y], name) if self.biased else y

    def attention(self, h: str, name: str) -> str:
        q, k, v = (self.linear(h, f"{name}_{part}", 32) for part in "qkv")
        scores = self.node("MatMul", [q, self.node("Transpose", [k], f"{name}_kt", perm=[0, 2, 1])], f"{name}_scores")
        mixed = self.node("MatMul", [self.node("Softmax", [scores], f"{name}_soft", axis=-1), v], f"{name}_mixed")
        return self.linear(mixed, f"{name}_o", WIDTH, 32, writes=True)

    def gated(self, h: str, name: str) -> str:
        gate, up = self.linear(h, f"{name}_gate", 96), self.linear(h, f"{name}_up", 96)
        silu = self.node("Mul", [gate, self.node("Sigmoid", [gate], f"{name}_sig")], f"{name}_silu")
        product = self.node("Mul", [silu, up], f"{name}_product")
        return self.linear(product, f"{name}_down", WIDTH, 96, writes=True)

    def proto(self) -> onnx.ModelProto:
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", TOKENS])
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "g", [ids], outputs, self.initializers)
        opsets = [helper.make_opsetid("", 23 if self.kind == "RMSNormalization" else 18)]
        return helper.make_model(graph, opset_imports=[*opsets, helper.make_opsetid("com.microsoft", 1)], ir_version=10)


def feeds(count: int = 4) -> list[dict[str, Array]]:
    random = np.random.default_rng(1)
    return [{"ids": random.integers(0, VOCABULARY, (8, TOKENS))} for _ in range(count)]


def rotated(model: onnx.ModelProto, **config: Any) -> tuple[int, onnx.ModelProto]:
    prepared = load(model)
    infer_shapes(prepared)
    count = rotate(prepared, QuarotConfig(**config), SETTINGS, feeds())  # type: ignore[arg-type]
    return count, to_proto(prepared)


def tensors(model: onnx.ModelProto) -> dict[str, Array]:
    return {i.name: numpy_helper.to_array(i).astype(np.float64) for i in model.graph.initializer}


def quality(model: onnx.ModelProto, reference: onnx.ModelProto, settings: Settings = SETTINGS) -> float:
    done = to_proto(quantize(load(model), settings, feeds()[:3]))
    return sqnr(run(reference, feeds()[3]), run(done, feeds()[3]))


NORMS = [
    "parts", "RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization",
    "SkipSimplifiedLayerNormalization", "SkipLayerNormalization",
]  # fmt: skip
WEIGHTS = 1 + 2 * 7 + 1
"""Embedding, seven linear layers in each block, head."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_every_form_of_norm_is_found_and_the_function_stays(norm: str, biased: bool) -> None:
    model = Decoder(norm, biased).proto()
    count, done = rotated(model)
    assert count == WEIGHTS + 4 * biased  # and the biases of the four layers that write
    before, after = tensors(model), tensors(done)
    assert np.abs(after["embed"][:, OUTLIERS]).max() < 0.5 * np.abs(before["embed"][:, OUTLIERS]).max()
    assert all((after[name] == 1).all() for name in after if name.endswith("_gain"))
    reference, found = run(model, feeds()[3]), run(done, feeds()[3])
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-4 * np.abs(reference).max())


@pytest.mark.parametrize("odd", ["positions", "scaled", "last", "gemm"])
def test_what_may_stand_on_a_stream(odd: str) -> None:
    model = Decoder("LayerNormalization" if odd == "gemm" else "parts", odd=odd).proto()
    count, done = rotated(model)
    assert count == WEIGHTS + {"positions": 1, "gemm": 4}.get(odd, 0)
    reference, found = run(model, feeds()[3]), run(done, feeds()[3])
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-4 * np.abs(reference).max())


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("sigmoid", "final_squashed_node (Sigmoid)"),
        ("shown", "final_x is an input or output of the model"),
        ("post", "reads what a norm of the residual stream gives"),
    ],
)
def test_what_may_not_stand_on_a_stream(odd: str, reason: str) -> None:
    """It is left out, with the reason, and nothing is left to rotate."""
    model = Decoder(odd=odd).proto()
    prepared = load(model)
    infer_shapes(prepared)
    streams, reasons = find_streams(prepared.graph)
    assert not streams and any(reason in found for found in reasons)
    count, done = rotated(model)
    assert count == 0
    for name, array in tensors(model).items():
        np.testing.assert_array_equal(tensors(done)[name], array)


@pytest.mark.slow
def test_outliers_of_the_stream_cost_nothing_any_more() -> None:
    """At least 80 percent, in dB, of what they cost beside the same function with another basis of its stream."""
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(WIDTH, WIDTH)))[0]
    bad, good = Decoder(turn=np.eye(WIDTH)).proto(), Decoder(turn=turn).proto()
    np.testing.assert_allclose(run(good, feeds()[0]), run(bad, feeds()[0]), atol=1e-3)
    best, worst, found = (quality(model, bad) for model in (good, bad, rotated(bad)[1]))
    assert best > worst + 4
    assert found > worst + 0.8 * (best - worst)


@pytest.mark.parametrize("norm", ["parts", "LayerNormalization"])
def test_random_signs_give_another_matrix(norm: str) -> None:
    """Also where the one that keeps the mean has signs in any case."""
    model = Decoder(norm, turn=np.eye(WIDTH)).proto()
    plain, signs, again = (
        abs(tensors(rotated(model, use_random_had=random)[1])["embed"]) for random in (False, True, True)
    )
    assert not np.allclose(plain, signs, atol=1e-3) and np.array_equal(signs, again)


def test_the_size_of_the_matrix() -> None:
    """Blocks of a divisor, the whole width by default, nothing else."""
    model = Decoder(turn=np.eye(WIDTH)).proto()
    for given, size in ((4096, WIDTH), (WIDTH, WIDTH), (16, 16)):
        found = tensors(rotated(model, r_matrix_dim=given)[1])["embed"]
        np.testing.assert_allclose(found, Rotation(size).apply(tensors(model)["embed"]), atol=1e-5)
    with pytest.raises(ConfigError, match="r_matrix_dim=48: the residual stream is 64 wide. Possible: 64, a divisor"):
        rotated(model, r_matrix_dim=48)


def listed(suffix: str = "") -> dict[str, Any]:
    """The stream of the decoder as a file describes it."""
    writers = {"a1": "embedded", "a2": "a_o", "b1": "a_down", "b2": "b_o", "final": "b_down"}
    pairs = []
    for name, writer in writers.items():
        block, parts = name[0], ("q", "k", "v") if name.endswith("1") else ("gate", "up")
        readers = ["y"] if name == "final" else [f"{block}_{part}" for part in parts]
        pairs.append({
            "prev_nodes": [f"{writer}{suffix if name != 'a1' else ''}_node"],
            "next_nodes": [f"{reader}{suffix}_node" for reader in readers],
            "norm_node": f"{name}_h_node",
        })  # fmt: skip
    return {"R1_pairs": pairs}


@pytest.mark.parametrize("biased", [False, True])
def test_a_file_says_what_is_rotated(biased: bool, tmp_path: Path) -> None:
    """The same as what is found; biases need no mention."""
    path, model = tmp_path / "pairs.json", Decoder(biased=biased).proto()
    path.write_text(json.dumps(listed("_mm" if biased else "")), encoding="utf-8")
    found, given = rotated(model), rotated(model, r_config_path=str(path))
    assert found[0] == given[0] == WEIGHTS + 4 * biased
    for name, array in tensors(found[1]).items():
        np.testing.assert_array_equal(tensors(given[1])[name], array)


def test_an_empty_path_is_no_file() -> None:
    """Documented scripts pass "" where no file is given."""
    assert rotated(Decoder().proto(), r_config_path="")[0] == WEIGHTS


def changed(*path: Any, value: Any) -> dict[str, Any]:
    """The file with one entry replaced."""
    data = listed()
    part: Any = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (changed("R1_pairs", 1, "prev_nodes", 0, value="a_0_node"), ConfigError, "prev_nodes.*'a_0_node'.*'a_o_node'"),
        (changed("R1_pairs", 0, "next_nodes", 0, value="a_soft_node"), ConfigError, "next_nodes has 'a_soft_node'"),
        (changed("R1_pairs", 0, "norm_node", value="a1_x_nod"), ConfigError, "norm_node has 'a1_x_nod'.*'a1_h_node'"),
        (changed("R1_pairs", 0, "prev_nodes", value="embedded_node"), ConfigError, "expected lists prev_nodes"),
        (changed("R1_pairs", 0, "previous", value=[]), ConfigError, "expected lists prev_nodes"),
        (changed("R2_pairs", value=[]), ConfigError, "nothing else"),
        (changed("R1_pairs", value=[]), ConfigError, "R1_pairs"),
        (changed("R1_pairs", 1, "prev_nodes", value=[]), StructureError, "the output y changes by .* of its largest"),
        (changed("R1_pairs", 1, "prev_nodes", value=["a_q_node"]), ConfigError, r"\[32, 64\] wide"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_the_model(data: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(kind, match=message):
        rotated(Decoder().proto(), r_config_path=str(path))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        rotated(Decoder().proto(), r_config_path=str(path))


@pytest.mark.slow
def test_configs_reach_the_flow() -> None:
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
    model = Decoder(turn=np.eye(WIDTH)).proto()

    def flow(*algorithms: Any, data: Any = None, source: onnx.ModelProto = model, **options: Any) -> float:
        quantizer = ModelQuantizer(QConfig(layer, algo_config=list(algorithms), Target="ort_x64", **options))
        done = quantizer.quantize_model(source, None, Reader(feeds()[:3]) if data is None else data)
        assert done is not None
        return sqnr(run(source, feeds()[3]), run(done, feeds()[3]))

    assert flow(QuarotConfig()) > flow() + 2
    assert flow(QuarotConfig(16)) == flow(RMatrixDim=16)
    with pytest.raises(ConfigError, match="QuarotConfig: nothing in this model qualifies"):
        flow(QuarotConfig(), source=Decoder(odd="post").proto(), AllowNoop=False)
    with pytest.raises(CalibrationError, match="QuarotConfig needs calibration data"):
        ModelQuantizer(QConfig(layer, algo_config=[QuarotConfig()])).quantize_model(model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """A decoder as torch exports it: all its norms share one gain."""
    import torch

    from tests.models.torch_zoo import tiny_llama

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama(num_hidden_layers=1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    path = tmp_path_factory.mktemp("llama") / "llama.onnx"
    example = (torch.zeros(8, TOKENS, dtype=torch.int64),)
    torch.onnx.export(
        Logits().eval(),
        example,
        path,
        dynamo=True,
        opset_version=18,
        external_data=False,
        verbose=False,
        input_names=["ids"],
    )
    return onnx.load(path)


@pytest.mark.slow
def test_a_decoder_that_torch_exports(llama: onnx.ModelProto) -> None:
    (embedding,) = [i for i in llama.graph.initializer if "embed_tokens" in i.name]
    table = numpy_helper.to_array(embedding) * np.where(np.arange(128) % 40 == 3, 60, 1).astype(np.float32)
    embedding.CopyFrom(numpy_helper.from_array(table, embedding.name))
    settings = replace(
        SETTINGS, specs=replace(SETTINGS.specs, layer=LayerSpec(weight=spec("int8"), input=spec("int8")))
    )
    count, done = rotated(llama)
    assert count == 9
    reference = run(llama, feeds()[3])
    np.testing.assert_allclose(run(done, feeds()[3]), reference, rtol=0, atol=1e-4 * np.abs(reference).max())
    assert quality(done, llama, settings) > quality(llama, llama, settings) + 3
