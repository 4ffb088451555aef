"""Graph mode: the same numbers as eager mode, one scale where one is needed, names, regions, bad input."""

from __future__ import annotations

import copy
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, spec
from quark.errors import CalibrationError, ConfigError, FormatError, NonFiniteError, NotSupportedError, ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, load_params, save_params
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.graph.plan import make_graph_plan
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.quantization.graph.ops.quant_stubs import DeQuantStub, QuantStub
from tests.models.graphs import FX, block, exported, images, quantize, quantizers
from tests.models.torch_zoo import every_layer, mlp, tiny_llama, token_batches

INT8 = spec("int8")
W8 = LayerSpec(weight=spec("int8", PerChannel(0)))
W8A8 = LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("uint8", symmetric=False))


def rows(seed: int = 2, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_gives_what_eager_mode_gives(scheme: str) -> None:
    x = rows()
    eager = ModelQuantizer(QConfig(global_quant_config=config_of_layer(SCHEMES[scheme]))).quantize_model(mlp(), [x])
    graph = quantize(exported(mlp(), x), SCHEMES[scheme], x)
    with torch.no_grad():
        before = graph(rows(3))
        assert torch.equal(before, eager(rows(3)))
        for name, layer in quantized_layers(eager).items():
            for role in ("weight", "input"):
                theirs, mine = layer.quantizer(role), graph.get_submodule(name)._modules.get(f"{role}_quantizer")
                assert (theirs is None) == (mine is None)
                if isinstance(theirs, FakeQuantize) and theirs.scale is not None:
                    assert isinstance(mine, FakeQuantize) and torch.equal(mine.scale, theirs.scale)  # type: ignore[arg-type]
        assert torch.equal(ModelQuantizer.freeze(graph)(rows(3)), before)
        assert torch.equal(ModelQuantizer.freeze(graph)(rows(3)), before)


@pytest.mark.slow
def test_layers_of_every_kind_with_outputs_and_biases_give_what_eager_mode_gives() -> None:
    layer = LayerSpec(weight=spec("int4"), bias=INT8, input=INT8, output=spec("uint8", symmetric=False))
    kinds = {kind: config_of_layer(layer) for kind in (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)}
    options: dict[str, Any] = {
        "layer_type_quant_config": kinds,
        # The table, and one layer without a bias, by name.
        "layer_quant_config": {"embedding": config_of_layer(LayerSpec(weight=spec("int4")))},
    }
    batches = token_batches()
    config = QConfig(global_quant_config=config_of_layer(LayerSpec()), **options)
    model = every_layer()
    model.bag = nn.Embedding(64, 64)
    # The activation behind a layer is fused into it in graph mode only, so there is none here.
    model.forward = lambda ids: _without_activation(model, ids)  # type: ignore[method-assign]
    reference = copy.deepcopy(model)
    reference.forward = lambda ids: _without_activation(reference, ids)  # type: ignore[method-assign]
    eager = ModelQuantizer(config).quantize_model(reference, batches)
    graph = quantize(exported(model, batches[0], dynamic=False), LayerSpec(), *batches, **options)
    with torch.no_grad():
        assert torch.equal(graph(batches[0]), eager(batches[0]))
        assert torch.equal(ModelQuantizer.freeze(graph)(batches[0]), ModelQuantizer.freeze(eager)(batches[0]))


def _without_activation(model: Any, ids: torch.Tensor) -> torch.Tensor:
    x = model.linear(model.embedding(ids))
    image = model.deconv(model.conv(x[:, :4].reshape(len(ids), 4, 8, 8)))
    return model.head(image.reshape(len(ids), 4, -1))


@pytest.mark.slow
def test_add_concat_and_pools_share_one_scale() -> None:
    graph = quantize(exported(block(), images(2)), W8A8, images(8))
    found = quantizers(graph)
    by_tensor = {tensor: path for path, tensors in found.items() for tensor in tensors}
    operators = [n for n in graph.graph.nodes if n.name in ("add_", "max_pool2d", "avg_pool2d", "cat", "linear")]
    readers = {
        n.name: [by_tensor[t.args[0].name] for t in n.all_input_nodes if t.op == "call_module"] for n in operators
    }
    assert len(set(readers["add_"])) == 1 and len(readers["add_"]) == 2
    # Both pools, what they give to the Concat, and what follows it through a pool and a reshape: one quantizer.
    assert len({*readers["max_pool2d"], *readers["avg_pool2d"], *readers["cat"], readers["linear"][0]}) == 1
    shared = graph.get_submodule(readers["cat"][0])
    with torch.no_grad():
        float_model, x = block(), images(8)
        stem = F.relu(float_model.norm(float_model.stem(x)))
        total = float_model.left_norm(float_model.left(stem)) + stem
        right = float_model.right(stem)
    width = max(float(total.max()), float(right.max())) - min(0.0, float(total.min()), float(right.min()))
    assert float(shared.scale) == pytest.approx(width / 255, rel=1e-5)
    assert found["stem.weight_quantizer"] == ["stem_weight"]


@pytest.mark.slow
def test_an_output_is_quantized_behind_its_activation_and_once_where_the_reader_wants_the_same() -> None:
    layer = LayerSpec(weight=INT8, input=INT8, output=INT8)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    graph = quantize(exported(model.eval(), rows()), layer, rows())
    called = [(str(n.target), n.args[0].name) for n in graph.graph.nodes if n.op == "call_module" and n.users]
    assert [entry for entry in called if "weight" not in entry[0]] == [
        ("0.input_quantizer", "input_1"),
        ("0.output_quantizer", "relu"),
        ("2.output_quantizer", "linear_1"),
    ]
    other = quantize(exported(model, rows()), LayerSpec(weight=INT8, input=INT8, output=spec("int4")), rows())
    calls = [str(n.target) for n in other.graph.nodes if n.op == "call_module" and n.users]
    assert [name for name in calls if "weight" not in name] == [
        "0.input_quantizer", "0.output_quantizer", "2.input_quantizer", "2.output_quantizer",
    ]  # fmt: skip


class Odd(nn.Module):
    """A layer called twice, functional layers, attention, control flow; input (n, 6, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(16, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.twice(self.twice(x) * 3), self.table)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        scores = torch.softmax(x @ x.transpose(1, 2) + 1e4 * (x.sum(-1, keepdim=True) > 0), -1)
        x = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
        return scores @ x


# While torch.export traces a branch, dynamo reads .grad of tensors that are no leaves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_shared_layers_functional_layers_masks_and_control_flow() -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(3, 6, 16)
    graph = exported(model, x, dynamic=False)
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=INT8, input=INT8)), quant_mode=FX)
    plan = make_graph_plan(config, graph)
    reasons = dict(plan.reasons)
    assert reasons["cond"] == "a graph of its own: cond" and reasons["softmax"] == "aten.softmax.int"
    assert "the mask before a softmax" in reasons.values()
    assert plan.operators["twice"].kind.name == "linear" and len(plan.operators["twice"].nodes) == 2
    assert {"attention.out_proj", "linear_2", "matmul", "matmul_1", "mul"} <= {*plan.layers, *plan.excluded}
    assert "mul" in plan.excluded
    quantized = ModelQuantizer(config).quantize_model(graph, [x])
    found = quantizers(quantized)  # type: ignore[arg-type]
    assert found["twice.weight_quantizer"] == ["twice_weight"] and len(found["twice.input_quantizer"]) == 2
    with torch.no_grad():
        error = (quantized(x) - model(x)).norm() / model(x).norm()
        weight = compute_qparams(model.table, INT8)
        frozen = ModelQuantizer.freeze(quantized)
        assert torch.equal(frozen.table, fake_quantize(model.table, weight, INT8))
        wide = config_of_layer(LayerSpec(weight=spec("int16"), input=spec("int16")))
        finer = ModelQuantizer(replace(config, global_quant_config=wide)).quantize_model(
            exported(model, x, dynamic=False), [x]
        )
        finer_error = (finer(x) - model(x)).norm() / model(x).norm()
    # Steps are 256 times finer, and so is the error as long as it is small.
    assert 0 < float(finer_error) < float(error) / 128
    console = _console()
    console.print(plan.table(graph))
    text = console.export_text()
    assert "float (a graph of its own: cond)" in text and "float (aten.softmax.int)" in text and "(16, 16)" in text


def _console() -> Any:
    from rich.console import Console

    return Console(width=200, record=True, file=StringIO())


@pytest.mark.slow
def test_names_types_and_excludes_decide_as_in_eager_mode() -> None:
    int4, int2 = LayerSpec(weight=spec("int4")), LayerSpec(weight=spec("int2"))
    graph = quantize(
        exported(block(), images(2)),
        W8,
        exclude=["head"],
        layer_quant_config={"le*": config_of_layer(int4)},
        layer_type_quant_config={nn.Conv2d: config_of_layer(int2)},
    )
    found = {path: graph.get_submodule(path).spec.dtype.name for path in quantizers(graph)}
    assert found == {"stem.weight_quantizer": "int2", "left.weight_quantizer": "int4", "right.weight_quantizer": "int2"}
    with_pools = {nn.MaxPool2d: config_of_layer(LayerSpec(input=INT8))}
    graph = quantize(exported(block(), images(2)), LayerSpec(), images(4), layer_type_quant_config=with_pools)
    assert list(quantizers(graph)) == ["max_pool2d.input_quantizer"]


@pytest.mark.slow
def test_a_language_model_from_its_template() -> None:
    import dataclasses

    (ids,) = token_batches(1)
    model = tiny_llama(use_cache=False)
    config = LLMTemplate.get("llama").get_config("int8_wo")
    with torch.no_grad():
        eager = ModelQuantizer(config).quantize_model(tiny_llama(use_cache=False))(ids).logits
        graph = ModelQuantizer(dataclasses.replace(config, quant_mode=FX)).quantize_model(
            torch.export.export(model, (ids,)).module()
        )
        assert torch.equal(graph(ids).logits, eager)
    assert len(quantizers(graph)) == 14  # type: ignore[arg-type]


class Region(nn.Module):
    """Three layers, the middle one between stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(DeQuantStub(self.inside(QuantStub(self.before(x)))))


def test_stubs_mark_what_is_quantized() -> None:
    model, x = Region().eval(), torch.randn(4, 8)
    model(x).sum().backward()
    assert float(model.before.weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    graph = quantize(exported(model, x), LayerSpec(weight=INT8, input=INT8), x)
    assert set(quantizers(graph)) == {"inside.weight_quantizer", "inside.input_quantizer"}
    assert not any("Stub" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.slow
def test_the_eager_model_keeps_its_weights() -> None:
    model = block()
    before = copy.deepcopy(model.state_dict())
    ModelQuantizer.freeze(quantize(exported(model, images(2)), W8A8, images(4)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_tied_weight_is_written_for_its_quantized_reader_only() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + F.softmax(self.one.weight, -1)[0]

    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(4, 8)
    graph = quantize(exported(model, x), LayerSpec(weight=spec("int4")))
    before = graph(x)
    assert torch.equal(ModelQuantizer.freeze(graph)(x), before)
    assert torch.equal(graph.one.weight, model.one.weight)


class Positions(nn.Module):
    """Adds a table to its input, on both sides of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x + self.table) + self.table) @ self.table.outer(self.table)


def test_a_parameter_that_is_read_as_an_input_is_quantized_in_each_forward() -> None:
    torch.manual_seed(0)
    model, x = Positions().eval(), torch.randn(4, 8)
    layer = LayerSpec(weight=INT8, input=INT8)
    graph = quantize(exported(model, x), layer, x, layer_quant_config={"add": config_of_layer(layer)})
    found = quantizers(graph)
    assert {"x", "table"} <= set(found["add.input_quantizer"]) and "matmul.input_1_quantizer" in found
    before = graph(x)
    assert torch.equal(ModelQuantizer.freeze(graph)(x), before)
    with torch.no_grad():
        assert float((before - model(x)).norm() / model(x).norm()) < 0.03


def test_an_input_that_is_written_in_place_stays_float() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            x += 1
            return self.two(y) + x

    graph = exported(Writer(), torch.randn(4, 8), dynamic=False)
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=INT8, input=INT8)), quant_mode=FX)
    plan = make_graph_plan(config, graph)
    assert plan.reasons["one"] == "x is written in place" and "two" in plan.layers


@pytest.mark.slow
def test_saved_and_loaded(tmp_path: Path) -> None:
    graph = quantize(exported(block(), images(2)), W8A8, images(8))
    path = save_params(graph, "block", args=(images(2),), export_dir=tmp_path, quant_mode=FX)
    assert path == tmp_path / "block_quantized.pth"
    loaded = load_params(pth_path=str(path), quant_mode=FX)
    with torch.no_grad():
        assert torch.equal(loaded(images(7)), graph(images(7)))
    assert isinstance(loaded, fx.GraphModule)
    assert not any("quark" in str(node.target) for node in loaded.graph.nodes)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FormatError, match="block_quantized"):
        load_params(pth_path=str(path), quant_mode=FX)
    with pytest.raises(FormatError, match="No such file"):
        load_params(pth_path=str(tmp_path / "none.pth"), quant_mode=FX)
    with pytest.raises(ConfigError, match="pth_path goes with fx_graph_mode"):
        load_params(pth_path=str(path))
    with pytest.raises(ConfigError, match="needs args"):
        save_params(graph, "block", export_dir=tmp_path, quant_mode=FX)
    with pytest.raises(ConfigError, match="pass quant_mode=QuantizationMode.fx_graph_mode"):
        save_params(graph, "block", args=(images(2),), export_dir=tmp_path)
    with pytest.raises(ConfigError, match="A graph has no safetensors layout"):
        export_safetensors(graph, tmp_path / "folder")
    with pytest.raises(ConfigError, match="needs a graph"):
        save_params(mlp(), "block", args=(), export_dir=tmp_path, quant_mode=FX)


@pytest.mark.slow
def test_keyword_arguments_are_saved(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.one(x) * scale

    x = torch.randn(4, 8)
    shapes = {"x": {0: torch.export.Dim.AUTO}, "scale": None}
    graph = torch.export.export(Named(), (x,), {"scale": x[0]}, dynamic_shapes=shapes).module()
    graph = quantize(graph, LayerSpec(weight=INT8))
    path = save_params(graph, "named", (x,), {"scale": x[0]}, tmp_path, FX)
    more = torch.randn(9, 8)
    assert torch.equal(load_params(pth_path=str(path), quant_mode=FX)(more, scale=x[0]), graph(more, scale=x[0]))


# Bad input: one clear error, and the graph as it was. ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "data", "error", "message"),
    [
        (W8A8, (), CalibrationError, "stem.input"),
        (W8A8, (images(4)[:, :, :4],), CalibrationError, "Guard failed|does not take a calibration batch"),
        (W8A8, (images(4) * float("nan"),), NonFiniteError, "stem.input"),
        (LayerSpec(weight=spec("int4", PerGroup(1, 5))), (), ShapeError, "'stem' .conv2d, weight .8, 3, 3, 3.*"),
    ],
)
def test_bad_input_leaves_the_graph_as_it_was(layer: LayerSpec, data: Any, error: type, message: str) -> None:
    graph = exported(block(), images(2))
    code, names = graph.code, [name for name, _ in graph.named_modules()]
    values = {name: value.clone() for name, value in graph.state_dict().items()}
    with torch.no_grad():
        output = graph(images(3))
        with pytest.raises(error, match=message):
            quantize(graph, layer, *data)
        assert torch.equal(graph(images(3)), output)
    assert graph.code == code and [name for name, _ in graph.named_modules()] == names
    assert values.keys() == graph.state_dict().keys() and not hasattr(graph, "quant_config")
    with pytest.raises(NotImplementedError):
        graph.train()


@pytest.mark.slow
def test_models_that_are_no_exported_graph() -> None:
    line = r"Write: model = torch\.export\.export\(model\.eval\(\), args\)\.module\(\)"
    with pytest.raises(ConfigError, match=f"got Mlp.*{line}"):
        quantize(mlp(), W8)
    with pytest.raises(ConfigError, match=f"got an ExportedProgram.*{line}"):
        quantize(torch.export.export(mlp(), (rows(),)), W8)  # type: ignore[arg-type]
    for traced in (fx.symbolic_trace(mlp()), fx.symbolic_trace(lambda x: torch.relu(x) + 1)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"not from torch.export.*{line}"):
            quantize(traced, W8)
    graph = exported(mlp(), rows())
    with pytest.raises(ConfigError, match=r"pass quant_mode=QuantizationMode\.fx_graph_mode"):
        ModelQuantizer(QConfig(global_quant_config=config_of_layer(W8))).quantize_model(graph)
    with pytest.raises(ConfigError, match="freeze needs a model from quantize_model"):
        ModelQuantizer.freeze(graph)
    quantize(graph, W8)
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(graph, W8)


@pytest.mark.slow
def test_patterns_types_and_options_that_do_not_fit() -> None:
    graph = exported(block(), images(2))
    with pytest.raises(ConfigError, match="exclude: the pattern 'hed'"):
        quantize(graph, W8, exclude=["hed"])
    with pytest.raises(ConfigError, match="layer_quant_config: the pattern 'con'"):
        quantize(graph, W8, layer_quant_config={"con": config_of_layer(W8)})
    with pytest.raises(ConfigError, match=r"no operator of this graph is a LSTM\. Present: .*Conv2d"):
        quantize(graph, W8, layer_type_quant_config={nn.LSTM: config_of_layer(W8)})
    with pytest.raises(ConfigError, match="Nothing to quantize: of 9 operators"):
        quantize(graph, W8, exclude=["*"])
    with pytest.raises(NotSupportedError, match="shared_scale_groups is not part of fx_graph_mode"):
        quantize(graph, W8, shared_scale_groups=[["a", "b"]])


@pytest.mark.slow
def test_frozen_without_writing() -> None:
    graph = quantize(exported(block(), images(2)), W8A8, images(4))
    ModelQuantizer.freeze(graph, quantize=False)
    assert graph.stem.weight_quantizer.mode is Mode.quantize


class Residual(nn.Module):
    """A sum of convolutions, then a transformer block behind a table of positions; input (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1)
        self.table = nn.Parameter(torch.randn(1, 64, 16))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.left(x)) + self.right(x)
        x = x.flatten(2).transpose(1, 2) + self.table
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_sums_between_convolutions_are_quantized_and_the_residual_stream_is_not_unless_it_is_named() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    graph = exported(model, images(), dynamic=False)
    config = QConfig(global_quant_config=config_of_layer(W8A8), quant_mode=FX)
    plan = make_graph_plan(config, graph)
    assert "add" in plan.layers and {"add_1", "add_2"} <= {*plan.excluded}
    assert plan.reasons["add_1"] == "reads table in float" and plan.reasons["add_2"] == "reads add_1 in float"
    named = replace(config, layer_quant_config={"add_2": config_of_layer(W8A8)})
    assert "add_2" in make_graph_plan(named, graph).layers
    # An output that is quantized all the same takes its reader along.
    outputs = config_of_layer(replace(W8A8, output=W8A8.input))
    behind = replace(config, layer_quant_config={"add_1": outputs, "down": outputs})
    assert "add_2" in make_graph_plan(behind, graph).layers


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sizes"), [("ViT", {"intermediate_size": 256}), ("Dinov2", {"mlp_ratio": 4})])
def test_a_vision_transformer_is_as_accurate_as_in_eager_mode(family: str, sizes: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    from quark.core.metrics import sqnr

    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Model")
    sizes |= {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    model = kind(kind.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # As they are drawn, every branch would be too small beside the stream to be seen.
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        batches = [torch.randn(4, 3, 32, 32) for _ in range(3)]
        expected = model(batches[-1]).last_hidden_state
        config = QConfig(global_quant_config=config_of_layer(W8A8))
        eager = ModelQuantizer(config).quantize_model(copy.deepcopy(model), batches[:2])
        graph = torch.export.export(model, (batches[0],)).module()
        graph = ModelQuantizer(replace(config, quant_mode=FX)).quantize_model(graph, batches[:2])  # type: ignore[assignment]
        in_eager = float(sqnr(expected, eager(batches[-1]).last_hidden_state))
        in_graph = float(sqnr(expected, graph(batches[-1]).last_hidden_state))
    # 3 dB: half the error again, of what the rounding of other tensors may add.
    assert in_graph > in_eager - 3 and in_eager > 20
