"""Batches of a block on a GPU wait in pinned host memory: the same values, the memory of the device free, no wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.torch.algorithms.pass_store import PassStore
from quark.torch.calibration import work_device
from quark.torch.calibration.work_device import Offload, Recorded, WorkDevice
from quark.torch.model.blocks import Call
from tests.pretended_gpu import PretendedGpu, on_host

CUDA = torch.device("cuda:0")
SIZE = 64 * 32 * 4


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as made:
        yield made


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def offload(room: int = 0) -> Offload:
    return Offload([], WorkDevice(CUDA, room, True))


def spilled(lot: Offload, *batches: list[torch.Tensor]) -> list[Any]:
    """Batches that halt one after the other, and one more, so that all of them have moved."""
    halts = [lot.spill(batch)[0] for batch in batches]
    lot.spill([])
    return halts


def test_memory_is_free_while_a_batch_waits_and_its_values_come_back(gpu: PretendedGpu) -> None:
    lot, x = offload(), drawn(0)
    turned, part, before = x.T, x.T[3:], on_host(x).clone()
    alive = gpu.meter.alive()
    gpu.meter.reset()
    (halt,) = spilled(lot, [turned])
    assert gpu.meter.alive() == alive - SIZE
    with pytest.raises(RuntimeError):
        _ = x + 1
    assert torch.equal(on_host(lot.load(x)), before) and torch.equal(on_host(lot.load(part)), before.T[3:])
    lot.bring_back(halt)
    assert torch.equal(on_host(x), before) and torch.equal(on_host(turned), before.T) and lot.load(x) is x
    assert not gpu.meter.waits and not gpu.meter.uploads


def test_batches_stay_as_far_as_there_is_room(gpu: PretendedGpu) -> None:
    lot, batches = offload(2 * SIZE), [[drawn(seed)] for seed in range(4)]
    alive = gpu.meter.alive()
    halts = spilled(lot, *batches)
    assert gpu.meter.alive() == alive - 2 * SIZE and [bool(halt.moved) for halt in halts] == [False, False, True, True]
    for halt in halts:
        lot.bring_back(halt)
    assert gpu.meter.alive() == alive
    assert [bool(halt.moved) for halt in spilled(lot, *batches)] == [
        False,
        False,
        True,
        True,
    ]  # the room is there again


def test_what_two_batches_hold_stays(gpu: PretendedGpu) -> None:
    lot, table = offload(), drawn(0)
    first, second = spilled(lot, [drawn(1), table[2:]], [drawn(2), table[4:]])
    assert len(first.moved) == len(second.moved) == 1 and torch.isfinite(on_host(table)).all()


def test_what_takes_the_place_of_an_input_waits_on_the_host(gpu: PretendedGpu) -> None:
    lot, x = offload(), drawn(0)
    assert lot.leave(x) is x  # all are there
    spilled(lot, [drawn(1)])
    left = lot.leave(x.T)
    assert left.device.type == "cpu" and left.is_pinned() and torch.equal(on_host(lot.load(left)), on_host(x).T)


def test_calls_wait_on_the_host_beyond_the_bound(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * 2 + mask

    mask = torch.ones(32)
    calls = [Call((on_host(drawn(seed)),), {"mask": mask}) for seed in range(3)]
    for bound, on_host_then in ((work_device.COPIES * (3 * SIZE + 128), False), (work_device.COPIES * 3 * SIZE, True)):
        monkeypatch.setattr(work_device, "ON_DEVICE", bound)
        where = WorkDevice.of(CUDA, work_device.bytes_of(calls))
        assert where.on_host is on_host_then and where.room == (bound if on_host_then else 0)
        recorded = [Recorded(CUDA)(call, {}) for call in calls]
        gpu.meter.reset()
        waiting = where.calls(recorded)
        assert {call.hidden.device.type for call in waiting} == {"cpu" if on_host_then else "cuda"}
        assert not on_host_then or waiting[0].hidden.is_pinned()
        given = [call.run(Double()) for call in waiting]
        assert all(torch.equal(on_host(y), call.hidden * 2 + 1) for y, call in zip(given, calls, strict=True))
        assert not gpu.meter.uploads and not gpu.meter.waits


def test_calls_of_a_model_on_the_device_are_recorded_within_the_bound(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_device, "ON_DEVICE", work_device.COPIES * 2 * SIZE)
    keep = Recorded(None)
    kept = [keep(Call((drawn(seed),), {}), {}) for seed in range(4)]
    assert [call.hidden.device.type for call in kept] == ["cuda", "cuda", "cpu", "cpu"]
    shared: dict[int, Any] = {}
    x = drawn(5)
    both = [keep(Call((x,), {}), shared), keep(Call((x,), {}), shared)]
    assert both[0].hidden is both[1].hidden and both[0].hidden.is_pinned()


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_kept_of_a_pass_has_come_to_the_host(gpu: PretendedGpu, tmp_path: Path, on_disk: bool) -> None:
    store, x = PassStore(tmp_path if on_disk else None, {}), drawn(0)
    before = on_host(x).clone()
    store.keep("x", [x])
    x.zero_()
    assert torch.equal(store.read("x")[0], before)
