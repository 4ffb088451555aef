"""The clock of a search moves with what this process does."""

from __future__ import annotations

import time

import pytest

from quark.onnx.calibration.data import own_time as module
from quark.onnx.calibration.data.own_time import OwnClock


def test_waiting_takes_no_time_and_threads_take_no_more_than_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, own = [0.0], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(module.time, "process_time", lambda: own[0])
    clock = OwnClock()
    for seconds, processor, expected in ((10.0, 1.0, 1.0), (2.0, 2.0, 3.0), (1.0, 8.0, 4.0)):
        wall[0] += seconds
        own[0] += processor
        assert clock() == pytest.approx(expected)


def test_sleep_is_time_of_others() -> None:
    clock = OwnClock()
    time.sleep(0.05)
    assert clock() < 0.04
