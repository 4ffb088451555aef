"""The commands on ONNX files from end to end, and every bad input: one clear line, nothing half-written."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from quark.jobs.run_file import CPU_TARGET
from quark.onnx import ModelQuantizer, PathDataReader, QConfig
from quark.onnx.evaluation.compare_models import compare_models
from quark.onnx.evaluation.ort_fusion import inspect_fusion
from tests.commands.program import Done, quark
from tests.models.onnx_bodies import in_branches
from tests.models.onnx_zoo import Builder, cnn, images, mlp, run, vectors


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Inputs by name, good and bad; tests never change them."""
    root = tmp_path_factory.mktemp("inputs")
    found = {name: root / file for name, file in (("cnn", "cnn.onnx"), ("mlp", "mlp.onnx"), ("samples", "samples.npz"))}
    onnx.save(cnn(), found["cnn"])
    onnx.save(mlp(), found["mlp"])
    np.savez(found["samples"], x=np.concatenate([feed["x"] for feed in images()]))
    found |= {"folder": root / "samples", "quantized": root / "a8w8.onnx", "x64": root / "x64.onnx"}
    found["folder"].mkdir()
    for index, feed in enumerate(images()):
        np.save(found["folder"] / f"{index}.npy", feed["x"])
    found |= {"missing": root / "missing.onnx", "broken": root / "broken.onnx", "empty": root / "empty"}
    found["broken"].write_bytes(b"no model")
    found["empty"].mkdir()
    found |= {"vectors": root / "vectors.npz", "doubles": root / "doubles.npz", "text": root / "text.txt"}
    np.savez(found["vectors"], x=vectors()[0]["x"])
    np.savez(found["doubles"], x=images()[0]["x"].astype(np.float64))
    found["text"].write_text("no data")
    for config, name in (("A8W8", "quantized"), ("U8S8_AAWS --target ort_x64", "x64")):
        line = f"quantize {found['cnn']} --config {config} --calib {found['samples']} --batch-size 4 -o {found[name]}"
        assert quark(*line.split()).code == 0
    return found


def command(line: str, places: dict[str, Path], **more: Path) -> Done:
    return quark(*(word.format(**places, **more) for word in line.split()))


def succeed(line: str, places: dict[str, Path], **more: Path) -> str:
    done = command(line, places, **more)
    assert (done.code, done.err) == (0, "")
    return done.out


def constants(path: Path) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


# quantize. ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("data", ["samples", "folder"])
def test_quantize_writes_what_the_python_interface_writes(data: str, places: dict[str, Path], tmp_path: Path) -> None:
    out = succeed(f"quantize {{cnn}} --config A8W8 --calib {{{data}}} -o {{out}}", places, out=tmp_path / "out.onnx")
    quantizer = ModelQuantizer(QConfig.get_default_config("A8W8"))
    quantizer.quantize_model(places["cnn"], tmp_path / "python.onnx", images())
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "python.onnx").read_bytes()
    sizes = [float(number) for number in re.findall(r"([\d.]+) MB", out)]
    expected = [path.stat().st_size / 1e6 for path in (places["cnn"], tmp_path / "out.onnx")]
    assert sizes == pytest.approx(expected, abs=0.005) and re.search(r"in \d+\.\d s", out)


@pytest.mark.slow
def test_quantize_passes_its_options_on(places: dict[str, Path], tmp_path: Path) -> None:
    line = "quantize {cnn} --config A8W8_QCONFIG --calib {samples} --samples 3 --exclude y_node -o {out}"
    succeed(line + " --exclude ^last_.*", places, out=tmp_path / "out.onnx")
    found = constants(tmp_path / "out.onnx")
    assert {"fc_w", "last_w"} <= set(found) and "stem_w_quantized" in found
    feeds = images()[0]["x"][:3]
    assert 0.9 < found["x_scale"] / (np.abs(feeds).max() / 127) <= 1.001
    assert found["x_scale"] < constants(places["quantized"])["x_scale"]


def test_the_price_on_a_cpu_is_not_told_where_the_command_line_names_a_target(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, line = [], "quantize {cnn} --config A8W8 --calib {samples} --force -o {out}"
    for target in ("", " --target npu"):
        caplog.clear()
        with caplog.at_level("INFO"):
            succeed(line + target, places, out=tmp_path / "out.onnx")
        told.append(any("layout for NPUs" in record.getMessage() for record in caplog.records))
    assert told == [True, False]


def test_the_target_ort_x64_runs_in_integers(places: dict[str, Path]) -> None:
    rows = inspect_fusion(places["x64"])
    assert len(rows) == 12 and all(row.integer for row in rows)


@pytest.mark.slow
def test_statistics_are_written_and_reused_without_data(places: dict[str, Path], tmp_path: Path) -> None:
    line = "quantize {cnn} --statistics {stats} --config {config} -o {out} "
    stats, data = tmp_path / "statistics.npz", f"--calib {places['samples']}"
    succeed(line + data, places, stats=stats, config=Path("A8W8"), out=tmp_path / "one.onnx")
    succeed(line, places, stats=stats, config=Path("INT8_OPENVINO"), out=tmp_path / "two.onnx")
    plain = "quantize {cnn} --config INT8_OPENVINO --calib {samples} -o {out}"
    succeed(plain, places, out=tmp_path / "plain.onnx")
    found, expected = (constants(tmp_path / name) for name in ("two.onnx", "plain.onnx"))
    assert list(found) == list(expected)
    # A percentile of a file's histograms differs in its last digit from one of the values as they come.
    assert all(np.allclose(found[name], expected[name], rtol=1e-6, atol=0) for name in found)


@pytest.mark.slow
def test_statistics_alone_correct_no_biases_and_say_so(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = "quantize {cnn} --statistics {stats} --config A8W8 -o {out} "
    stats = tmp_path / "statistics.npz"
    for name, data in (("one", f"--calib {places['samples']} --batch-size 1"), ("two", "")):
        caplog.clear()
        with caplog.at_level("INFO"):
            succeed(line + data, places, stats=stats, out=tmp_path / f"{name}.onnx")
        told = [record.getMessage() for record in caplog.records if "iases" in record.getMessage()]
        assert told and ("samples" in told[0]) == (name == "two")
    assert (tmp_path / "one.onnx").read_bytes() != (tmp_path / "two.onnx").read_bytes()


def test_an_existing_output_is_replaced_only_by_force(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out.onnx").write_text("old")
    line = "quantize {cnn} --config A8W8 --calib {samples} -o {out}"
    done = command(line, places, out=tmp_path / "out.onnx")
    assert done.code == 1 and "--force" in done.err and (tmp_path / "out.onnx").read_text() == "old"
    succeed(line + " --force", places, out=tmp_path / "out.onnx")
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_images_are_calibration_data(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    onnx.save(cnn(), tmp_path / "cnn.onnx")
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "images" / "0.png")
    line = f"quantize {tmp_path}/cnn.onnx --config A8W8 --calib {tmp_path}/images -o {tmp_path}/out.onnx"
    colours = ("--mean", "0.5", "--std", "0.1,0.2,0.4")
    larger = image.fromarray(pixels.repeat(2, 0).repeat(3, 1))
    larger.save(tmp_path / "images" / "0.png")
    done = quark(*line.split(), *colours)
    assert done.code == 1 and "32x48 pixels" in done.err and "--resize" in done.err
    done = quark(*line.split(), *colours, "--resize", "stretch")
    assert (done.code, done.err) == (0, "")
    pixels = np.asarray(larger.resize((16, 16), image.Resampling.BILINEAR))
    largest = np.abs((pixels / 255 - 0.5) / [0.1, 0.2, 0.4]).max()
    assert constants(tmp_path / "out.onnx")["x_scale"] == pytest.approx(largest / 127, rel=1e-5)


def test_the_page_explains_each_line_that_its_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path("docs/guide/onnx_algorithms.md").read_text(encoding="utf-8").split("### A log, line by line")[1]
    (command,) = re.findall(r"^`quark (.*)`$", page, re.M)
    table = page.split("| Line of the command |")[1].split("\n\n")[0]
    data = np.load("examples/models/digits_cnn/data.npz")
    np.savez(tmp_path / "samples.npz", image=(data["calibration_images"][:64] / 16).astype(np.float32))
    (tmp_path / "examples").symlink_to(Path("examples").absolute())
    monkeypatch.chdir(tmp_path)
    done = quark(*command.split())
    printed = {*done.log.replace("[QUARK-INFO]: ", "").splitlines(), *done.out.splitlines()}
    explained = set(re.findall(r"^\| `(.*?)` \|", table, re.M))
    elsewhere = {line for line in printed if line.startswith("This processor has no VNNI")}  # explained below the table
    assert done.code == 0 and "`This processor has no VNNI" in page
    kinds = [{re.sub(r"\d", "#", line) for line in lines if line} for lines in (explained, printed - elsewhere)]
    assert kinds[0] == kinds[1]


def test_a_recipe_says_how_images_were_read_where_a_file_beside_the_model_did(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    onnx.save(cnn(), tmp_path / "cnn.onnx")
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "images" / "0.png")
    said = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.3], "size": {"height": 16, "width": 16}}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**said, "do_flip_channel_order": True, "resample": 3}))
    line = f"quantize {tmp_path}/cnn.onnx --config A8W8 --calib {tmp_path}/images -o {tmp_path}/out.onnx"
    done = quark(*line.split(), "--write-recipe", f"{tmp_path}/recipe.yaml")
    assert done.code == 0 and "Images are read as BGR, 16x16 (stretch:16x16,filter=bicubic), CHW" in done.log
    data = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["data"]
    assert (data["mean"], data["resize"], data["colours"]) == ("0.4,0.5,0.6", "stretch:16x16,filter=bicubic", "bgr")
    file.unlink()
    again = quark("run", f"{tmp_path}/recipe.yaml", "-o", f"{tmp_path}/again.onnx")
    assert again.code == 0, again.err
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()


# evaluate. ------------------------------------------------------------------------------------------------------------


def cells(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


@pytest.mark.slow
def test_evaluate_shows_outputs_sizes_and_the_worst_layers(places: dict[str, Path]) -> None:
    rows = cells(succeed("evaluate {cnn} {x64} --data {samples} --layers 3", places))
    x, y = (np.concatenate([as_it_runs(places[name], feed) for feed in images()]) for name in ("cnn", "x64"))
    noise = np.sum((x - y) ** 2)
    expected = [np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y), np.sqrt(noise)]
    expected += [10 * np.log10(x.max() ** 2 / (noise / x.size)), 10 * np.log10(np.sum(x**2) / noise)]
    (output,) = [row for row in rows if row[0] == "y"]
    assert [float(cell) for cell in output[1:]] == pytest.approx(expected, rel=2e-4)
    for row, name in zip(rows[:2], ("cnn", "x64"), strict=True):
        assert float(row[1]) == pytest.approx(places[name].stat().st_size / 1e6, abs=0.005)
        assert float(row[2].split()[0]) > 0
    layers = rows[3:]
    assert len(layers) == 3 and [float(row[3]) for row in layers] == sorted(float(row[3]) for row in layers)


def as_it_runs(path: Path, feed: dict[str, Any]) -> Any:
    """The first output by the kernels of this processor, as the command has it: without VNNI their sums saturate."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0].astype(np.float64)


def inner(path: Path, name: str, feed: dict[str, Any]) -> Any:
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([name], feed)[0].astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantized", "x64"])
def test_the_damage_of_a_layer_is_that_of_its_tensor(name: str, places: dict[str, Path]) -> None:
    report = compare_models(places["cnn"], places[name], images(1), threads=1)
    layers = {layer.node: layer for layer in report.layers}
    (feed,) = images(1)
    # Where the Relu was dropped, the decoded tensor is that after the Relu of the float model.
    for node, before, after in (("last_conv_node", "last_norm", "last_norm"), ("sum_node", "sum", "sum")) if (
        name == "quantized"
    ) else (("stem_conv_node", "stem", "stem_norm"), ("sum_node", "block", "sum")):  # fmt: skip
        x = inner(places["cnn"], before, feed)
        made = {output for item in onnx.load(places[name]).graph.node for output in item.output}
        decoded = f"{after}_DequantizeLinear_Output"
        y = inner(places[name], decoded if decoded in made else after, feed)
        assert layers[node].tensor == before
        freedom = 1.0
        if (name, before) == ("quantized", "last_norm"):  # Equalized: up to a factor of each channel, and its mean.
            lines = [np.polyfit(y[:, i].ravel(), x[:, i].ravel(), 1)[0] for i in range(x.shape[1])]
            y, freedom = y * np.reshape(lines, (-1, 1, 1)), 1 - 2 * x.shape[1] / x.size
        noise = np.sum((x - y) ** 2) / freedom
        assert layers[node].sqnr == pytest.approx(10 * np.log10(np.sum(x**2) / noise), abs=1e-3)
        assert layers[node].sqnr > 20
    assert report.layers == sorted(report.layers, key=lambda layer: layer.sqnr)


@pytest.mark.slow
def test_evaluation_holds_one_sample(places: dict[str, Path]) -> None:
    seen: list[Any] = []

    def feeds() -> Iterator[dict[str, Any]]:
        for feed in images(6):
            gc.collect()
            assert sum(reference() is not None for reference in seen) <= 1
            array = feed.pop("x").copy()
            seen.append(weakref.ref(array))
            yield {"x": array}
            del array

    assert compare_models(places["cnn"], places["x64"], feeds(), limit=5).samples == 5 == len(seen)


def test_layers_that_break_are_the_worst(tmp_path: Path) -> None:
    def model(path: Path, op_type: str) -> Path:
        nodes = [
            helper.make_node("Neg", ["x"], ["n"], name="neg"),
            helper.make_node(op_type, ["n"], ["y"], name="last"),
        ]
        value, output = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y"))
        graph = helper.make_graph(nodes, "g", [value], [output])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path

    pair = model(tmp_path / "a.onnx", "Abs"), model(tmp_path / "b.onnx", "Sqrt")
    report = compare_models(*pair, [np.ones(4, np.float32)])
    assert [(layer.node, layer.sqnr) for layer in report.layers] == [("last", -np.inf), ("neg", np.inf)]


# inspect. -------------------------------------------------------------------------------------------------------------


def test_inspect_counts_what_is_in_the_file_and_what_is_fused(places: dict[str, Path]) -> None:
    out = succeed("inspect {quantized}", places)
    model = onnx.load(places["quantized"])
    counts = {kind: sum(node.op_type == kind for node in model.graph.node) for kind in ("QuantizeLinear", "Conv")}
    rows = {row[0]: row[1:] for row in cells(out)}
    assert rows["QuantizeLinear"] == ["com.microsoft", str(counts["QuantizeLinear"])] and rows["Conv"][1] == "6"
    assert rows["int8"][2] == str(counts["QuantizeLinear"]) and rows["int32"][2:] == ["", "7"]
    assert "ai.onnx 17, com.microsoft 1, IR 9, by quark.onnx" in out
    assert "5 of 12 quantized nodes in integers" in out and "stem_conv_node" in rows and "b_conv_node" not in rows
    assert "Integer and float parts, in the order of the graph" in out
    assert {row[1] for row in cells(out) if len(row) == 4} >= {"integer", "float, 1 quantized"}
    assert "12 of 12 quantized nodes" in succeed("inspect {x64}", places)
    assert "No node reads a DequantizeLinear" in succeed("inspect {cnn}", places)


def test_inspect_counts_constants_of_nodes_and_what_bodies_hold(places: dict[str, Path], tmp_path: Path) -> None:
    b = Builder()
    one = numpy_helper.from_array(np.ones((3, 5), np.float32), "one")
    b.nodes += [
        helper.make_node("Constant", [], ["w"], value=one),
        helper.make_node("Constant", [], ["sizes"], value_ints=[1, 2, 3]),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
    ]
    b.node("Mul", [b.node("MatMul", ["x", "w"], "product"), "two"], "y")
    flat = b.model({"x": ["n", 3]}, {"y": ["n", 5]})
    onnx.save(flat, tmp_path / "flat.onnx")
    onnx.save(in_branches(flat), tmp_path / "if.onnx")
    for name, times in (("flat", 1), ("if", 2)):
        rows = {row[0]: row[1:] for row in cells(succeed(f"inspect {tmp_path / name}.onnx", places))}
        assert rows["MatMul"] == ["ai.onnx", str(times)]
        assert rows["float"][0] == str(2 * times) and rows["int64"][0] == str(times)


# Bad input. -----------------------------------------------------------------------------------------------------------

QUANTIZE = "quantize {cnn} -o {out} "
BAD = {
    "output like a folder": ("quantize {cnn} --config A8W8 --calib {samples} -o {out}/", "ends like a folder"),
    "output is the data": ("quantize {cnn} --config A8W8 --calib {samples} --force -o {samples}", "which is read"),
    "an NPU without config": (QUANTIZE + "--calib {samples} --target npu", "Missing option --config"),
    "misspelled config": (QUANTIZE + "--config A8W7 --calib {samples}", "Did you mean 'A8W8'"),
    "scheme": (QUANTIZE + "--config A8W8 --calib {samples} --scheme int8", "--scheme does not apply to"),
    "device": (QUANTIZE + "--config A8W8 --calib {samples} --device cuda", "--device does not apply to"),
    "no data": (QUANTIZE + "--config A8W8", "--calib"),
    "batch size without data": (QUANTIZE + "--config BF16 --batch-size 4", "--batch-size describes the data"),
    "missing data": (QUANTIZE + "--config A8W8 --calib {missing}", "neither a folder nor a file"),
    "empty folder": (QUANTIZE + "--config A8W8 --calib {empty}", "holds no samples"),
    "text as data": (QUANTIZE + "--config A8W8 --calib {text}", "no data file"),
    "data of another shape": (
        QUANTIZE + "--config A8W8 --calib {vectors}",
        "'x' is float32 [1, 32]; the model expects x",
    ),
    "data of another type": (QUANTIZE + "--config A8W8 --calib {doubles}", "'x' is float64"),
    "misspelled exclude": (QUANTIZE + "--config A8W8 --calib {samples} --exclude y_nod", "y_node"),
    "target": (QUANTIZE + "--config A8W8 --calib {samples} --target ort_x46", "'ort_x64'"),
    "target of other types": (QUANTIZE + "--config A8W8 --calib {samples} --target ort_x64", "uint8 activations"),
    "mean without std": (QUANTIZE + "--config A8W8 --calib {samples} --mean 0.5", "belong together"),
    "mean of words": (QUANTIZE + "--config A8W8 --calib {samples} --mean half --std 1", "got 'half'"),
    "missing model": ("quantize {missing} --config A8W8 --calib {samples} -o {out}", "missing.onnx"),
    "broken model": ("quantize {broken} --config A8W8 --calib {samples} -o {out}", "not an ONNX model"),
    "quantized already": ("quantize {quantized} --config A8W8 --calib {samples} -o {out}", "quantized already"),
    "output is a folder": (
        "quantize {cnn} --config A8W8 --calib {samples} --force -o {empty}",
        "is a folder, and the output is a file",
    ),
    "output under a file": (
        "quantize {cnn} --config A8W8 --calib {samples} -o {text}/out.onnx",
        "text.txt is not a folder",
    ),
    "evaluate: no data": ("evaluate {cnn} {quantized}", "Missing option --data"),
    "evaluate: text": ("evaluate {cnn} {quantized} --data {samples} --text {text}", "--text does not apply"),
    "evaluate: another model": ("evaluate {mlp} {quantized} --data {vectors}", "differ in their inputs"),
    "evaluate: data of another shape": ("evaluate {cnn} {quantized} --data {vectors}", "the model expects x"),
    "evaluate: missing model": ("evaluate {cnn} {missing} --data {samples}", "is not a file"),
    "evaluate: broken model": ("evaluate {cnn} {broken} --data {samples}", "not an ONNX model"),
    "evaluate: folder": ("evaluate {cnn} {empty} --data {samples}", "is not a file"),
    "evaluate: no thread": ("evaluate {cnn} {quantized} --data {samples} --threads 0", "threads"),
    "inspect: missing": ("inspect {missing}", "is not a file"),
    "inspect: broken": ("inspect {broken}", "not an ONNX model"),
    "inspect: folder": ("inspect {empty}", "no config.json"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(line: str, message: str, places: dict[str, Path], tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in places["cnn"].parent.rglob("*")}
    done = command(line, places, out=tmp_path / "out.onnx")
    assert done.code in (1, 2)
    assert done.err.startswith("quark: ") and done.err.count("\n") == 1 and message in done.err, done.err
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in places["cnn"].parent.rglob("*")} == before


def test_a_sample_is_as_large_as_asked(places: dict[str, Path]) -> None:
    assert [len(f["x"]) for f in PathDataReader(places["cnn"], places["samples"], batch_size=5)] == [5, 5, 5, 1]


def test_outputs_whose_shape_follows_from_the_values_are_left_out(tmp_path: Path) -> None:
    """NonMaxSuppression, NonZero: one output may differ in length; the others are compared."""
    graph = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y, int64[r, m] found) { y = Mul(x, w)  found = NonZero(y) }""")
    paths = []
    for index, factor in enumerate(([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0])):
        model = onnx.ModelProto()
        model.CopyFrom(graph)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(factor, np.float32), "w"))
        paths.append(tmp_path / f"{index}.onnx")
        onnx.save(model, paths[-1])
    report = compare_models(paths[0], paths[1], [{"x": np.ones((2, 4), np.float32)}])
    assert list(report.outputs) == ["y"] and report.unlike == ("found",)
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    done = quark("evaluate", str(paths[0]), str(paths[1]), "--data", str(tmp_path / "x.npz"))
    assert done.code == 0 and "Not compared, as their shapes differ: found." in done.out


def test_mean_and_std_are_for_images(tmp_path: Path, places: dict[str, Path]) -> None:
    np.savez(tmp_path / "x.npz", x=images(1)[0]["x"])
    arguments = ("quantize", str(places["cnn"]), "--config", "A8W8", "--calib", str(tmp_path / "x.npz"))
    done = quark(*arguments, "--mean", "0.5", "--std", "0.5", "-o", str(tmp_path / "out.onnx"))
    assert done.code == 1 and "mean and std are for images" in done.err and not (tmp_path / "out.onnx").exists()


@pytest.mark.slow
def test_quantize_measures_into_the_profile_that_is_named(places: dict[str, Path], tmp_path: Path) -> None:
    """Its times decide: once they say that integers are slow, the same command finds nothing to quantize."""
    line = "quantize {cnn} --config U8S8_AAWS --target ort_x64 --calib {samples} --batch-size 4 -o {out} --force"
    profile = tmp_path / "profile.json"
    command(f"{line} --measure --profile {profile}", places, out=tmp_path / "q.onnx")
    content = json.loads(profile.read_text())
    assert any("QLinear" in name for name in content["kernels"])
    content["kernels"] = {name: float("QLinear" in name) for name in content["kernels"]}
    profile.write_text(json.dumps(content))
    done = command(f"{line} --measure --profile {profile}", places, out=tmp_path / "none.onnx")
    assert done.code == 1 and "No choice of integer kernels is faster than float" in done.err
    content["kernels"] = {name: float(":Conv(" in name) for name in content["kernels"]}
    profile.write_text(json.dumps(content))
    succeed(f"{line} --measure --profile {profile}", places, out=tmp_path / "all.onnx")
    succeed(f"{line} --no-measure", places, out=tmp_path / "rule.onnx")
    kernels = [[row.kernel for row in inspect_fusion(tmp_path / name)] for name in ("all.onnx", "rule.onnx")]
    assert kernels[0] == kernels[1] and "QLinearConv" in kernels[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--profile {out}.json", "--profile is the file of the times that --measure takes"),
        ("--measure", "the target is 'npu'"),
        ("--measure --target ort_x64 --config U8S8_AAWS --profile {broken}", "is no profile"),
    ],
)
def test_quantize_refuses_what_it_cannot_measure(
    places: dict[str, Path], tmp_path: Path, options: str, message: str
) -> None:
    config = "" if "--config" in options else "--config A8W8"
    line = f"quantize {{cnn}} {config} --calib {{samples}} --batch-size 4 -o {{out}} {options}"
    done = command(line, places, out=tmp_path / "q.onnx")
    assert done.code == 1 and message in done.err
    assert not (tmp_path / "q.onnx").exists()


@pytest.mark.slow
def test_times_of_this_machine_place_nothing_for_another(places: dict[str, Path], tmp_path: Path) -> None:
    """Without a configuration kernels are timed for the processor that runs the command, and for no other."""
    for target in {"ort_x64", "ort_arm64"} - {CPU_TARGET}:
        line = "quantize {cnn} --target {target} --calib {samples} --batch-size 4 --profile {out}.json -o {out}"
        done = command(line.replace("{target}", target), places, out=tmp_path / "q.onnx")
        assert done.code == 1 and "--profile is the file of the times that --measure takes" in done.err


@pytest.mark.slow
def test_a_model_that_is_one_if_has_its_weights_stored(tmp_path: Path) -> None:
    """Kernels of bodies are not timed, so that integers there could be slower than float."""
    onnx.save(in_branches(mlp()), tmp_path / "m.onnx")
    rows = np.concatenate([feed["x"] for feed in vectors()])
    np.savez(tmp_path / "x.npz", x=rows[: len(rows) // 2 * 2], yes=np.array(True))
    done = quark("quantize", tmp_path / "m.onnx", "--calib", tmp_path / "x.npz", "-o", tmp_path / "q.onnx")
    assert done.code == 0 and "\nINT8_CPU_WEIGHTS" in done.out, done.err
    assert (tmp_path / "q.onnx").stat().st_size < 0.6 * (tmp_path / "m.onnx").stat().st_size
    feed = {"x": vectors()[0]["x"], "yes": np.array(True)}
    found, expected = (run(onnx.load(tmp_path / name), feed) for name in ("q.onnx", "m.onnx"))
    assert np.allclose(found, expected, atol=0.1)


@pytest.mark.slow
def test_inspect_shows_the_times_of_the_quantized_nodes(places: dict[str, Path]) -> None:
    shown = succeed("inspect {x64} --measure --data {samples}", places)
    assert "gain" in shown and re.search(r"Kernels take [\d.]+ ms, of which conversions [\d.]+ ms", shown)
    assert command("inspect {x64} --data {samples}", places).code == 1
