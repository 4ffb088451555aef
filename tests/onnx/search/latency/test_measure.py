"""Measured placement with a timer of the test's own: nothing here depends on the machine's speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import CalibrationError, ConfigError, FormatError, OutputError, SlowerThanFloatError
from quark.onnx import Config, ModelQuantizer, QuantType
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.config import QuantizationConfig
from quark.onnx.config.lowering.lower import lower
from quark.onnx.config.settings import MeasurementSettings
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.latency.kernels import ProfiledModel, same_kernels, typical
from quark.onnx.search.latency.measure import Measured, leave_slower_in_float, measure
from quark.onnx.search.latency.node_groups import group_nodes, side_of
from quark.onnx.search.latency.profile_file import (
    KINDS,
    Line,
    Profile,
    default_path,
    fit,
    open_profile,
    this_machine,
)
from quark.onnx.search.settle import convert
from tests.models.onnx_zoo import run

FEED = {"x": np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(1, 16, 8, 8)}


def model_of_convolutions() -> onnx.ModelProto:
    """Three convolutions in a row, each with a Relu; the second one works on its own groups."""
    rng, nodes, constants, x = np.random.default_rng(0), [], [], "x"
    for name, groups in (("first", 1), ("second", 16), ("third", 1)):
        weight = rng.normal(0, 0.2, (16, 16 // groups, 3, 3)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"{name}_weight"))
        nodes.append(
            helper.make_node("Conv", [x, f"{name}_weight"], [f"{name}_y"], name=name, group=groups, pads=[1] * 4)
        )
        nodes.append(helper.make_node("Relu", [f"{name}_y"], [f"{name}_z"], name=f"{name}_relu"))
        x = f"{name}_z"
    shape = [1, 16, 8, 8]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", x)]
    graph = helper.make_graph(nodes, "convolutions", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def config(**extra: Any) -> Config:
    options = {"Target": "ort_x64", "MeasurePlacement": True, **extra}
    return Config(QuantizationConfig(activation_type=QuantType.QUInt8, extra_options=options))


class Clock:
    """Gives each kernel the seconds that a function of its signature says."""

    def __init__(self, seconds: Callable[[str], float]) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, models: Sequence[ProfiledModel], _: float) -> list[dict[str, float]]:
        self.calls += 1
        return [{kernel.name: self.seconds(kernel.signature) for kernel in model.kernels} for model in models]


def _slow_groups(signature: str) -> float:
    """Integers are the faster but where a convolution has groups."""
    if "QLinearConv" in signature:
        return 1e-2 if "group=16" in signature else 1e-5
    return 1e-3 if "Conv" in signature else 1e-6


def _fast_integers(signature: str) -> float:
    return 1e-3 if ":Conv(" in signature or ":FusedConv(" in signature else 1e-6


def _hardly_faster(signature: str) -> float:
    """Float kernels of 30 seconds in all, and integers that gain a few hundredths of one."""
    return 9.99 if "QLinearConv" in signature else 10.0 if "Conv" in signature else 1e-6


def _slow_integers(signature: str) -> float:
    return 1.0 if "QLinearConv" in signature else 1e-6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _measure(clock: Clock, **extra: Any) -> Measured:
    model = load(model_of_convolutions())
    settings = prepare(model, lower(config(**extra)))
    return measure(model, settings, Samples([FEED], model_inputs(model)), clock)


@pytest.mark.slow
def test_what_is_faster_in_integers_stays_there() -> None:
    found = _measure(Clock(_fast_integers))
    assert found.stay_float == frozenset()
    assert found.chosen_seconds == found.all_seconds < found.float_seconds


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_measured_weights_are_uint8_where_sums_with_int8_saturate(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each processor the file then computes what it says, by the defaults of ONNX Runtime."""
    monkeypatch.setattr("quark.onnx.search.latency.measure.integer_kernels_are_exact", lambda: exact)
    source = model_of_convolutions()
    model = load(source)
    settings, data = prepare(model, lower(config())), Samples([FEED], model_inputs(model))
    chosen = leave_slower_in_float(Prepared(model, data), settings, Clock(_fast_integers))
    made = to_proto(convert(Prepared(model, [FEED]), chosen))
    weights = {i.data_type for i in made.graph.initializer if i.name.endswith("weight_quantized")}
    assert weights == {TensorProto.INT8 if exact else TensorProto.UINT8}
    if not exact:
        (found,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, FEED)
        assert sqnr(run(made, FEED, optimise=False), found) > 45
        assert sqnr(run(source, FEED), found) > 25


@pytest.mark.slow
def test_times_of_another_machine_leave_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.search.latency.measure.integer_kernels_are_exact", lambda: False)
    model = load(model_of_convolutions())
    settings = prepare(model, lower(config(MeasurePlacement=str(tmp_path / "server.json"))))
    data = Samples([FEED], model_inputs(model))
    chosen = leave_slower_in_float(Prepared(model, data), settings, Clock(_fast_integers))
    assert str(chosen.specs.layer.weight.dtype) == "int8"


@pytest.mark.slow
def test_a_slow_integer_kernel_is_computed_in_float_and_with_it_a_neighbour() -> None:
    """Alone among integers ONNX Runtime would not leave it in float."""
    found = _measure(Clock(_slow_groups))
    assert "second" in found.stay_float and not {"first", "third"} <= found.stay_float
    # An integer convolution, two float ones, and at most ten conversions of 1e-6 s.
    assert found.chosen_seconds == pytest.approx(2e-3 + 1e-5, abs=1e-5)
    assert found.chosen_seconds < min(found.float_seconds, found.all_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("clock", [_slow_integers, _hardly_faster])
def test_where_integers_gain_nothing_nothing_is_quantized(clock: Callable[[str], float]) -> None:
    model = load(model_of_convolutions())
    settings = prepare(model, lower(config()))
    data = Samples([FEED], model_inputs(model))
    with pytest.raises(SlowerThanFloatError, match="No choice of integer kernels is faster than float"):
        leave_slower_in_float(Prepared(model, data), settings, Clock(clock))


@pytest.mark.parametrize(("convolution", "chosen"), [(9.95, False), (9.85, True)])
def test_a_hundredth_of_the_time_is_the_least_that_integers_gain(convolution: float, chosen: bool) -> None:
    """No group gains the share that it has to; all of them together are half a percent faster, or one and a half."""
    seconds = {"QLinearConv": convolution, "Conv": 10.0}
    found = _measure(Clock(lambda signature: next((s for kind, s in seconds.items() if kind in signature), 1e-6)))
    assert (found.in_integers > 0) is chosen and found.all_seconds < found.float_seconds
    assert found.chosen_seconds == (found.all_seconds if chosen else found.float_seconds)


@pytest.mark.parametrize(("share", "chosen"), [(0.96, False), (0.94, True)])
def test_a_twentieth_of_its_time_is_the_least_that_a_group_has_to_save(share: float, chosen: bool) -> None:
    """Beside a convolution whose integers are slow, so that not all is computed in them."""

    def seconds(signature: str) -> float:
        slow = "group=16" in signature
        return (1e-2 if slow else share * 1e-3) if "QLinearConv" in signature else 1e-3 if "Conv" in signature else 1e-8

    assert (_measure(Clock(seconds)).in_integers > 0) is chosen


@pytest.mark.slow
def test_a_profile_decides_what_is_written_and_is_not_measured_again(tmp_path: Path) -> None:
    """ONNX Runtime then runs one of the three convolutions in integers."""
    profile = str(tmp_path / "profile.json")
    first, again = Clock(_slow_groups), Clock(_slow_integers)
    found = _measure(first, MeasurePlacement=profile)
    assert _measure(again, MeasurePlacement=profile) == found
    assert first.calls and not again.calls
    ModelQuantizer(config(MeasurePlacement=profile)).quantize_model(
        model_of_convolutions(), tmp_path / "q.onnx", [FEED]
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "run.onnx"), 4
    onnxruntime.InferenceSession(str(tmp_path / "q.onnx"), options, providers=["CPUExecutionProvider"])
    kernels = [node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node]
    assert kernels.count("QLinearConv") == 1
    assert kernels.count("Conv") + kernels.count("FusedConv") == 2


@pytest.mark.slow
def test_a_profile_of_another_machine_is_used_but_not_completed(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found = _measure(Clock(_slow_groups), MeasurePlacement=str(path))
    content = json.loads(path.read_text())
    content["machine"]["cpu"] = "another"
    path.write_text(json.dumps(content))
    assert _measure(Clock(_slow_integers), MeasurePlacement=str(path)) == found
    content["kernels"] = {name: seconds for name, seconds in content["kernels"].items() if "QLinear" not in name}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="was measured on .*another.* lacks .* kernels of the model"):
        _measure(Clock(_slow_integers), MeasurePlacement=str(path))
    with pytest.raises(ConfigError, match="measured with 1 threads, and MeasureThreads is 2"):
        _measure(Clock(_slow_integers), MeasurePlacement=str(path), MeasureThreads=2)


PROFILE = '{"format": "quark profile 1", "machine": {"threads": "1"}, "kernels": '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "quark profile 1"}',
        f'{PROFILE}{{"Conv": -1}}, "conversions": {{}}}}',
        f'{PROFILE}{{}}, "conversions": {{"QuantizeLinear": [0, 0]}}}}',
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(FormatError, match=r"profile\.json is"):
        Profile.load(tmp_path / "profile.json")


def _profile(machine: dict[str, str], path: Path, kernels: dict[str, float]) -> Profile:
    return Profile(path, machine, kernels, dict.fromkeys(KINDS.values(), Line(1e-6, 0.0)), cache=True)


@pytest.mark.parametrize("text", ["", "{", '{"format": "quark profile 1", "machine": {"threads": "1"}}', "another"])
def test_a_cache_that_cannot_be_read_is_measured_again(own_cache: Path, text: str) -> None:
    """Nobody asked for it: of a damaged one, or one of another machine, no time is taken."""
    path = default_path(this_machine(1))
    own_cache.mkdir()
    if text == "another":
        _profile({**this_machine(1), "onnxruntime": "0.1"}, path, {"kernel": 1.0}).save()
    else:
        path.write_text(text)
    found = open_profile(MeasurementSettings())
    assert found.path == path and found.machine == this_machine(1) and not found.kernels
    found.kernels["kernel"] = 2.0
    found.save()
    assert open_profile(MeasurementSettings()).kernels == {"kernel": 2.0}


def test_the_cache_is_switched_off_and_begun_anew_by_its_variable(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off, a file stays as it is, and none of its times count; new, it goes once in a process."""
    model, path = ProfiledModel(load(chain(1)), {"x": np.ones((4, 8), np.float32)}), default_path(this_machine(1))
    (kernel,) = (each.signature for each in model.kernels)
    _profile(this_machine(1), path, {kernel: 1.0, "other": 1.0}).save()
    before = path.read_bytes()

    def timer(models: Sequence[ProfiledModel], seconds: float) -> list[dict[str, float]]:
        return [{each.name: 2.0 for each in one.kernels} for one in models]

    for asked, known in (("off", {}), ("new", {}), ("new", {kernel: 2.0})):
        monkeypatch.setenv("QUARK_KERNEL_TIMES", asked)
        found = open_profile(MeasurementSettings())
        assert found.kernels == known
        found.complete([model], timer, conversions=False)
        assert found.kernels == {kernel: 2.0}
        assert (path.read_bytes() == before) == (asked == "off")
    assert Profile.load(path).kernels == {kernel: 2.0}
    monkeypatch.setenv("QUARK_KERNEL_TIMES", "no")
    with pytest.raises(ConfigError, match=r"'no'\. Possible: off, .*; new, "):
        open_profile(MeasurementSettings())


def test_two_processes_add_to_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process wrote since the file was read stays, and of files without end the last times."""
    path, machine = tmp_path / "profile.json", this_machine(1)
    first, second = (_profile(machine, path, {name: 1.0}) for name in ("first", "second"))
    first.save()
    second.save()
    assert Profile.load(path).kernels == {"first": 1.0, "second": 1.0}
    monkeypatch.setattr("quark.onnx.search.latency.profile_file.MOST_KERNELS", 2)
    Profile(path, machine, {"third": 1.0}).save()
    assert Profile.load(path).kernels == {"second": 1.0, "third": 1.0}
    assert Profile.load(path).conversions == second.conversions


def test_processors_have_caches_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names and by their instructions, which virtual machines hide behind one name."""
    paths = set[Path]()
    for name, flags in (("one", "avx2 fma"), ("one", "avx2 avx512f fma"), ("other", "avx2 fma"), ("one", "avx2 sse")):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : {name}\nflags : {flags}\n")
        monkeypatch.setattr("quark.onnx.search.latency.profile_file.CPU_INFO", tmp_path / "cpuinfo")
        paths.add(default_path(this_machine(1)))
    assert len(paths) == 3


def test_equal_shapes_of_other_types_are_other_kernels() -> None:
    signatures = set[str]()
    for kind in (TensorProto.FLOAT, TensorProto.DOUBLE):
        x, y = (helper.make_tensor_value_info(name, kind, [4, 8]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "exp", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        feed = {"x": np.ones((4, 8), helper.tensor_dtype_to_np_dtype(kind))}
        signatures |= {kernel.signature for kernel in ProfiledModel(load(model), feed).kernels}
    assert len(signatures) == 2


def test_kernels_are_found_whatever_numbers_a_session_gives_them() -> None:
    """ONNX Runtime 1.31 numbers the convolutions of a detector in another order in one of six sessions."""
    names = ["a", "b_token_3", "c_token_5", "c_token_7", "d_token_9"]
    assert same_kernels(names, names) == dict(zip(names, names, strict=True))
    others = ["a", "b_token_5", "c_token_3", "c_token_9", "d_token_7", "d_token_8"]
    assert same_kernels(names, others) == dict(zip(names[:4], others, strict=False))


def test_the_times_of_a_busy_machine_are_told_at_the_pace_of_those_before(own_cache: Path) -> None:
    """Three times as slow are the kernels that are known, so that an unknown one is, too."""
    feed = {"x": np.ones((4, 8), np.float32)}
    wide, wider = (ProfiledModel(load(chain(count)), feed) for count in (5, 6))
    names = [kernel.signature for kernel in wide.kernels]
    assert len(set(names)) == 5
    profile = _profile(this_machine(1), own_cache / "profile.json", dict.fromkeys(names[:4], 1e-3))
    asked: list[tuple[list[ProfiledModel], float]] = []

    def timer(models: Sequence[ProfiledModel], seconds: float) -> list[dict[str, float]]:
        asked.append((list(models), seconds))
        slow = {names[0]: 9e-3}
        return [{kernel.name: slow.get(kernel.signature, 3e-3) for kernel in each.kernels} for each in models]

    profile.complete([wide], timer, 1.0)
    assert profile.kernels == {**dict.fromkeys(names[:4], 1e-3), names[4]: pytest.approx(1e-3)}
    # One kernel of five does not run as long as five, and a model of known kernels alone does not run again.
    profile.complete([wide, wider], timer, 1.0)
    assert asked[0][1] < 1.0 and asked[1][0] == [wider]
    assert list(profile.kernels.values()) == pytest.approx([1e-3] * 6)
    # Of two known ones no pace is told, so that all models run.
    few = _profile(this_machine(1), own_cache / "few.json", dict.fromkeys(names[:2], 1e-3))
    narrow, wide_again = ProfiledModel(load(chain(2)), feed), ProfiledModel(load(chain(3)), feed)
    few.complete([narrow, wide_again], timer, 1.0)
    assert asked[2][0] == [narrow, wide_again]
    # Where conversions alone are not known, no model runs but theirs.
    few.conversions.clear()
    few.complete([narrow], timer, 1.0)
    assert len(asked) == 4 and narrow not in asked[3][0] and few.conversions


def chain(count: int) -> onnx.ModelProto:
    """Products of matrices that are all of other sizes."""
    sizes = [8 * (number + 1) for number in range(count + 1)]
    weights = [numpy_helper.from_array(np.ones((sizes[i], sizes[i + 1]), np.float32), f"w{i}") for i in range(count)]
    nodes = [
        helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"x{i + 1}"], name=f"n{i}") for i in range(count)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size])
        for name, size in (("x", sizes[0]), (f"x{count}", sizes[-1]))
    )
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def loop(op_type: str) -> onnx.ModelProto:
    """Three rounds of an operator."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node(op_type, ["a"], ["b"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("a", TensorProto.FLOAT, [4])],
        [value("on", TensorProto.BOOL, []), value("b", TensorProto.FLOAT, [4])],
    )
    constants = [numpy_helper.from_array(np.array(3), "rounds"), numpy_helper.from_array(np.array(True), "start")]
    node = helper.make_node("Loop", ["rounds", "start", "x"], ["y"], name="loop", body=body)
    values = [value(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph([node], "loops", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_loops_of_equal_shapes_are_other_kernels_where_their_bodies_are() -> None:
    found = [
        {kernel.signature for kernel in ProfiledModel(load(loop(op_type)), {"x": np.ones(4, np.float32)}).kernels}
        for op_type in ("Exp", "Exp", "Sin")
    ]
    assert found[0] == found[1] and found[0].isdisjoint(found[2])


@pytest.mark.slow
def test_the_cache_folder_holds_one_profile_of_this_machine(own_cache: Path) -> None:
    _measure(Clock(_fast_integers))
    (file,) = own_cache.iterdir()
    assert json.loads(file.read_text())["machine"]["onnxruntime"] == onnxruntime.__version__


def test_without_a_cache_folder_the_times_serve_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is named has to be written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "file" / "folder"))
    assert _measure(Clock(_fast_integers)) == _measure(Clock(_fast_integers), MeasurePlacement=str(tmp_path / "p.json"))
    with pytest.raises(OutputError, match="is not a folder"):
        _measure(Clock(_fast_integers), MeasurePlacement=str(tmp_path / "file" / "p.json"))


@pytest.mark.parametrize("extra", [{"Target": "generic"}, {"Target": "generic", "WeightsOnly": True}])
def test_what_cannot_be_measured_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the target is 'generic'"):
        _measure(Clock(_fast_integers), **extra)


def test_without_a_sample_nothing_can_run() -> None:
    model = load(model_of_convolutions())
    with pytest.raises(CalibrationError, match="runs the model on a calibration sample"):
        measure(model, prepare(model, lower(config())), None, Clock(_fast_integers))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"MeasurePlacement": ""}, "no path of a profile"), ({"MeasureThreads": 0}, "at least one thread")],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lower(config(**options))


def test_the_fused_activation_is_in_one_group_with_its_convolution() -> None:
    """ONNX Runtime runs one kernel for the two."""
    model = load(model_of_convolutions())
    run = ProfiledModel(model, FEED)
    side = side_of(model, run.kernels, dict.fromkeys([kernel.name for kernel in run.kernels], 1.0),
                   [node.name or "" for node in model.graph])  # fmt: skip
    groups = group_nodes(model, {node.name or "" for node in model.graph}, side, side)
    for name in ("first", "second", "third"):
        assert groups.find(name) == groups.find(f"{name}_relu")
    assert len({groups.find(name) for name in ("first", "second", "third")}) == 3


def test_a_line_goes_through_its_points() -> None:
    line = fit([(values, 3e-6 + 2e-9 * values) for values in (10, 1000, 100000)])
    # Least squares of numbers of 15 digits, over five orders of magnitude.
    assert line.fixed == pytest.approx(3e-6, rel=1e-9) and line.per_value == pytest.approx(2e-9, rel=1e-9)
    assert fit([(10, 1e-6), (1000, 0.5e-6)]) == Line(0.75e-6, 0.0)
    assert fit([]) == Line(0.0, 0.0)


def test_interrupted_runs_do_not_count() -> None:
    assert typical([1.0, 1.0, 50.0, 2.0, 70.0]) == pytest.approx(4 / 3)
