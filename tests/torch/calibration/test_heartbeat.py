"""The store of a group ends with the process that keeps it: not before all have heard which one failed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch.distributed as dist

from quark.torch.calibration.heartbeat import Heartbeat


class Gone:
    """A store that went with its process."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError("Connection closed by peer")


def test_the_process_that_keeps_the_store_goes_when_all_have_heard_of_a_failure() -> None:
    store, names = dist.HashStore(), [f"process {rank} on host" for rank in range(3)]
    members = [
        Heartbeat(
            SimpleNamespace(rank=rank, world=3, timeout=20, names=names, keeps=rank == 0, connection=lambda: store)  # type: ignore[arg-type]
        )
        for rank in range(3)
    ]
    starting = [threading.Thread(target=member.start) for member in members]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    members[2].stop("No space left on device")
    assert "rank 2 (process 2 on host) failed: No space" in members[0].reason()
    members[0].stop(None)
    members[1].store = Gone()
    assert members[1].reason() == "rank 2 (process 2 on host) failed: No space left on device"
    members[1].stop(None)
