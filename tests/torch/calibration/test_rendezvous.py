"""Processes that come together: one that does not is said and named, and each has a GPU of its own."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as spawning

from quark.base.log import logger
from quark.errors import ConfigError, ProcessLostError
from quark.torch import ModelQuantizer
from quark.torch.calibration import distributed, rendezvous
from quark.torch.calibration.distributed import processes
from quark.torch.calibration.rendezvous import check_own_card, own_card, shared_card
from tests.pretended_gpu.gpu import PretendedGpu
from tests.torch.calibration.test_distributed import as_rank, configs, free_port, spawn_and_join_all, together

ONE, TWO = "host a 2", "host b 2"


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "whom"), [(0, "rank 1"), (1, "rank 0, which does not answer at 127.0.0.1:")], ids=["waits", "connects"]
)
def test_a_partner_that_does_not_come_is_said_and_named(rank: int, whom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_WORD", 0.2)
    environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    logger.addHandler(lines := Lines())
    monkeypatch.setattr(logger, "level", logging.ERROR)  # as it is on all processes of a command but the first
    begin = time.monotonic()
    try:
        with pytest.raises(ProcessLostError, match=f"Rank {rank} has waited 1.[0-9] s for {whom}"), processes(1):
            pass
    finally:
        logger.removeHandler(lines)
    assert time.monotonic() - begin < 5
    # After .2, .4 and .8 seconds.
    assert len(lines.text) == 3 and all(f"for {whom}" in text and "gives up after 1 s" in text for text in lines.text)


def late(folder: Path) -> None:
    """Rank 1 is at other work for longer than the others wait."""
    rendezvous.FIRST_WORD = 1.0
    logger.addHandler(lines := Lines())
    try:
        if os.environ["RANK"] == "1":
            time.sleep(8)
        distributed.wait()
    except ProcessLostError as error:
        (folder / f"rank {os.environ['RANK']}").write_text("\n".join([str(error), *lines.text]))
        raise


@pytest.mark.slow
def test_a_partner_that_comes_too_late_is_named_and_told(tmp_path: Path) -> None:
    with pytest.raises((spawning.ProcessExitedException, spawning.ProcessRaisedException)):
        spawn_and_join_all(late, tmp_path, 3, timeout=4.0)
    said = {rank: (tmp_path / f"rank {rank}").read_text().splitlines() for rank in range(3)}
    for rank in (0, 2):
        assert "for rank 1 (process " in said[rank][0] and "which is alive" in said[rank][0], said[rank]
    # Both wait equally long: the later one may hear of the other's end before its own.
    own = [said[rank][0] for rank in (0, 2) if " failed: " not in said[rank][0]]
    assert own, said
    assert own and all("--process-timeout" in text for text in own)
    assert said[1][0].startswith("Rank 1 cannot go on: rank ")
    # After one and two seconds, by the first of those that wait.
    assert [len(said[rank]) for rank in range(3)] == [3, 1, 1]
    assert all("Rank 0 has waited " in line and "for rank 1 (process " in line for line in said[0][1:])


def test_two_processes_on_one_card_are_named() -> None:
    assert shared_card(["", ""]) is None and shared_card([ONE, TWO]) is None
    assert shared_card([ONE, "other a 2"]) is None
    words = shared_card([ONE, TWO, ONE])
    assert words == "ranks 0, 2 would share one GPU, as there are 3 processes on host and 2 GPUs."
    with pytest.raises(ConfigError, match="ranks 0, 2 would share one GPU.*torchrun --nproc-per-node"):
        check_own_card(torch.device("cuda"), 0, words)
    check_own_card(torch.device("cpu"), 0, words)
    check_own_card(torch.device("cuda:1"), 1, None)
    with pytest.raises(ConfigError, match="cuda:0: each of several processes works on its own GPU, this one on cuda:1"):
        check_own_card(torch.device("cuda:0"), 1, None)


def test_a_process_takes_the_card_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {}
    for count in (1, 2):
        for rank in ("0", "1"):
            monkeypatch.setenv("LOCAL_RANK", rank)
            with PretendedGpu(count):
                cards[count, rank] = own_card()
    assert cards[1, "0"] == cards[1, "1"] and cards[2, "0"] != cards[2, "1"]


def as_rank_with_a_card(*arguments: Any) -> None:
    with PretendedGpu(1):
        as_rank(*arguments)


def on_one_card(folder: Path) -> None:
    """What is on a GPU is refused, and the CPU is not."""
    distributed.check_devices(["cpu"])
    with pytest.raises(ConfigError, match="ranks 0, 1 would share one GPU, as there are 2 processes on .* and 1 GPU"):
        ModelQuantizer(configs()["mxfp4"]).direct_quantize_checkpoint(folder, folder / "out", device="cuda")
    (folder / os.environ["RANK"]).touch()


@pytest.mark.slow
def test_fewer_cards_than_processes_are_said_before_any_work(tmp_path: Path) -> None:
    together(on_one_card, tmp_path, rank=as_rank_with_a_card)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
