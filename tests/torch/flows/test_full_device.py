"""A device that is full: said before the work, smaller batches first, then the block that did not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from quark.base import command_line
from quark.core.kernels.trust import Trust
from quark.errors import TooLittleMemoryError
from quark.torch import LLMTemplate
from quark.torch.algorithms import GPTQConfig
from quark.torch.calibration import device_memory
from quark.torch.calibration.device_memory import halves_of
from quark.torch.flows.from_disk import stream
from tests.models.torch_zoo import tiny_llama
from tests.pretended_gpu import PretendedGpu

BATCH = torch.randint(0, 64, (8, 512), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "llama"
    tiny_llama(num_hidden_layers=1, max_position_embeddings=512).save_pretrained(out)
    return out


def streamed(folder: Path, out: Path, data: list[torch.Tensor], most: int | None = None, memory: int = 80 << 30) -> int:
    """Quantize by GPTQ on a pretended device. Returns the most bytes that were there at once."""
    config = LLMTemplate.get("auto").get_config("uint4_wo_32", [GPTQConfig()])
    with PretendedGpu(where=False, memory=memory, most=most) as gpu:
        before = gpu.meter.alive()
        stream(config, folder, out, data, device="cuda")
        return gpu.meter.peak() - before


@pytest.mark.slow
def test_smaller_batches_are_tried_where_a_device_is_full(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halves = [*BATCH.split(4)]
    # In the first run kernels are tried, which takes memory, too.
    _, large = (streamed(folder, tmp_path / name, data) for name, data in (("s", halves), ("l", [BATCH])))
    with caplog.at_level(logging.INFO, "quark"):
        streamed(folder, tmp_path / "again", [BATCH], most=large - 1)
    assert "The device is full: trying again with 2 smaller batches instead of 1." in caplog.text
    for file in (tmp_path / "s").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert {path.name for path in tmp_path.iterdir()} == {"l", "s", "again"}


def test_a_block_that_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TooLittleMemoryError, match=r"model\.layers\.0: cuda.* is full, .* more were needed.*--length"):
        streamed(folder, tmp_path / "out", [BATCH[:1]], most=200_000)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(TooLittleMemoryError, match=r"The block model\.layers\.0 with its solver takes at least"):
        streamed(folder, tmp_path / "out", [BATCH[:1]], memory=50_000)
    assert not [*tmp_path.iterdir()]


def test_batches_are_halved_down_to_one_sample() -> None:
    mapping = {"input_ids": torch.zeros(3, 2), "attention_mask": torch.ones(3, 2)}
    parted = halves_of([mapping])
    assert parted is not None and [len(each["input_ids"]) for each in parted] == [2, 1]
    for whole in ([torch.zeros(1, 5)], [(torch.zeros(4, 2),)], [{"x": torch.zeros(4), "y": torch.zeros(2)}]):
        assert halves_of(whole) is None


def test_a_kernel_is_not_blamed_for_a_full_device(caplog: pytest.LogCaptureFixture) -> None:
    trust, done = Trust("try", "Slowly."), list[str]()

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def plain() -> None:
        done.append("plain")

    trust.run("gpu", (1,), full, plain, lambda: (lambda: torch.tensor(True), lambda: done.append("undone")))
    trust.run("gpu", (1,), full, plain, full)  # type: ignore[arg-type]
    assert done == ["undone", "plain", "plain"] and not trust.refused and not trust.passed and not caplog.text


def test_the_line_of_a_program_says_what_helps() -> None:
    trust = Trust("try", "Slowly.")
    trust.passed.add(("gpu", (1,)))

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")

    with pytest.raises(torch.OutOfMemoryError) as error:
        trust.run("gpu", (1,), full, full, full)  # type: ignore[arg-type]
    line = command_line._unexpected(error.value, False)
    assert "2.00 GiB were asked for" in line and "--stream" in line and "report it" not in line


def test_one_of_several_processes_does_not_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(batches: list[torch.Tensor] | None) -> None:
        assert batches is not None
        tried.append(len(batches))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    for count, expected in ((1, [1, 2, 4]), (2, [1])):
        tried: list[int] = []
        monkeypatch.setattr(device_memory, "world", lambda count=count: count)
        with pytest.raises(torch.OutOfMemoryError):
            device_memory.with_smaller_batches(full, [torch.zeros(4, 8)])
        assert tried == expected
