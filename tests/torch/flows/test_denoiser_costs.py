"""What a quantized denoiser costs by timestep, restated by hand on a denoiser of one layer; and the page of it."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.metrics import sqnr
from quark.errors import CalibrationError, ConfigError
from quark.one_call import quantize
from quark.torch import compare_denoisers
from quark.torch.calibration.timesteps import buckets_of, ranges_by_timestep


class Denoiser(nn.Module):
    """Of which the middle layer reads what grows with the timestep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(sample) * timestep)
        return self.last(hidden / timestep)  # type: ignore[no-any-return]


class Pipeline:
    def __init__(self) -> None:
        self.transformer = Denoiser()

    def __call__(self, prompt: list[str], generator: torch.Generator, steps: int = 4) -> list[torch.Tensor]:
        x = torch.randn(1, 64, generator=generator)
        for step in range(steps):
            x = x - 0.1 * self.transformer(x, timestep=torch.tensor(float(steps - step)))
        return list(x.reshape(1, 8, 8))


def batches(*times: float) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"sample": torch.randn(4, 64, generator=generator), "timestep": torch.tensor(time)} for time in times]


@torch.no_grad()
def test_errors_and_ranges_are_those_of_each_timestep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline()
    model, data = pipeline.transformer, batches(1.0, 10.0, 80.0, 100.0)
    with caplog.at_level(logging.WARNING):
        quantized = quantize(copy.deepcopy(model), "int8", data=data, algorithm=())
    # 1 and 10 are of the last quarter from 1 to 100, 80 and 100 of the first.
    assert "1 of 3 static ranges differ 4-fold or more between timesteps (most: middle.input" in caplog.text
    assert "at 80 to 100" in caplog.text and "at 1 to 10" in caplog.text
    costs = compare_denoisers(pipeline, quantized, data, ["a cat"], page=tmp_path / "page.html")
    assert pipeline.transformer is model
    found = {str(bucket): value for bucket, value in costs.by_timestep.rows(4)}
    pairs = [torch.cat([m(**b) for b in data[part]]) for part in (slice(2, 4), slice(2)) for m in (model, quantized)]
    assert found == {
        "80 to 100": pytest.approx(sqnr(pairs[0], pairs[1])), "1 to 10": pytest.approx(sqnr(pairs[2], pairs[3]))
    }  # fmt: skip
    assert found["80 to 100"] > found["1 to 10"] + 10
    assert costs.sqnr == pytest.approx(sqnr(*(torch.cat([m(**b) for b in data]) for m in (model, quantized))))
    _, ranges = ranges_by_timestep(model, ["first", "middle"], data).buckets()
    reads = [
        [float((model.first(b["sample"]) * b["timestep"]).abs().max()) for b in data[part]]
        for part in (slice(2, 4), slice(2))
    ]
    assert ranges[0].name == "middle" and ranges[0].largest == pytest.approx([max(each) for each in reads])
    assert not any(module._forward_pre_hooks for module in model.modules())
    (name, (first, second)), *_ = costs.pictures.items()
    assert name == "['a cat'] (0)" and first.shape == second.shape == (1, 8, 8)
    assert costs.picture_sqnr == pytest.approx(sqnr(first, second)) and sqnr(first, second) > 20
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 3
    assert all(title in page for title in ("Error by timestep", "Ranges by timestep", "Pictures", "a cat"))


def test_a_model_without_timesteps_is_not_looked_at() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    found = ranges_by_timestep(model, ["0"], [torch.ones(2, 8), 100 * torch.ones(2, 8)])
    assert found.buckets() == ([], []) and not found.largest


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ([3.0], ["3"]),
        ([0.5, 0.5], ["0.5"]),
        ([1000.0, 750.0, 500.0, 250.0, 0.0], ["1000", "750", "500", "0 to 250"]),
        ([2.0, 1.0], ["2", "1"]),
    ],
)
def test_buckets_are_equal_parts_and_none_is_empty(times: list[float], found: list[str]) -> None:
    buckets, numbers = buckets_of(times)
    assert [str(bucket) for bucket in buckets] == found
    assert all(buckets[n].low <= time <= buckets[n].high for n, time in zip(numbers, times, strict=True))


def test_nothing_to_compare_on_is_refused() -> None:
    pipeline = Pipeline()
    with pytest.raises(ConfigError, match="nothing to compare on"):
        compare_denoisers(pipeline, pipeline.transformer)
    other = nn.Linear(64, 3)
    other.forward = lambda sample, timestep: sample[:, :3]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="differ in shape"):
        compare_denoisers(pipeline, other, batches(1.0))
    wrong = [{**batches(1.0)[0], "sample": torch.zeros(1, 7)}]
    with pytest.raises(CalibrationError, match=r"does not take batch 0, dict \(sample: float32 \(1, 7\)"):
        compare_denoisers(pipeline, other, wrong)
