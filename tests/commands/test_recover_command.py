"""`quark quantize --recover` and --allow-noop from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.errors import SlowerThanFloatError
from quark.onnx import CLEConfig
from quark.onnx.config.preset_rows import QROWS
from tests.commands.program import Done, quark
from tests.commands.test_onnx_commands import cells
from tests.models.onnx_zoo import Builder, cnn, images, mlp, run, vectors

INT8 = onnx.TensorProto.INT8
LINE = "quantize {0}/cnn.onnx --config A8W8 --calib {0}/samples.npz --batch-size 4 -o {0}/out.onnx --force"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recover")
    onnx.save(cnn(), root / "cnn.onnx")
    onnx.save(mlp(), root / "mlp.onnx")
    np.savez(root / "samples.npz", x=np.concatenate([feed["x"] for feed in images(8)]))
    np.savez(root / "vectors.npz", x=vectors()[0]["x"])
    return root


def command(folder: Path, more: str, line: str = LINE) -> Done:
    return quark(*f"{line.format(folder)} {more}".split())


def sqnr(folder: Path) -> float:
    """Of what was written, on the held-out samples."""
    held_out = [images(8)[i] for i in (3, 7)]
    x, y = (
        np.concatenate([run(str(folder / name), feed).astype(np.float64) for feed in held_out])
        for name in ("cnn.onnx", "out.onnx")
    )
    return float(10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2)))


@pytest.mark.slow
def test_the_table_says_what_each_step_gave_and_the_file_is_the_best(folder: Path) -> None:
    # Of A8W8 on this model no step leaves more.
    line = LINE.replace("A8W8", "U8S8_AAWS")
    plain = command(folder, "--recover --reach 0 --target generic", line)
    target = round(float(cells(plain.out)[0][2].removesuffix(" dB")) + 0.2, 2)
    done = command(folder, f"--recover --budget 2m --reach {target} --target generic", line)
    assert (done.code, done.err) == (0, "")
    rows = cells(done.out)
    assert rows[0][0] == "the config as it is" and rows[0][4] == "kept"
    assert [row[1] for row in rows[1:2]] == [rows[0][2]]
    kept = [float(row[2].removesuffix(" dB")) for row in rows if row[4] == "kept"]
    assert kept == sorted(kept) and len(kept) > 1
    assert sqnr(folder) == pytest.approx(kept[-1], abs=0.01)
    assert f"sqnr: {kept[0]:.2f} dB -> {kept[-1]:.2f} dB; the target of {target:.2f} dB is reached" in done.out


def test_a_target_that_the_config_reaches_ends_at_once(folder: Path) -> None:
    done = command(folder, "--recover --metric cosine --reach 0.5")
    assert done.code == 0 and len(cells(done.out)) == 1
    assert "the target of 0.5 is reached" in done.out


@pytest.mark.slow
def test_without_a_configuration_the_file_is_the_best_of_quick_steps_for_a_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.search.evaluator.SPARE", 99.0)  # 40 dB this model has as it is
    line = "quantize {0}/cnn.onnx --calib {0}/samples.npz -o {0}/out.onnx --force"
    plain = command(folder, "--config INT8_CPU", line)
    assert plain.code == 0 and "Recovery" not in plain.out
    before = sqnr(folder)
    done = command(folder, "--batch-size 4 --no-measure", line)  # what is faster differs from machine to machine
    assert done.code == 0 and "INT8_CPU: " in done.out
    steps = [row[0] for row in cells(done.out)]
    assert "ranges: MinMSE" in steps and "AdaRound, 100 iterations" not in steps
    assert sqnr(folder) > before - 0.01
    weights = [tensor for tensor in onnx.load(folder / "out.onnx").graph.initializer if tensor.data_type == INT8]
    scales = {tensor.name: tensor for tensor in onnx.load(folder / "out.onnx").graph.initializer}
    assert any(list(scales[tensor.name.replace("_quantized", "_scale")].dims) for tensor in weights)


@pytest.mark.slow
def test_quick_steps_end_where_there_is_plenty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "quantize {0}/cnn.onnx --calib {0}/samples.npz -o {0}/out.onnx --force"
    monkeypatch.setattr("quark.onnx.search.evaluator.SPARE", -99.0)
    done = command(folder, "--batch-size 4 --no-measure", line)
    assert done.code == 0 and [row[0] for row in cells(done.out)] == ["the config as it is"]
    assert "target" not in done.out


@pytest.mark.slow
def test_without_a_configuration_three_samples_and_none_are_enough(folder: Path) -> None:
    line = "quantize {0}/cnn.onnx -o {0}/out.onnx --force"
    few = command(folder, f"--calib {folder}/samples.npz --batch-size 4 --samples 3 --no-measure", line)
    assert few.code == 0 and "of 3 samples to choose by, calibrated on 3" in " ".join(few.out.split())
    none = command(folder, "--no-measure", line)  # which kernels are the faster differs between processors
    assert none.code == 0 and "INT8_CPU_DYNAMIC: " in none.out
    kinds = {node.op_type for node in onnx.load(folder / "out.onnx").graph.node}
    assert {"DynamicQuantizeLinear", "MatMulInteger", "Conv"} <= kinds and "ConvInteger" not in kinds


def loud(layers: int, loudness: float, classes: int = 5) -> onnx.ModelProto:
    """A classifier of which one activation in 32 is that much louder than the others, and weighs as much less."""
    b = Builder()
    hidden = "x"
    for layer in range(layers):
        weight = b.random.normal(0, 0.25, (32, 32))
        weight[:, 0] *= loudness
        weight[0] /= loudness if layer else 1
        hidden = b.node("Relu", [b.node("MatMul", [hidden, b.constant(f"w{layer}", weight)], f"p{layer}")], f"h{layer}")
    b.node("Softmax", [b.node("MatMul", [hidden, b.constant("w", b.random.normal(0, 0.5, (32, classes)))], "z")], "y")
    return b.model({"x": ["n", 32]}, {"y": ["n", classes]})


@pytest.mark.slow
def test_where_the_scores_of_a_classifier_are_lost_weights_alone_are_tried(tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", x=np.random.default_rng(1).normal(0, 1, (32, 32)).astype(np.float32))
    line = "quantize {0}/model.onnx --calib {0}/samples.npz --batch-size 1 -o {0}/out.onnx --force --no-measure"
    quiet, lost = loud(1, 1, 2), loud(20, 300)  # of two random classes few are near each other
    for model, name in ((quiet, "INT8_CPU: "), (lost, "INT8_CPU_WEIGHTS: ")):
        onnx.save(model, tmp_path / "model.onnx")
        done = command(tmp_path, "", line)
        assert done.code == 0 and name in done.out and "sqnr of scores before the softmax" in done.out
        steps = {row[0]: row[4] for row in cells(done.out)}
        assert ("weights alone in integers" in steps) is (model is lost)
        assert ("20% of the nodes in float" in steps) is (model is lost)
    assert steps["weights alone in integers"] == "kept"


@pytest.mark.parametrize("preset", ["INT8_CPU_DYNAMIC", "INT8_CPU_WEIGHTS"])
def test_where_no_integers_are_faster_the_file_is_made_as_without_samples(
    preset: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By inputs that are quantized as they come; where these are not faster either, by weights alone."""

    def slower(*_: object) -> None:
        raise SlowerThanFloatError("No choice of integer kernels is faster than float on this processor.")

    monkeypatch.setattr("quark.onnx.search.recovery.search.measured_placement", slower)
    if preset == "INT8_CPU_WEIGHTS":
        monkeypatch.setattr("quark.onnx.search.settle.leave_slower_in_float", slower)
    line = "quantize {0}/cnn.onnx --calib {0}/samples.npz --batch-size 4 -o {0}/out.onnx --force"
    done = command(folder, "", line)
    assert done.code == 0 and f"{preset}: " in done.out and "is faster than float" in done.log
    kinds = {node.op_type for node in onnx.load(folder / "out.onnx").graph.node}
    assert not {"QuantizeLinear", "DequantizeLinear"} & kinds
    refused = command(folder, "--config INT8_CPU --recover --measure", line)
    assert refused.code == 1 and "is faster than float" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(("times", "name"), [(0, "INT8_CPU_DYNAMIC"), (1, "INT8_CPU_WEIGHTS"), (9, "INT8_CPU_WEIGHTS")])
def test_a_file_that_is_slower_as_a_whole_gives_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, name: str
) -> None:
    """Weights that are decoded when the file is loaded are not timed: their kernels are those of the float model."""
    asked = list[object]()

    def slower(*given: object) -> None:
        asked.append(given)
        if len(asked) <= times:
            raise SlowerThanFloatError("The quantized model takes 1.50 times as long as the float one.")

    monkeypatch.setattr("quark.onnx.search.latency.whole_file.refuse_slower", slower)
    done = command(folder, "", "quantize {0}/cnn.onnx -o {0}/out.onnx --force")
    assert done.code == 0 and f"{name}: " in done.out and len(asked) == min(times + 1, 2)
    assert ("1.50 times as long" in done.log) is (times > 0)
    assert ("Only weights that are decoded when the file is loaded" in done.log) is (times > 1)
    asked.clear()
    assert command(folder, "--no-measure", "quantize {0}/cnn.onnx -o {0}/out.onnx --force").code == 0 and not asked


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--force"])
def test_a_file_that_another_run_wrote_meanwhile_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    output = folder / "meanwhile.onnx"
    output.unlink(missing_ok=True)
    monkeypatch.setattr("quark.onnx.search.latency.whole_file.refuse_slower", lambda *_: output.write_text("theirs"))
    done = command(folder, more, "quantize {0}/cnn.onnx -o {0}/meanwhile.onnx")
    if more:
        assert done.code == 0 and output.read_bytes() != b"theirs"
    else:
        assert done.code == 1 and "exists" in done.err and output.read_text() == "theirs"
    assert not list(folder.glob(".quark-*"))


@pytest.mark.slow
def test_where_integer_activations_lose_the_task_weights_alone_are_stored(tmp_path: Path) -> None:
    """A logarithm asks for the small values of a spectrum, of which one scale for all leaves nothing."""
    b, size = Builder(), 32
    spectrum = b.node("Exp", ["x"], "spectrum")  # as an input it would belong to a front end, in float
    power = b.node("MatMul", [spectrum, b.constant("w", b.random.uniform(0.1, 1, (size, size)))], "power")
    floor = b.node("Max", [power, b.constant("least", np.array(1e-10))], "floor")
    onnx.save(b.model({"x": ["n", size]}, {b.node("Log", [floor], "y"): ["n", size]}), tmp_path / "log.onnx")
    loudness = b.random.normal(0, 8, (16, 1)) + b.random.normal(0, 1, (16, size))
    np.savez(tmp_path / "x.npz", x=loudness.astype(np.float32))
    line = f"quantize {tmp_path}/log.onnx --calib {tmp_path}/x.npz --batch-size 16 -o {tmp_path}/out.onnx"
    refused = quark(*f"{line} --config INT8_CPU".split())
    assert refused.code == 1 and "has lost its outputs" in refused.err
    done = quark(*f"{line} --no-measure".split())
    assert done.code == 0 and "INT8_CPU_WEIGHTS: " in done.out
    assert [row[4] for row in cells(done.out) if row[0] == "weights alone in integers"] == ["kept"]
    feed = {"x": np.load(tmp_path / "x.npz")["x"]}
    x, y = (run(str(tmp_path / name), feed) for name in ("log.onnx", "out.onnx"))
    assert np.sum(x**2) > 1000 * np.sum((x - y) ** 2)


@pytest.mark.slow
def test_no_type_is_wider_than_the_config_has_and_the_last_line_says_what_there_is(folder: Path) -> None:
    done = command(folder, "--recover --budget 1s --reach 500")
    assert done.code == 0 and "left out: more bits" in done.out and "is not reached" in done.out
    assert "int8 activations" in done.out.splitlines()[-1] and "int16" not in done.out.splitlines()[-1]
    kinds = {t.data_type for t in onnx.load(folder / "out.onnx").graph.initializer if t.name.endswith("zero_point")}
    assert onnx.TensorProto.INT16 not in kinds


@pytest.mark.parametrize(
    ("more", "words"),
    (
        ("--allow-wider", "--allow-wider goes with --recover"),
        ("--budget 5m", "--budget goes with --recover"),
        ("--metric sqnr", "--metric goes with --recover"),
        ("--reach 30", "--reach goes with --recover"),
        ("--recover --budget soon", "as in 90s, 10m or 1h"),
        ("--recover --metric mse", "no metric 'mse'"),
        ("--recover --samples 3", "at least 4 samples are needed, and there are 3"),
        ("--recover --statistics s.npz", "leave out Statistics"),
    ),
)
def test_bad_options_are_one_line_and_leave_nothing(folder: Path, more: str, words: str) -> None:
    (folder / "out.onnx").unlink(missing_ok=True)
    done = command(folder, more)
    assert done.code == 1 and words in " ".join(done.err.split()) and "Traceback" not in done.err
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    (
        ("--prefer speed --config A8W8", "--prefer chooses a configuration, and A8W8 is given"),
        ("--prefer cheap --calib {0}/samples.npz", "There is no preference 'cheap'"),
        ("--prefer size --calib {0}/samples.npz --target openvino", "not for --target openvino"),
        ("--prefer speed --calib {0}/samples.npz --no-measure", "kernels are not measured"),
        ("--prefer speed --calib {0}/samples.npz --for onnxruntime --effort fast", "--effort fast searches for no"),
    ),
)
def test_a_preference_without_a_choice_is_refused(folder: Path, more: str, words: str) -> None:
    (folder / "out.onnx").unlink(missing_ok=True)
    done = command(folder, more.format(folder), "quantize {0}/cnn.onnx -o {0}/out.onnx")
    assert done.code and words in " ".join(done.err.split()) and not (folder / "out.onnx").exists()


@pytest.mark.parametrize("prefer", ["accuracy", "size"])
def test_without_samples_weights_alone_are_more_exact_and_as_small(folder: Path, prefer: str) -> None:
    done = command(folder, f"--prefer {prefer}", "quantize {0}/mlp.onnx -o {0}/weights.onnx --force")
    assert done.code == 0 and "INT8_CPU_WEIGHTS: " in done.out


def test_algorithms_without_use_are_refused_by_a_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLE is part of this config, and finds no pair in this model."""
    monkeypatch.setitem(QROWS, "CLE_QCONFIG", replace(QROWS["A8W8_QCONFIG"], algorithm=CLEConfig))
    line = (
        "quantize {0}/mlp.onnx --config CLE_QCONFIG --calib {0}/vectors.npz --batch-size 64 -o {0}/mlp-out.onnx --force"
    )
    refused = command(folder, "--no-allow-noop", line)
    assert refused.code == 1 and "nothing in this model qualifies" in refused.err and "--allow-noop" in refused.err
    done = command(folder, "", line)
    assert done.code == 0 and "nothing in this model qualifies" in done.log
    assert command(folder, "--allow-noop", line).code == 0
