"""The documented comparison of result folders: its numbers, its spellings, and what it refuses."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from quark.compat.onnx_tools.compare_folders import compare_folders


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Three results of a float model, and noisier ones from file to file."""
    float_results, results = tmp_path / "float results", tmp_path / "results"
    random = np.random.default_rng(0)
    for folder in (float_results, results):
        folder.mkdir()
    for index in range(3):
        x = random.normal(size=(2, 50)).astype(np.float32)
        np.save(float_results / f"{index}.npy", x)
        np.save(results / f"{index}.npy", x + random.normal(size=x.shape).astype(np.float32) * (index + 1) / 100)
    return float_results, results


def program(*arguments: object, spelling: str = "quark.onnx.tools.evaluate") -> int | str | None:
    """Run the program in this process; its exit code."""
    before, sys.argv = sys.argv, ["evaluate", *map(str, arguments)]
    try:
        sys.modules.pop("quark.onnx.tools.evaluate.py", None)
        runpy.run_module(spelling, run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("spelling", ["quark.onnx.tools.evaluate", "quark.onnx.tools.evaluate.py"])
@pytest.mark.parametrize("flags", [True, False])
def test_mean_and_worst_of_each_metric(
    spelling: str, flags: bool, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--baseline_results_folder", "--quantized_results_folder")
    arguments = [part for pair in zip(names, folders, strict=True) for part in pair] if flags else folders
    assert program(*arguments, spelling=spelling) == 0
    found = [re.findall(r"-?\d+\.\d+", line) for line in capsys.readouterr().out.splitlines() if "npy" in line]
    pairs = [tuple(np.load(folder / f"{i}.npy").astype(np.float64).ravel() for folder in folders) for i in range(3)]
    cosines = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs]
    distances = [np.linalg.norm(x - y) for x, y in pairs]
    peaks = [20 * np.log10(np.abs(x).max()) - 10 * np.log10(np.mean((x - y) ** 2)) for x, y in pairs]
    expected = [[np.mean(cosines), min(cosines)], [np.mean(distances), max(distances)], [np.mean(peaks), min(peaks)]]
    np.testing.assert_allclose(np.array(found, float), expected, rtol=1e-5)


def test_images_are_compared_by_their_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 250, (8, 9, 3), np.uint8)
    for folder, shift in (("a", 0), ("b", 5)):
        (tmp_path / folder).mkdir()
        image.fromarray(pixels + np.uint8(shift)).save(tmp_path / folder / "colour.png")
        image.fromarray(pixels[..., 0] + np.uint8(shift)).save(tmp_path / folder / "grey.png")
        image.fromarray(np.full((16, 16, 3), 100 + shift, np.uint8)).save(tmp_path / folder / "flat.jpg", quality=100)
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert set(found) == {"colour.png", "grey.png", "flat.jpg"}
    assert found["colour.png"].l2 == pytest.approx(5 * np.sqrt(pixels.size))
    assert found["grey.png"].count == 72 and found["flat.jpg"].noise == pytest.approx(25 * 768, rel=0.1)


def test_bad_folders_and_command_lines_are_one_line(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = folders
    cases = {
        "--baseline_results": ("--baseline_results", good, "--quantized_results_folder", other),
        "Two folders are needed": (good,),
        "Two folders": (good, other, "--baseline_results_folder", good),
        "is not a folder": (good, good / "absent"),
        "lacks 1 files": (good, other),
        "holds no results": (good, good.parent / "empty"),
        "0.npy has the shape [2, 50]": (good, good.parent / "shape"),
        "0.npy is not an .npy file": (good, good.parent / "broken"),
        "0.npy holds <U1, not numbers": (good, good.parent / "words"),
    }
    (other / "2.npy").unlink()
    for name in ("empty", "shape", "broken", "words"):
        (good.parent / name).mkdir()
    for name in ("0", "1", "2"):
        np.save(good.parent / "shape" / f"{name}.npy", np.zeros(3))
        np.save(good.parent / "words" / f"{name}.npy", np.array(["a"]))
        (good.parent / "broken" / f"{name}.npy").write_text("no array")
    for message, arguments in cases.items():
        assert program(*arguments) == (2 if message == "--baseline_results" else 1)
        err = capsys.readouterr().err
        assert err.startswith("quark: ") and err.count("\n") == 1 and message in err, err
