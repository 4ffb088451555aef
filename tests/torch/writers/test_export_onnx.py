"""export_onnx: layers, models, options, files, errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from quark.compat.torch_names.shorthand_specs import Int8PerTensorSpec
from quark.core.granularity import PerBlock, PerChannel, PerGroup
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleType, TensorSpec, spec
from quark.errors import CalibrationError, ConfigError, NotSupportedError, OutputExistsError, QuarkError
from quark.onnx_ops import saving
from quark.torch import (
    LLMTemplate,
    ModelExporter,
    ModelQuantizer,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.export import ExporterConfig, OnnxExporterConfig
from quark.torch.layers import LAYERS
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.writers.onnx import marked_tensors
from tests.commands.program import quark
from tests.models.onnx_sessions import exact_session, session
from tests.models.torch_zoo import every_layer, mlp, tiny_llama, token_batches

pytestmark = pytest.mark.slow


def quantize(model: nn.Module, layer: LayerSpec, data: Any = None) -> nn.Module:
    """All layers of the model, embeddings too."""
    present = {type(module) for module in model.modules()}
    config = config_of_layer(layer)
    by_type = {kind: config for kind in LAYERS if kind in present}
    return ModelQuantizer(QConfig(config, layer_type_quant_config=by_type)).quantize_model(model, data)


def outputs(model: nn.Module, *inputs: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        found = model(*inputs)
    return (found if isinstance(found, torch.Tensor) else found.logits).numpy()


def run(file: Path, *inputs: torch.Tensor, make: Any = exact_session) -> np.ndarray:
    opened = make(file)
    feed = {node.name: x.numpy() for node, x in zip(opened.get_inputs(), inputs, strict=True)}
    found: np.ndarray = opened.run(None, feed)[0]
    return found


def assert_near(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def stored(file: Path) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}


def initializer_kinds(file: Path) -> set[str]:
    return {TensorProto.DataType.Name(t.data_type) for n, t in stored(file).items() if n.endswith("_quantized")}


def operators(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


class Images(nn.Module):
    """Convolutions with all that ONNX Runtime fuses around them; input (n, 4, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.head = nn.Linear(16, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        x = torch.relu(self.depthwise(self.up(x))).mean((2, 3))
        # A product of three axes with a bias, which ONNX Runtime makes a Gemm.
        return self.last(torch.relu(self.head(x))[:, None])


def images(count: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, 6, 6, generator=random) for _ in range(count)]


E8M0 = {"scale_type": ScaleType.float8_e8m0fnu}
PAIRS: dict[str, tuple[TensorSpec | None, TensorSpec]] = {
    "int8": (spec("int8"), spec("int8")),
    "uint8 asymmetric, channels": (spec("uint8", symmetric=False), spec("int8", PerChannel(0))),
    "int8 of channels": (spec("int8", PerChannel(1)), spec("uint8", PerChannel(0), symmetric=False)),
    "int16": (spec("int16"), spec("int8", PerChannel(0))),
    "int16 weights": (None, spec("int16", PerChannel(0))),
    "int8, int4": (spec("int8"), spec("int4", PerChannel(0))),
    "int4": (spec("int4"), spec("uint4", symmetric=False)),
    "fp8": (spec("fp8_e4m3"), spec("fp8_e4m3")),
    "fp8 of channels": (spec("fp8_e5m2", PerChannel(1)), spec("fp8_e5m2", PerChannel(0))),
    "uint8, fp8": (spec("uint8", symmetric=False), spec("fp8_e4m3")),
    "dynamic uint8": (spec("uint8", symmetric=False, dynamic=True), spec("int8")),
    "bfloat16": (spec("bfloat16", observer="placeholder"), spec("bfloat16", observer="placeholder")),
    "wide": (None, spec("int32")),
    "wide, asymmetric": (None, spec("uint32", symmetric=False)),
    "float zero point": (None, spec("uint4", PerChannel(0), symmetric=False, float_zero_point=True)),
    "blocks with a rest": (None, spec("mx9", PerGroup(1, 12, pad=True))),
    "E8M0 with a rest": (None, spec("fp6_e2m3", PerGroup(1, 32, pad=True), **E8M0)),
    "fp4": (spec("fp6_e3m2"), spec("fp4_e2m1", PerChannel(0))),
}


class Pairs(nn.Module):
    """One `Images` for each pair of specs, so that one export serves all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Images() for _ in PAIRS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def test_convolutions_and_products(tmp_path: Path) -> None:
    *data, x = images()
    layers = {
        f"parts.{i}.*": config_of_layer(LayerSpec(weight=weight, input=activation))
        for i, (activation, weight) in enumerate(PAIRS.values())
    }
    config = QConfig(config_of_layer(LayerSpec()), layer_quant_config=layers)
    model = ModelQuantizer(config).quantize_model(Pairs().eval(), data)
    file = export_onnx(model, tmp_path, x)
    with torch.no_grad():
        wanted = [y.numpy() for y in model(x)]
    exact, usual = (make(file).run(None, {"x": x.numpy()}) for make in (exact_session, session))
    for name, y, at_best, by_default in zip(PAIRS, wanted, exact, usual, strict=True):
        scale = np.abs(y).max()
        # A rounding upstream may move a live value to the next code, of 16 bits at that.
        assert np.abs(at_best - y).max() < (1e-3 if name == "int16" else 1e-5) * scale, name
        assert np.abs(by_default - y).max() < 5e-2 * scale, name


def test_every_layer_and_what_is_read_twice(tmp_path: Path) -> None:
    *_, ids = token_batches()
    model = quantize(every_layer(), LayerSpec(weight=spec("int8", PerChannel(0)), bias=spec("int8")))
    file = export_onnx(model, tmp_path, ids)
    assert_near(run(file, ids), outputs(model, ids))
    names = {f"{name}.weight_quantized" for name in ("embedding", "bag", "linear", "conv", "deconv", "head")}
    assert names | {"conv.bias_quantized"} <= set(stored(file))
    assert initializer_kinds(file) == {"INT8"} and "QuantizeLinear" not in operators(file)


@pytest.mark.parametrize("weight", [spec("int8", PerBlock((16, 32))), spec("int4", PerGroup(0, 32)),
                                    spec("uint4", PerGroup(-1, 32), symmetric=False)], ids=str)  # fmt: skip
def test_tiles_and_groups_of_either_axis(weight: TensorSpec, tmp_path: Path) -> None:
    model, x = quantize(mlp(), LayerSpec(weight=weight)), torch.randn(3, 5, 128)
    file = export_onnx(model, tmp_path, x)
    assert_near(run(file, x), outputs(model, x))
    assert "Transpose" not in operators(file)


@pytest.mark.parametrize("scheme", ["int8", "nvfp4"])
def test_a_language_model_of_any_length(scheme: str, tmp_path: Path) -> None:
    *data, ids = token_batches()
    model = tiny_llama(num_hidden_layers=1)
    ModelQuantizer(LLMTemplate.get("llama").get_config(scheme)).quantize_model(model, data)
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    file = export_onnx(model, tmp_path, {"input_ids": ids}, output_names=["logits"], dynamic_shapes=axes)
    other = torch.cat([ids, ids.flip(1)[:, :7]], dim=1)[[0, 1, 1]]
    for x in (ids, other):
        assert_near(run(file, x), outputs(model, x), 1e-4)
    opened = exact_session(file)
    assert [node.shape for node in opened.get_inputs()] == [["batch", "sequence"]]
    assert [node.name for node in opened.get_outputs()] == ["logits"]
    # The three projections read one quantized tensor.
    live = sum(t in ("QuantizeLinear", "QuantizeDequantize") for t in operators(file))
    assert live == 4 and model.config.use_cache


def test_an_encoder_with_a_mask(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model: Any = BertForSequenceClassification(config).eval()
    batch = {"input_ids": token_batches(1)[0], "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    batch["attention_mask"][1, 10:] = 0
    config = QConfig(config_of_layer(LayerSpec(weight=spec("int8"), input=spec("int8"))))
    ModelQuantizer(config).quantize_model(model, [batch])
    file = export_onnx(model, tmp_path, batch)
    assert_near(run(file, *batch.values()), outputs(model, *batch.values()), 1e-4)


def test_a_float16_model(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0)).half()
    for scheme in ("uint4_wo_32", "fp8"):
        model = ModelQuantizer(LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])).quantize_model(
            mlp(torch.float16), [x]
        )
        file = export_onnx(model, tmp_path / scheme, x)
        assert_near(run(file, x), outputs(model, x), 3e-2)


def test_a_loaded_checkpoint_gives_the_same_values(tmp_path: Path) -> None:
    *data, ids = token_batches()
    for scheme in ("uint4_wo_32", "nvfp4"):
        model = tiny_llama(num_hidden_layers=1)
        quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
        quantizer.freeze(quantizer.quantize_model(model, data))
        export_safetensors(model, tmp_path / scheme)
        loaded = import_model_from_safetensors(tiny_llama(seed=5, num_hidden_layers=1), tmp_path / scheme)
        ours, theirs = (export_onnx(m, tmp_path / f"{scheme}-{m is model}", ids) for m in (model, loaded))
        for name, tensor in stored(ours).items():
            assert tensor.SerializeToString() == stored(theirs)[name].SerializeToString(), name
        assert_near(run(theirs, ids), outputs(model, ids), 1e-4)


def test_a_graph_module_exports_alike(tmp_path: Path) -> None:
    """What is exported are the quantizers, whatever calls them."""
    x = torch.randn(3, 128)
    graph: Any = torch.export.export(mlp(), (x,)).module()
    weight, live = FakeQuantize(spec("int8", PerChannel(0))), FakeQuantize(spec("int8", dynamic=True))
    weight.store(_params(mlp().up.weight, weight.spec))
    for node in [n for n in graph.graph.nodes if n.op == "call_function" and "linear" in str(n.target)][:1]:
        for position, (name, module) in enumerate({"live_quantizer": live, "weight_quantizer": weight}.items()):
            graph.add_submodule(name, module)
            with graph.graph.inserting_before(node):
                new = graph.graph.call_module(name, (node.args[position],))
            node.update_arg(position, new)
    graph.recompile()
    file = export_onnx(graph, tmp_path, x)
    assert_near(run(file, x), outputs(graph, x))
    assert stored(file)["weight_quantized"].data_type == TensorProto.INT8


def _params(x: torch.Tensor, wanted: TensorSpec) -> Any:
    from quark.core.quantize import compute_qparams

    return compute_qparams(x.detach(), wanted)


# Options and files. --------------------------------------------------------------------------------------------------


def weight_only(scheme: str = "int4_wo_32") -> nn.Module:
    return ModelQuantizer(LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])).quantize_model(mlp())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The file of `weight_only()`, and how often codes were computed for it."""
    calls: list[int] = []
    original = marked_tensors.quantize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marked_tensors, "quantize", lambda *a: (calls.append(1), original(*a))[1])
        file = export_onnx(weight_only(), tmp_path_factory.mktemp("written"), torch.randn(3, 128), uint4_int4_flag=True)
    return file, len(calls)


def test_options_of_both_generations(tmp_path: Path, written: tuple[Path, int]) -> None:
    model, x = weight_only(), torch.randn(3, 128)
    exporter = ModelExporter(tmp_path / "old")
    file = exporter.export_onnx_model(model, x, ["tokens"], ["scores"], False, 22, False, "ONNX", False)
    assert file == tmp_path / "old" / "quark_model.onnx" and initializer_kinds(file) == {"INT8"}
    proto = onnx.load(file)
    assert [proto.graph.input[0].name, proto.graph.output[0].name] == ["tokens", "scores"]
    assert proto.opset_import[0].version == 22 and proto.producer_name == "quark"
    assert_near(run(file, x), outputs(model, x))
    config = ExporterConfig(onnx_export_config=OnnxExporterConfig(uint4_int4_flag=True))
    assert initializer_kinds(ModelExporter(config, tmp_path / "config").export_onnx_model(model, x)) == {"INT4"}
    assert initializer_kinds(ModelExporter(tmp_path / "plain").export_onnx_model(model, x)) == {"INT8"}
    assert initializer_kinds(written[0]) == {"INT4"}


def test_the_defaults_are_the_documented_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = weight_only(), torch.randn(3, 128)
    defaults = {name: p.default for name, p in inspect.signature(export_onnx).parameters.items()}
    assert defaults["dynamo"] is defaults["uint4_int4_flag"] is False
    plain = export_onnx(model, tmp_path / "plain", x)
    assert initializer_kinds(plain) == {"INT8"}
    assert "also with dynamo=False" in capsys.readouterr().err
    other = export_onnx(model, tmp_path / "dynamo", x, dynamo=True)
    assert plain.read_bytes() == other.read_bytes() and "dynamo=False" not in capsys.readouterr().err
    packed = export_onnx(model, tmp_path / "packed", x, uint4_int4_flag=True)
    assert packed.stat().st_size < 0.75 * plain.stat().st_size
    assert np.array_equal(run(packed, x), run(plain, x))


def test_the_least_opset_that_holds_the_types(tmp_path: Path) -> None:
    x = torch.randn(3, 128)
    for scheme, opset in {"int8_wo": 20, "uint4_wo_per_channel": 21}.items():
        proto = onnx.load(export_onnx(weight_only(scheme), tmp_path / scheme, x))
        assert proto.opset_import[0].version == opset, scheme


def test_a_model_over_the_limit_of_a_message_has_its_weights_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 5000)
    model, x = weight_only(), torch.randn(3, 128)
    file = export_onnx(model, tmp_path, x)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["quark_model.onnx", "quark_model.onnx.data"]
    assert_near(run(file, x), outputs(model, x))
    monkeypatch.undo()
    export_onnx(model, tmp_path, x, overwrite=True)
    assert [f.name for f in tmp_path.iterdir()] == ["quark_model.onnx"]


def test_codes_are_computed_when_they_are_written_and_once(written: tuple[Path, int]) -> None:
    assert written[1] == len(["up.weight", "down.weight"])


def test_inspect_reads_the_file(written: tuple[Path, int]) -> None:
    done = quark("inspect", str(written[0]))
    assert done.code == 0 and "int4" in done.out and "DequantizeLinear" in done.out


class Dropping(nn.Module):
    """A model whose second part torch.export cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(x))
        return y * 2 if float(y.sum()) > 0 else y


def test_after_an_error_all_is_as_it_was(tmp_path: Path) -> None:
    model = quantize(Dropping().train(), LayerSpec(weight=spec("int8")))
    with pytest.raises(NotSupportedError, match="torch.onnx cannot export Dropping"):
        export_onnx(model, tmp_path / "out", torch.randn(3, 32))
    assert model.training and model.dropout.training and list(tmp_path.iterdir()) == []
    quantizer = model.linear.weight_quantizer
    assert "forward" not in vars(quantizer) and quantizer.mode is Mode.quantize


def test_bad_input_is_refused(tmp_path: Path) -> None:
    model, x = weight_only(), torch.randn(3, 128)
    blocks = quantize(mlp(), LayerSpec(weight=spec("int8"), input=spec("int8", PerBlock((1, 64)), dynamic=True)))
    observing = weight_only()
    observing.up.weight_quantizer.start_observing()
    cases: list[tuple[type[QuarkError], str, Any]] = [
        (ConfigError, "this one is not quantized", lambda f: export_onnx(mlp(), f, x)),
        (ConfigError, "input_args is a str", lambda f: export_onnx(model, f, "x")),
        (ConfigError, "needs opset 21", lambda f: export_onnx(model, f, x, opset_version=19)),
        (ConfigError, "opset_version=99", lambda f: export_onnx(model, f, x, opset_version=99)),
        (NotSupportedError, "ONNX_ATEN", lambda f: export_onnx(model, f, x, operator_export_type="ONNX_ATEN")),
        (NotSupportedError, "up.input: .*per tensor, token or group", lambda f: export_onnx(blocks, f, x)),
        (CalibrationError, "up.weight_quantizer is still calibrating", lambda f: export_onnx(observing, f, x)),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call(tmp_path / "out")
        assert list(tmp_path.iterdir()) == [], message
    export_onnx(model, tmp_path, x)
    with pytest.raises(OutputExistsError, match="quark_model.onnx exists"):
        export_onnx(model, tmp_path, x, overwrite=False)
    export_onnx(model, tmp_path, x)


def test_the_file_is_as_small_as_the_scheme(tmp_path: Path) -> None:
    """Bits of a weight, scales included."""
    x = torch.randn(1, 1024)
    for scheme, bits in {"uint4_wo_128": 4.29, "mxfp4_weight_only": 4.26}.items():
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        layer = LayerSpec(weight=SCHEMES[scheme].weight)
        file = export_onnx(quantize(model, layer), tmp_path / scheme, x, uint4_int4_flag=True)
        assert 8 * file.stat().st_size / 1024**2 < bits + 0.05, scheme


def test_the_file_says_nothing_twice(tmp_path: Path) -> None:
    """No two constants of the same bits, no shape that ONNX's inference gives back; and ONNX Runtime takes it."""
    torch.manual_seed(0)
    one = nn.Linear(16, 16)
    two = nn.Linear(16, 16)
    two.load_state_dict(one.state_dict())
    x = torch.randn(4, 16)
    layer = LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False))
    model = ModelQuantizer(QConfig(config_of_layer(layer))).quantize_model(nn.Sequential(one, nn.ReLU(), two), [x])
    file = export_onnx(model, tmp_path, (x,))
    found = onnx.load(file)
    bits = [(t.data_type, tuple(t.dims), onnx.numpy_helper.to_array(t).tobytes()) for t in found.graph.initializer]
    assert len(bits) == len(set(bits))
    assert not found.graph.value_info
    assert_near(run(file, x), outputs(model, x))


@pytest.mark.slow
def test_a_name_of_a_file_is_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=Int8PerTensorSpec()))).quantize_model(model)
    x = torch.ones(1, 4)
    assert export_onnx(model, tmp_path / "mine.onnx", (x,)) == tmp_path / "mine.onnx"
    with pytest.raises(OutputExistsError):
        export_onnx(model, tmp_path / "mine.onnx", (x,), overwrite=False)
    (tmp_path / "folder.onnx").mkdir()
    assert export_onnx(model, tmp_path / "folder.onnx", (x,)) == tmp_path / "folder.onnx" / "quark_model.onnx"
    assert (tmp_path / "mine.onnx").read_bytes() == (tmp_path / "folder.onnx" / "quark_model.onnx").read_bytes()
