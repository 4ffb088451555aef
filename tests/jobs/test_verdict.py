"""The verdict at the end of a job: its word, its data, its bounds, and calibration where nobody asked for it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import quark
from quark.errors import ConfigError, DamageError
from quark.goals.efforts import DEFAULT_TEXT, HELD_OUT_TEXT
from quark.jobs import resolve
from quark.jobs.folders.compared import job_verdict, measure
from quark.jobs.folders.compared.verdict import (
    KL_BOUNDS,
    SQNR_BOUNDS,
    WORDS,
    Gates,
    ModelVerdict,
    word_of_kl,
    word_of_sqnr,
)
from quark.jobs.kinds import kind_of
from quark.jobs.request import FolderRequest, request_of
from quark.jobs.run_folder import FolderResult
from quark.torch.flows import effort_costs
from tests.commands.program import quark as command
from tests.models.model_folders import model_folder
from tests.models.torch_zoo import LANGUAGE_MODEL

INT8 = {"scheme": "int8_wo", "verdict": True}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict by two windows."""
    monkeypatch.setattr(job_verdict, "MOST", 2)


def made(output: Path, **said: Any) -> FolderResult:
    job = resolve(request_of(LANGUAGE_MODEL, {"output": str(output), **said}))
    return kind_of(job).run(job)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bounds", "word_of", "sign"), [(KL_BOUNDS, word_of_kl, 1), (SQNR_BOUNDS, word_of_sqnr, -1)])
def test_a_word_begins_behind_the_bound_of_the_word_before(bounds: Any, word_of: Any, sign: int) -> None:
    assert [word_of(bound) for bound in bounds] == list(WORDS[:-1])
    assert [word_of(bound + sign * 1e-9) for bound in bounds] == list(WORDS[1:])
    assert word_of(math.nan) == WORDS[-1]


def test_a_job_says_what_it_cost_on_text_that_nothing_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = made(tmp_path / "out", scheme="int8_wo", verdict=True)
    verdict = result.verdict
    assert verdict is not None and verdict.held_out and verdict.word == "unnoticeable"
    measured: Any = quark.evaluate(
        LANGUAGE_MODEL, result.path, data=HELD_OUT_TEXT, length=512, windows=job_verdict.MOST
    )
    assert (verdict.kl, verdict.perplexity) == (measured.comparison.kl, measured.comparison.perplexity)
    assert f"Verdict: {verdict}" in caplog.messages
    assert f"{verdict.kl:.4g} nats" in (result.path / "README.md").read_text()


def test_what_calibration_did_not_read_is_held_out(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(HELD_OUT_TEXT.read_text()[:24000])
    said = {"scheme": "fp8", "calib": text, "samples": 2, "length": 128, "verdict": True}
    rest, none_left = made(tmp_path / "a", **said), made(tmp_path / "b", **said | {"samples": 512})
    assert rest.verdict is not None and str(text) in rest.verdict.data and rest.verdict.held_out
    assert none_left.verdict is not None and "the package's held-out text" in none_left.verdict.data


def test_a_verdict_that_takes_too_long_is_not_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(job_verdict, "BY_DEFAULT", True)
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: 1e6)
    assert made(tmp_path / "out", scheme="int8_wo").verdict is None
    assert "No verdict: it would take about" in caplog.text
    assert made(tmp_path / "none", scheme="int8_wo", verdict=False).verdict is None


def test_a_job_that_is_done_stays_so_where_its_verdict_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(job_verdict, "BY_DEFAULT", True)

    def fail(*_: Any) -> None:
        raise RuntimeError("an odd class")

    monkeypatch.setattr(measure, "compare_outputs", fail)
    result = made(tmp_path / "out", scheme="int8_wo")
    assert result.verdict is None and "No verdict: an odd class." in caplog.text
    with pytest.raises(RuntimeError, match="an odd class"):  # asked for, it is an error
        made(tmp_path / "asked", scheme="int8_wo", verdict=True)


@pytest.mark.parametrize("name", ["mixtral", "sentence_encoder"])
def test_other_models_get_a_verdict_too(name: str, tmp_path: Path) -> None:
    job = resolve(request_of(model_folder(name, tmp_path / "float"), {"output": str(tmp_path / "out"), **INT8}))
    verdict = kind_of(job).run(job).verdict  # type: ignore[arg-type]
    assert verdict is not None and verdict.word == "unnoticeable" and (verdict.kl is None) == (name != "mixtral")


def test_outside_of_a_bound_nothing_is_written_or_it_is_kept_by_request(tmp_path: Path) -> None:
    before = tmp_path / "out"
    before.mkdir()
    (before / "config.json").write_text("{}")
    with pytest.raises(DamageError, match=r"max_kl=1e-09 .*Nothing was written"):
        quark.quantize(LANGUAGE_MODEL, "mxfp4", output=before, overwrite=True, max_kl=1e-9)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
    with pytest.raises(DamageError, match="was kept"):
        quark.quantize(LANGUAGE_MODEL, "mxfp4", output=tmp_path / "kept", min_agreement=100, keep_anyway=True)
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    quark.quantize(LANGUAGE_MODEL, "int8_wo", output=before, overwrite=True, max_kl=1.0, max_perplexity=50)
    assert (before / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]


def test_bounds_are_compared_each_with_its_figure() -> None:
    verdict = ModelVerdict(0.1, (10.0, 11.0), 0.9, 20.0)
    kept: dict[str, Any] = {"max_kl": 0.1, "max_perplexity": 10.01, "min_agreement": 0.9}
    broken: dict[str, Any] = {"max_kl": 0.0999, "max_perplexity": 9.99, "min_agreement": 90.1}
    Gates.of(FolderRequest(model=Path(), **kept)).check(verdict)
    for name, bound in broken.items():
        with pytest.raises(DamageError, match=name.replace("_", "-")):
            Gates.of(FolderRequest(model=Path(), **{name: bound})).check(verdict)
    with pytest.raises(ConfigError, match="is no share"):
        Gates.of(FolderRequest(model=Path(), min_agreement=101.0))
    with pytest.raises(ConfigError, match="for causal language models"):
        Gates(kl=1.0).require(False, nn.Linear.__name__)


def test_a_goal_calibrates_where_there_is_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: 1e15)
    said = {"goal": "vllm", "samples": 2, "length": 64}
    result = made(tmp_path / "out", **said)
    assert result.job.algorithms and result.job.calibration.path == DEFAULT_TEXT
    recipe = yaml.safe_load((result.path / "quark_recipe.yaml").read_text())
    assert recipe["effort"] == "balanced" and "calib" in recipe["made_with"]
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: 1e6)
    nearest = made(tmp_path / "nearest", goal="vllm")
    assert not nearest.job.algorithms and "To nearest: calibrating (--effort balanced) would take about" in caplog.text
    assert yaml.safe_load((nearest.path / "quark_recipe.yaml").read_text())["effort"] == "fast"
    # 4-bit floats with inputs lose too much to nearest: what takes a moment is done.
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: 1e9)
    equal = made(tmp_path / "equal", goal="vllm", scheme="mxfp4")
    assert [*equal.job.algorithms] == ["equalize"] and "Equalized and to nearest: solving too" in caplog.text
    recipe = yaml.safe_load((equal.path / "quark_recipe.yaml").read_text())
    assert (recipe["effort"], recipe["algorithms"]) == ("fast", ["equalize"])
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: 1e6)
    assert made(tmp_path / "asked", **said).job.algorithms  # who names samples wants them read
    assert not made(tmp_path / "fast", goal="vllm", effort="fast").job.algorithms


def test_bounds_hold_where_models_are_measured(tmp_path: Path) -> None:
    """`quark evaluate`, `quark compare`, and what a recipe says of its evaluation."""
    folder, text = quark.quantize(LANGUAGE_MODEL, "int8_wo", output=tmp_path / "out"), tmp_path / "text.txt"
    text.write_text(HELD_OUT_TEXT.read_text()[:9000])
    few: dict[str, Any] = {"length": 64, "windows": 2}
    quark.evaluate(LANGUAGE_MODEL, folder, data=text, max_kl=0.5, min_agreement=0.5, **few)
    with pytest.raises(DamageError, match="max_kl=1e-09"):
        quark.evaluate(LANGUAGE_MODEL, folder, data=text, max_kl=1e-9, **few)
    with pytest.raises(DamageError, match=r"1 of 2 schemes are outside of bounds. mxfp4: max_kl=0.01 "):
        quark.compare(LANGUAGE_MODEL, "int8_wo,mxfp4", data=text, max_kl=0.01, **few)
    recipe = tmp_path / "recipe.yaml"
    said = {"model": str(LANGUAGE_MODEL), "scheme": "mxfp4", "evaluation": {"max_kl": 1e-9}}
    recipe.write_text(yaml.safe_dump({"recipe": 1, **said}))
    done = command("run", recipe, "-o", tmp_path / "none")
    assert done.code == 1 and "--max-kl 1e-09" in done.err
    assert not (tmp_path / "none").exists()
