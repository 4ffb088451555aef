"""What a quantization cost on the calibration samples: the figure, the nodes that are named, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quark.errors import DamageError, FormatError, NothingToQuantizeError
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.calibration.byproducts import SampleOutputs
from quark.onnx.config.tensor_specs import Int8Spec
from quark.onnx.evaluation.compare_models import damaged_layers
from quark.onnx.graph.model_file import load
from quark.onnx.search.lost_outputs.damage import SpreadSamples, damage
from quark.onnx.search.lost_outputs.verdict import LEAST, Damage
from tests.commands.program import quark
from tests.models.onnx_bodies import in_branches
from tests.models.onnx_zoo import Builder, run


def model() -> onnx.ModelProto:
    b = Builder()
    for name, source in (("fine", "x"), ("hurt", "fine"), ("y", "hurt")):
        b.node("MatMul", [source, b.constant(f"{name}_w", b.random.normal(0, 0.2, (16, 16)))], name)
    return b.model({"x": ["n", 16]}, {"y": ["n", 16]})


def feeds(count: int = 8) -> list[dict[str, Any]]:
    return [{"x": np.random.default_rng(seed).normal(size=(4, 16)).astype(np.float32)} for seed in range(count)]


def config(hurt: bool) -> QConfig:
    """A range that a user overrides: everything beyond it is lost."""
    override = {"TensorQuantOverrides": {"hurt": [{"rmin": -0.01, "rmax": 0.01}]}} if hurt else {}
    return QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), extra_options=override)


@pytest.mark.parametrize("hurt", [False, True])
@pytest.mark.parametrize("to_file", [False, True])
def test_the_figure_is_that_of_samples_spread_over_all(
    hurt: bool, to_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen of a model that counts as large; all of them, where these tell that it is lost."""
    monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.PRODUCTS", 0)
    quantizer, out = ModelQuantizer(config(hurt)), tmp_path / "out.onnx"
    onnx.save(model(), tmp_path / "in.onnx")
    source = tmp_path / "in.onnx" if to_file else model()
    written = quantizer.quantize_model(source, out if to_file else None, feeds(32))
    written = onnx.load(out) if to_file else written
    found = quantizer.damage
    spread = feeds(32) if hurt else feeds(32)[::2]
    x, y = (np.stack([run(each, feed) for feed in spread]).astype(np.float64) for each in (model(), written))
    assert found is not None and found.samples == len(spread) and found.output == "y"
    assert found.sqnr == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), abs=0.01)
    assert (found.sqnr < LEAST) == hurt


@pytest.mark.parametrize(("kept", "samples"), [(0.99, 4), (0.68, 8), (-1.0, 2)])
def test_a_trial_is_compared_on_as_many_samples_as_tell(
    kept: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good one on a few, one near the bound on more, as its samples differ, a hopeless one on two."""
    monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.PRODUCTS", 0)
    source, changed = model(), model()
    for tensor in changed.graph.initializer:
        if tensor.name == "y_w":
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(kept), "y_w"))
    noisy = [{"x": feed["x"] * (1 if index % 16 else 20)} for index, feed in enumerate(feeds(32))]
    loaded = load(source)
    spread = SpreadSamples(noisy, loaded)
    found = damage(loaded, changed, spread.feeds(32), ModelQuantizer(config(False)).settings, spread, trial=True)
    assert found is not None and found.samples == samples and found.lost == (kept < 0.68)


def test_a_trial_takes_the_outputs_of_the_float_model_from_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one sample tells, once, that they are those of the model as it was loaded."""
    opened: list[Any] = []
    session = damage.__globals__["model_session"]
    monkeypatch.setitem(
        damage.__globals__, "model_session", lambda *given, **more: opened.append(given) or session(*given, **more)
    )
    source = load(model())
    spread = SpreadSamples(feeds(), source)
    samples = spread.feeds(8)
    names, known = ["y"], spread.outputs
    known.begin(load(model()))  # other objects: passes have made them anew
    for index, feed in enumerate(feeds()):
        known.add(index, "y", run(model(), feed))
    settings = ModelQuantizer(config(False)).settings
    for _ in range(3):
        found = damage(source, model(), samples, settings, spread, trial=True)
        assert found is not None and names == known.names
    assert len(opened) == 1


@pytest.mark.parametrize(("loud", "count"), [(1, 4), (2, 16), (20, 32)])
def test_as_many_samples_are_looked_at_as_tell(loud: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few that agree; more where others may show another value; twice as many where they differ much.

    Not all 128, which would take longer than the calibration; each once, though reading more changes their order.
    """
    monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.PRODUCTS", 0)
    b = Builder()
    b.node("Add", ["x", b.constant("error", np.full(16, 0.01))], "y")
    noisy, plain = b.model({"x": ["n", 16]}, {"y": ["n", 16]}), Builder()
    plain.node("Identity", ["x"], "y")
    source, seen = plain.model({"x": ["n", 16]}, {"y": ["n", 16]}), list[float]()
    given = [{"x": np.full((4, 16), index * 1e-4 + (1 if index % 3 else loud), np.float32)} for index in range(128)]
    run_sample = damage.__globals__["run_sample"]

    def recorded(session: Any, names: Any, feed: Any) -> Any:
        seen.append(float(feed["x"][0, 0]))
        return run_sample(session, names, feed)

    monkeypatch.setitem(damage.__globals__, "run_sample", recorded)
    loaded = load(source)
    kept = SpreadSamples(given, loaded)
    found = damage(loaded, noisy, kept.feeds(), ModelQuantizer(config(False)).settings, kept)
    assert found is not None and (found.samples, len(seen), len(set(seen))) == (count, 2 * count, count)
    assert ("Other samples most often show" in found.bound) == (loud > 1)


@pytest.mark.parametrize("known", ["same model", "changed", "changed wrongly", "too large", "none"])
def test_the_float_model_runs_again_only_where_calibration_did_not_give_its_outputs(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at all; for one sample where passes changed it; for all where they broke it, or memory holds few."""
    source, once, open_model = model(), list[bool](), damage.__globals__["model_session"]
    monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.PRODUCTS", 0)

    def counted(*arguments: Any, **named: Any) -> Any:
        once.append(named.get("once", False))
        return open_model(*arguments, **named)

    monkeypatch.setitem(damage.__globals__, "model_session", counted)
    if known.startswith("changed"):
        monkeypatch.setattr(SampleOutputs, "are_of", lambda *_: False)
    if known == "changed wrongly":
        add = SampleOutputs.add
        monkeypatch.setattr(SampleOutputs, "add", lambda self, i, name, x: add(self, i, name, x + np.float32(0.01)))
    if known == "too large":
        monkeypatch.setattr("quark.onnx.search.lost_outputs.damage.MOST_BYTES", 3 * 4 * 16 * 4)
    if known == "none":
        monkeypatch.setattr(SampleOutputs, "add", lambda *_: None)
    quantizer = ModelQuantizer(config(False))
    written = quantizer.quantize_model(source, None, feeds(16))
    kept = feeds(16)[::4] if known == "too large" else feeds(16)
    x, y = (np.stack([run(each, feed) for feed in kept]).astype(np.float64) for each in (source, written))
    assert quantizer.damage is not None and quantizer.damage.samples == len(kept)
    assert quantizer.damage.sqnr == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), abs=0.01)
    expected = {"same model": [], "changed": [True], "changed wrongly": [True, False]}
    assert once == expected.get(known, [False])


def test_an_output_that_is_a_sequence_of_arrays_of_several_shapes_is_left_to_the_session() -> None:
    b = Builder()
    b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 0.2, (16, 16)))], "y")
    b.node("SequenceConstruct", ["x", b.constant("c", np.ones(3))], "list")
    source = b.model({"x": ["n", 16]}, {"y": ["n", 16]})
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    source.graph.output.append(onnx.helper.make_value_info("list", kind))
    quantizer = ModelQuantizer(config(False))
    quantizer.quantize_model(source, None, feeds())
    assert quantizer.damage is not None and quantizer.damage.sqnr > 25


def test_outputs_of_samples_are_kept_as_memory_allows() -> None:
    kept = SampleOutputs(["y", "z"], memory=4 * 8)
    kept.begin(load(model()))
    for sample in range(9):
        for name in ("y", "z"):
            kept.add(sample, name, np.full(1, sample, np.float32))
    held = {sample: found for sample in range(9) if (found := kept.of(sample)) is not None}
    assert set(held) == {0, 4, 8} and all(float(y[0]) == float(z[0]) == sample for sample, (y, z) in held.items())
    other = load(model())
    assert not kept.are_of(other) and not SampleOutputs(["y"], 1).are_of(other)
    kept.begin(other)
    assert kept.are_of(other.clone()) and kept.of(0) is None
    next(iter(other.graph)).name = "named otherwise"
    assert kept.are_of(other)
    next(iter(other.graph)).op_type = "Add"
    assert not kept.are_of(other)


def test_what_is_lost_is_refused_on_request_with_the_node_that_lost_it(tmp_path: Path) -> None:
    quantizer = ModelQuantizer(config(True))
    quantizer.settings = replace(quantizer.settings, least_sqnr=LEAST)
    with pytest.raises(DamageError, match=r"10 dB are asked for\. Most is lost at hurt_node \(\d\d\.\d dB -> "):
        quantizer.quantize_model(_saved(tmp_path), tmp_path / "out.onnx", feeds())
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


def _saved(folder: Path) -> Path:
    onnx.save(model(), folder / "in.onnx")
    return folder / "in.onnx"


def test_where_all_is_in_bodies_nodes_within_them_are_what_can_be_excluded() -> None:
    """Without the If nothing would be left; what the message says is tried."""
    source = in_branches(model())
    samples = [{**feed, "yes": np.array(True)} for feed in feeds()]

    def damage_without(*excluded: str, least: float | None) -> Damage:
        layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
        quantizer = ModelQuantizer(QConfig(layer, exclude=list(excluded)))
        quantizer.settings = replace(quantizer.settings, least_sqnr=least)
        quantizer.quantize_model(source, None, samples)
        assert quantizer.damage is not None
        return quantizer.damage

    with pytest.raises(DamageError, match=r"lost at choice .* Possible: exclude nodes within their bodies, another"):
        damage_without(least=90)
    with pytest.raises(NothingToQuantizeError):
        damage_without("choice", least=90)
    every, left = damage_without(least=None), damage_without("then_branch_hurt_node", least=None)
    assert left.sqnr > every.sqnr


def test_no_exclusion_is_offered_where_no_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.onnx.search.lost_outputs.advice.damaged_layers", lambda *_: [])
    quantizer = ModelQuantizer(config(True))
    quantizer.settings = replace(quantizer.settings, least_sqnr=LEAST)
    with pytest.raises(DamageError, match=r"10 dB are asked for\. Possible: A16W8 with --config A16W8") as raised:
        quantizer.quantize_model(model(), None, feeds())
    assert "exclud" not in str(raised.value)


def test_values_that_are_gone_count_as_all_lost() -> None:
    b = Builder()
    b.node("Div", ["x", b.constant("zero", np.zeros(16))], "y")
    broken = b.model({"x": ["n", 16]}, {"y": ["n", 16]})
    other = Builder()
    other.node("MatMul", ["x", other.constant("w", np.eye(16))], "y")
    sound = other.model({"x": ["n", 16]}, {"y": ["n", 16]})
    settings = ModelQuantizer(config(False)).settings
    found = damage(load(sound), broken, feeds(1), settings)
    assert found is not None and found.sqnr == -np.inf
    assert damage(load(broken), sound, feeds(1), settings) is None  # there is no finite value to compare


def test_without_data_there_is_nothing_to_compare() -> None:
    quantizer = ModelQuantizer(QConfig.get_default_config("UINT8_DYNAMIC_QUANT"))
    quantizer.quantize_model(model())
    assert quantizer.damage is None


@pytest.mark.parametrize("with_data", [False, True])
def test_a_file_that_the_runtime_does_not_load_is_never_written(
    with_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step made it so: here a constant is lost of one of its rows when all else is done."""

    def spoil(model: ir.Model, settings: Any) -> None:
        tensors = ((value, value.const_value) for name, value in model.graph.initializers.items() if "y_w" in name)
        weight, tensor = next((value, tensor) for value, tensor in tensors if tensor is not None and tensor.size == 256)
        weight.const_value = ir.tensor(tensor.numpy()[:-1], name=weight.name)
        weight.shape = ir.Shape([15, 16])

    monkeypatch.setattr("quark.onnx.flow.flow.finish", spoil)
    settings = config(False) if with_data else QConfig.get_default_config("UINT8_DYNAMIC_QUANT")
    with pytest.raises(FormatError, match="What was quantized"):
        ModelQuantizer(settings).quantize_model(_saved(tmp_path), tmp_path / "out.onnx", feeds() if with_data else None)
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


@pytest.mark.slow
def test_the_command_line_refuses_and_writes_on_request(tmp_path: Path) -> None:
    """The second row is ten thousand times as large as the others, whose steps are too coarse then."""
    source, data, out = tmp_path / "in.onnx", tmp_path / "data.npz", tmp_path / "out.onnx"
    onnx.save(model(), source)
    rows = np.concatenate([feed["x"] for feed in feeds()])
    np.savez(data, x=np.concatenate([rows[:1], 1e4 * rows[-1:], rows[1:]]))
    command = ("quantize", source, "--config", "S8S8_AAWS", "--batch-size", 1, "--calib", data, "-o", out)
    done = quark(*command)
    assert done.code == 1 and "--allow-damage" in done.err and "dB at the output y" in done.err
    assert not out.exists()
    assert quark(*command, "--allow-damage").code == 0 and out.exists()


def test_only_nodes_that_lose_something_are_named_and_each_once() -> None:
    def halves(*outputs: str) -> onnx.ModelProto:
        b = Builder()
        b.node("Neg", ["x"], "same")
        b.nodes.append(onnx.helper.make_node("Split", ["same"], outputs, name="both", axis=1))
        return b.model({"x": ["n", 16]}, {"y": ["n", 8], "z": ["n", 8]})

    assert damaged_layers(halves("y", "z"), halves("y", "z"), feeds(1)) == []
    (lost,) = damaged_layers(halves("y", "z"), halves("z", "y"), feeds(1))
    assert lost[0].node == "both"
