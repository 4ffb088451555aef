"""The profile of scripts: its file, its steps, metrics of one's own, and that it costs nothing where nobody asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import quark.common.profiler as address
from quark.compat import profiler
from quark.compat.profiler import (
    CheckpointMetric,
    GlobalProfiler,
    MetricContext,
    ProfileStep,
    SummaryMetric,
    profile_scope,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(GlobalProfiler, "_instance", None)
    monkeypatch.setenv("QUARK_PROFILING", "1")
    monkeypatch.chdir(tmp_path)
    yield
    if GlobalProfiler._instance is not None:
        GlobalProfiler._instance.stop()


def steps(file: str) -> list[str]:
    return [record["step"] for record in yaml.safe_load(Path(file).read_text())["memory_usage"]]


def test_the_address_shows_the_profiler() -> None:
    assert address.GlobalProfiler is GlobalProfiler and address.ProfileStep is ProfileStep


def test_steps_are_written_as_they_come(tmp_path: Path) -> None:
    profile = GlobalProfiler(output_path="profile.yaml")
    assert GlobalProfiler() is profile
    with profile.scope(ProfileStep.MODEL_LOADING) as within:
        assert within is profile
        assert steps("profile.yaml") == ["Start", "Model Loading Start"], "before the step has ended"
    with pytest.raises(ValueError, match="of the user"), profile.scope(ProfileStep.USER_DEFINED, user_msg='My "own"'):
        raise ValueError("of the user")
    profile.stop()
    named = ["Model Loading Start", "Model Loading End", 'My "own" Start', 'My "own" End']
    assert steps("profile.yaml") == ["Start", *named, "End"]
    profile.stop()
    with profile.scope("after the end"):
        pass
    assert len(steps("profile.yaml")) == 6


def test_what_is_recorded() -> None:
    profile = GlobalProfiler("profile.yaml")
    with profile.scope("allocate"):
        kept = torch.ones(64 << 18)  # 64 MiB, touched
        Path("written").write_bytes(bytes(3 << 20))
    profile.stop()
    found = yaml.safe_load(Path("profile.yaml").read_text())
    start, before, after, end = found["memory_usage"]
    assert 0 <= before["relative_time_secs"] <= after["relative_time_secs"] <= end["relative_time_secs"]
    assert found["total_quantization_time_seconds"] >= end["relative_time_secs"]
    if sys.platform == "linux":
        assert kept.numel() and after["cpu_memory_mb"] - before["cpu_memory_mb"] > 60
        assert found["peak_memory_mb"] >= after["cpu_memory_mb"]
        assert start["disk_write_mb"] < 0.1 and after["disk_write_mb"] - before["disk_write_mb"] >= 3
        assert found["total_disk_write_mb"] >= after["disk_write_mb"]
    else:
        assert "disk_write_mb" not in after
    assert ("gpu_memory_mb" in after) == torch.cuda.is_available()


def test_metrics_of_ones_own() -> None:
    class Steps(CheckpointMetric):
        @property
        def name(self) -> str:
            return "letters"

        def get_definition(self) -> str:
            return "Letters of the name"

        def collect(self, context: MetricContext) -> float | None:
            return len(context.step_name) if context.step_name != "Start" else None

    class Last(SummaryMetric):
        @property
        def name(self) -> str:
            return "seconds_again"

        def get_definition(self) -> str:
            return "Seconds, again"

        def collect(self, context: MetricContext) -> float | None:
            return None if context.end_time is None else context.end_time - context.start_time

    profile = GlobalProfiler("profile.yaml")
    profile.checkpoint_metrics.append(Steps())
    profile.summary_metrics.append(Last())
    profile._checkpoint("abc")
    profile.stop()
    text = Path("profile.yaml").read_text()
    found = yaml.safe_load(text)
    assert [record.get("letters") for record in found["memory_usage"]] == [None, 3, 3]
    assert found["seconds_again"] == pytest.approx(found["total_quantization_time_seconds"], abs=0.1)
    assert "# - letters: Letters of the name" in text and "# - peak_memory_mb: " in text


def test_quantization_records_its_steps() -> None:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig

    spec = Int8PerTensorSpec(is_dynamic=False).to_quantization_spec()
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec)))
    quantizer.freeze(quantizer.quantize_model(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4)]))
    assert steps("quark_profile.yaml") == [
        "Start",
        "Model Quantization Start",
        "Calibration (Weights) Start",
        "Calibration (Weights) End",
        "Calibration (Forward) Start",
        "Calibration (Forward) End",
        "Model Quantization End",
        "Freeze Model Start",
        "Freeze Model End",
    ]


def test_without_the_variable_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARK_PROFILING")

    @profile_scope(ProfileStep.CALIBRATION)
    def add(x: int, *, y: int) -> int:
        return x + y

    assert add(1, y=2) == 3
    assert GlobalProfiler._instance is None
    with GlobalProfiler("profile.yaml").scope("a"):
        pass
    GlobalProfiler().stop()
    assert not list(Path.cwd().iterdir())


def test_a_profile_that_cannot_be_written_ends_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").write_text("a file")
    with GlobalProfiler("a/profile.yaml").scope("work"):
        done = True
    assert done
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "The profile cannot be written to" in lines[0]


@pytest.mark.slow
def test_the_end_of_the_process_ends_the_profile(tmp_path: Path) -> None:
    code = "from quark.common.profiler import GlobalProfiler; GlobalProfiler('p.yaml')"
    environment = {**os.environ, "PYTHONPATH": str(Path(profiler.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert steps("p.yaml") == ["Start", "End"]
