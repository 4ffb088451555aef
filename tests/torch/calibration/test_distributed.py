"""Several gloo processes: the bytes of one, and an error that names the one that dies."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as spawning
from safetensors.torch import save_file

from quark.errors import (
    CalibrationError,
    ConfigError,
    NotSupportedError,
    OutputError,
    ProcessLostError,
    QuarkError,
)
from quark.torch import LLMTemplate, ModelQuantizer, QuantFlow, export_safetensors
from quark.torch.algorithms import input_group
from quark.torch.algorithms.rounding import gptq
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.calibration import distributed
from quark.torch.calibration.distributed import processes
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.sources.origins import Origin
from quark.torch.checkpoint.sources.source import Source
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
)
from quark.torch.config.config import QConfig
from quark.torch.flows import file2file
from quark.torch.flows.from_disk import stream
from quark.torch.flows.resume import Manifest
from quark.torch.writers.folder import FolderTarget
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.torch.flows.test_file2file import contents, save_float

TIMEOUT = 20.0


def configs() -> dict[str, QConfig]:
    template = LLMTemplate.get("auto")
    uint4 = template.get_config("uint4_wo_32")
    return {
        "int8": template.get_config("int8"),
        "gptq": replace(uint4, algo_config=[GPTQConfig()]),
        "awq": replace(uint4, algo_config=[AWQConfig()]),
        "gptaq": replace(uint4, algo_config=[GPTAQConfig()]),
        "qronos": replace(uint4, algo_config=[QronosConfig()]),
        "fisher": replace(uint4, algo_config=[QronosConfig(fisher=True)]),
        "cache": replace(
            LLMTemplate.get("llama").get_config("uint4_wo_32", kv_cache_scheme="fp8", attention_scheme="fp8"),
            algo_config=[GPTQConfig()],
            kv_cache_post_rope=True,
        ),
        "mxfp4": template.get_config("mxfp4"),
        "in awq": replace(uint4, algo_config=[AWQConfig()]),
        "in gptq": replace(uint4, algo_config=[GPTQConfig()]),
        "in compressed-tensors": replace(template.get_config("int4_wo_32"), algo_config=[QronosConfig()]),
        "in fp8": template.get_config("fp8"),
    }


CALIBRATED = ("int8", "gptq", "awq", "gptaq", "qronos", "fisher", "cache")
STREAMED = ("int8", "gptq", "cache")
FORMS = {form: f"in {form}" for form in ("awq", "gptq", "compressed-tensors", "fp8")}
"""Format -> the config whose result is streamed to a folder of it."""


def as_rank(
    rank: int, port: int, work: Callable[[Path], None], folder: Path, count: int, timeout: float = TIMEOUT
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    with processes(timeout) as own:
        assert own == rank
        work(folder)


def started(
    work: Callable[[Path], None],
    folder: Path,
    count: int,
    timeout: float = TIMEOUT,
    rank: Callable[..., None] = as_rank,
) -> Any:
    """Processes that run `work` as those of torchrun do, forked from one that has imported all where that can be."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":  # its first module puts this checkout before an installed one
        multiprocessing.set_forkserver_preload(["tests.conftest", __name__, "transformers.models.llama.modeling_llama"])
    arguments = (free_port(), work, folder, count, timeout)
    return spawning.start_processes(rank, arguments, nprocs=count, join=False, start_method=method)


def together(work: Callable[[Path], None], folder: Path, count: int = 2, **options: Any) -> None:
    """Run `work` in several processes, which are stopped when one of them ends with an error."""
    context = started(work, folder, count, **options)
    while not context.join():
        pass


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def everything(folder: Path) -> None:
    """Each flow once; rank 0 writes. Tiles of moments and pieces of rows are small, so that each rank has some."""
    input_group.TILE, gptq.ELEMENTS, gptq.LEAST_ROWS = 64, 1 << 12, 32
    data, own = token_batches(5), folder / str(distributed.world())
    for name in CALIBRATED:
        model = ModelQuantizer(configs()[name]).quantize_model(tiny_llama(), data)
        export_safetensors(model, own / name)
    for name in STREAMED:
        stream(configs()[name], OpenedFolder(folder / "float"), own / f"{name}-streamed", data)
    for form, name in FORMS.items():
        stream(configs()[name], OpenedFolder(folder / "float"), own / f"{form}-form", data, target=FolderTarget(form))
    ModelQuantizer(configs()["mxfp4"]).direct_quantize_checkpoint(folder / "float", own / "files")
    table = measure_sensitivity(tiny_llama(), data, ["uint4_wo_32", "int8_wo"])
    if distributed.rank() == 0:
        table.save(own / "table.json")


@pytest.mark.slow
def test_processes_give_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_group, "TILE", input_group.TILE)  # set back at the end
    monkeypatch.setattr(gptq, "ELEMENTS", gptq.ELEMENTS)
    monkeypatch.setattr(gptq, "LEAST_ROWS", gptq.LEAST_ROWS)
    save_float(tmp_path / "float", torch.float32, "5GB")
    with one_thread():
        everything(tmp_path)
    one = tmp_path / "1"
    made = sorted(path.name for path in one.iterdir())
    assert made == sorted(
        [
            *CALIBRATED,
            *(f"{name}-streamed" for name in STREAMED),
            *(f"{form}-form" for form in FORMS),
            "files",
            "table.json",
        ]
    )
    together(everything, tmp_path, 3)
    several = tmp_path / "3"
    assert sorted(path.name for path in several.iterdir()) == made
    for name in made:
        if name == "table.json":
            assert (several / name).read_bytes() == (one / name).read_bytes()
        else:
            assert contents(several / name) == contents(one / name), name


def in_awq(folder: Path, output: str = "out") -> None:
    source, target = OpenedFolder(folder / "float"), FolderTarget("awq")
    stream(configs()["awq"], source, folder / output, token_batches(4), target=target)


def dying(folder: Path) -> None:
    """Rank 1 ends without a word after the first block; rank 0 must not wait for ever."""
    finish = Manifest.finish

    def then_die(self: Manifest, *args: Any) -> None:
        finish(self, *args)
        if os.environ["RANK"] == "1":
            os._exit(3)

    Manifest.finish = then_die  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        in_awq(folder)
    except QuarkError as error:
        (folder / "said").write_text(f"{time.monotonic() - start}\n{error}")
        sys.exit(4)


@pytest.mark.slow
def test_the_same_call_goes_on_after_a_rank_that_dies(tmp_path: Path) -> None:
    save_float(tmp_path / "float", torch.float32, "5GB")
    with pytest.raises(spawning.ProcessExitedException):
        spawn_and_join_all(dying, tmp_path)
    seconds, said = (tmp_path / "said").read_text().split("\n", 1)
    assert float(seconds) < 2 * TIMEOUT and "Rank 0 cannot go on: rank 1 (process " in said
    assert not (tmp_path / "out").exists()
    # The manifest is good: it says what is there, and the inputs of the next block are there for both ranks.
    partial = tmp_path / "out.partial"
    settings = json.loads((partial / "manifest.json").read_text())["settings"]
    manifest = Manifest.open(partial, settings)
    assert manifest.begun and manifest.state().done == 1
    inputs = sorted(path.name for path in partial.glob("inputs-1*"))
    assert inputs == [f"inputs-1-{rank}.safetensors" for rank in (0, 1)]
    together(in_awq, tmp_path)
    with one_thread():
        in_awq(tmp_path, "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@contextmanager
def one_thread() -> Iterator[None]:
    """Within: as in the processes, as sums of several threads are other ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def spawn_and_join_all(work: Callable[[Path], None], folder: Path, count: int = 2, **options: Any) -> None:
    """Like `together`, but the survivors are not stopped when one dies."""
    context = started(work, folder, count, **options)
    for process in context.processes:
        process.join(3 * TIMEOUT)
    while not context.join():
        pass


def in_files(folder: Path) -> None:
    """File to file; rank `victim` is killed with its first tensor, or finds that its disk is full."""
    victim, how = (folder / "victim").read_text().split()
    convert = file2file.Converter.__call__

    def stop(self: file2file.Converter, family: file2file.Family) -> None:
        if os.environ["RANK"] != victim:
            convert(self, family)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(errno.ENOSPC, "No space left on device")

    file2file.Converter.__call__ = stop  # type: ignore[method-assign]
    try:
        ModelQuantizer(configs()["mxfp4"]).direct_quantize_checkpoint(folder / "float", folder / "out")
    except QuarkError as error:
        (folder / f"said-{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_rank_that_ends_is_named_by_the_others_and_nothing_stays(victim: int, how: str, tmp_path: Path) -> None:
    save_float(tmp_path / "float", torch.float32, "5GB")
    (tmp_path / "victim").write_text(f"{victim} {how}")
    with pytest.raises((spawning.ProcessExitedException, spawning.ProcessRaisedException)):
        spawn_and_join_all(in_files, tmp_path, 3)
    said = {rank: tmp_path / f"said-{rank}" for rank in range(3)}
    assert said[victim].exists() == (how == "full")
    for rank in {0, 1, 2} - {victim}:
        words = said[rank].read_text()
        assert words.startswith(f"ProcessLostError: Rank {rank} cannot go on: rank {victim} (process ")
        assert ("No space left on device" if how == "full" else "died or can no longer be reached") in words
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["float", "victim", *(path.name for path in said.values() if path.exists())]
    )


def hidden_folder(folder: Path) -> None:
    """Rank 1 is on a machine with a file system of its own, which has a folder of the same name."""
    own, is_dir = folder / os.environ["RANK"], Path.is_dir
    own.mkdir()
    if os.environ["RANK"] == "1":
        Path.is_dir = lambda self: is_dir(Path(str(self).replace(f"{folder}/0", f"{own}")))  # type: ignore[method-assign]
    message = r"Rank 1 does not see .*, which rank 0 made\. The output must lie on"
    with pytest.raises(OutputError, match=message), distributed.shared_output(folder / "0" / "out"):
        raise AssertionError
    with pytest.raises(OutputError, match=message):
        stream(configs()["int8"], OpenedFolder(folder / "float"), folder / "0" / "out", token_batches(2))
    own.rmdir()


@pytest.mark.slow
def test_an_output_that_not_all_see(tmp_path: Path) -> None:
    save_float(tmp_path / "float", torch.float32, "5GB")
    together(hidden_folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.parametrize(
    ("environment", "timeout", "message"),
    [
        ({"WORLD_SIZE": "two"}, 5, "WORLD_SIZE='two', where torchrun sets a number"),
        ({"WORLD_SIZE": "2"}, 5, "RANK=None, where torchrun sets a number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, 5, "RANK=2, WORLD_SIZE=2"),
        ({}, -1, "timeout=-1: seconds are needed"),
        ({}, float("nan"), "timeout=nan: seconds are needed"),
    ],
)
def test_an_environment_that_is_not_of_torchrun(
    environment: dict[str, str], timeout: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), processes(timeout):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_shares_of_a_checkpoint_hold_each_tensor_once_and_alike_many_bytes(size: int, tmp_path: Path) -> None:
    names = [f"t{i:02}" for i in range(40)]
    save_file({name: torch.zeros(i + 1, 8) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    families = [
        (file2file.TensorJob(name, Origin((name,)), torch.float32, (i + 1, 8), None, {}),)
        for i, name in enumerate(names)
    ]
    source = Source([tmp_path / "model.safetensors"])
    shares = [file2file._share(families, source, own, size) for own in range(size)]
    assert [family for share in shares for family in share] == families
    rows = [sum(item.shape[0] for family in share for item in family) for share in shares]
    assert max(rows) - min(rows) <= 40  # the largest tensor


def test_fewer_batches_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world", lambda: 4)
    with pytest.raises(CalibrationError, match="3 calibration batches are too few for 4 processes"):
        distributed.part_of(token_batches(3))


@pytest.mark.slow
@pytest.mark.parametrize("flow", [QuantFlow.standard, QuantFlow.per_block])
@pytest.mark.parametrize("algorithm", [AutoRoundConfig(), AutoSmoothQuantConfig()])
def test_algorithms_that_would_see_a_part_of_the_data(
    algorithm: AlgoConfig, flow: QuantFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark.torch.algorithms import block_sweep as sweep

    monkeypatch.setattr(sweep, "world", lambda: 2)
    config = replace(LLMTemplate.get("auto").get_config("uint4_wo_32"), algo_config=[algorithm], quant_flow=flow)
    with pytest.raises(NotSupportedError, match="needs all calibration data in one process, of which there are 2"):
        ModelQuantizer(config).quantize_model(tiny_llama(), token_batches(2))


def test_work_and_data_are_shared_among_the_ranks_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 1 of 3 sees it, whose messages never leave it."""
    sent = list[str]()

    class Group:
        barrier = staticmethod(lambda: sent.append("barrier"))
        is_initialized = staticmethod(lambda: True)
        get_rank = staticmethod(lambda: 1)
        get_world_size = staticmethod(lambda: 3)

        @staticmethod
        def broadcast_object_list(box: list[Any], owner: int) -> None:
            sent.append(f"from {owner}")
            box[0] = f"of rank {owner}" if owner != 1 else box[0]

    monkeypatch.setattr(distributed, "dist", Group)
    monkeypatch.setattr(distributed, "_turn", 0)
    monkeypatch.setattr(distributed, "collective", lambda action: action())
    assert (distributed.rank(), distributed.world()) == (1, 3)
    assert list(distributed.part_of(range(7))) == [1, 4]
    assert distributed.from_first("own") == "of rank 0"
    done = distributed.shared_work(4, lambda index: f"work {index}", torch.device("cpu"))
    assert list(done) == ["of rank 0", "work 1", "of rank 2", "of rank 0"]
    assert sent == ["from 0", "from 0", "from 1", "from 2", "from 0"]
    # What was over fell to rank 0: the next one is first now.
    assert list(distributed.shared_work(1, lambda index: f"work {index}", torch.device("cpu"))) == ["work 0"]
    sent.clear()
    # The others begin when the first one is done.
    assert distributed.first_then_all(lambda first: (first, len(sent))) == (False, 1)


@pytest.mark.parametrize(
    ("number", "raised", "message"),
    [
        (errno.ENOENT, ProcessLostError, "another process is gone"),
        (errno.ENOSPC, OutputError, "Rank 1 could not write"),
    ],
)
def test_a_folder_that_another_rank_removes_is_no_error_of_this_one(
    number: int, raised: type[QuarkError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files go before it does."""
    made = tmp_path / "temporary" / "out"
    made.mkdir(parents=True)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "from_first", lambda value: made)
    with pytest.raises(raised, match=message), distributed.shared_output(tmp_path / "out"):
        raise OSError(number, os.strerror(number), str(made / "model.safetensors"))
