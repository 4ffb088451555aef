"""Distributed calibration under torchrun: each process takes a part of the data, and what they saw is put together.

    torchrun --nproc-per-node 4 script.py       with `with processes(): ...` around the work in it

Minima and maxima, counts and sums of second moments add up to those of one process. So all ranks find the same scales
and solve the same weights; rank 0 writes. Without a process group every function here is the identity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from quark.core.observers import Observer
from quark.errors import CalibrationError, QuarkError
from quark.files import atomic_folder
from quark.torch.layers.fake_quant import FakeQuantize

T = TypeVar("T")


@contextmanager
def processes(timeout: float = 600.0) -> Iterator[int]:
    """Within: the processes that torchrun started work together. Yields the rank; 0 where there is one process only.

    Args:
        timeout: Seconds after which a rank that waits for another gives up with an error.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield rank()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield rank()
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process among those that work together."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def part_of(data: Iterable[Any]) -> Iterable[Any]:
    """The batches of this rank: every `world()`-th.

    Raises:
        CalibrationError: There are fewer batches than processes.
    """
    if world() == 1:
        return data
    batches = list(data)
    if 0 < len(batches) < world():
        raise CalibrationError(f"{len(batches)} calibration batches are too few for {world()} processes: one each.")
    return batches[rank() :: world()]


def merge_observers(quantizers: Mapping[str, FakeQuantize]) -> None:
    """Give every observing quantizer what the observers of all ranks saw."""
    if world() == 1 or not quantizers:
        return
    observed = {}
    for name, quantizer in quantizers.items():
        observer = quantizer.observer
        if observer is not None and observer.count:
            observed[name] = (observer.state(), observer.model_dtype)
    gathered: list[dict[str, Any]] = [{} for _ in range(world())]
    collective(lambda: dist.all_gather_object(gathered, observed))
    for name, quantizer in quantizers.items():
        observer = quantizer.observer
        assert observer is not None
        quantizer.observer = _merged(observer, [states[name] for states in gathered if name in states])


def _merged(observer: Observer, states: Iterable[tuple[Mapping[str, Any], str]]) -> Observer:
    total = type(observer)(observer.spec)
    for state, dtype in states:
        other = type(observer)(observer.spec)
        other.restore({key: _beside(value, observer.low) for key, value in state.items()})
        other.model_dtype = dtype
        total.merge(other)
    return total


def _beside(value: Any, like: Any) -> Any:
    """A tensor from another rank, on the device of this one's."""
    both = isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)
    return value.to(like.device) if both else value


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks; in place."""
    if world() > 1:
        collective(lambda: dist.all_reduce(x))
    return x


def largest(x: torch.Tensor) -> torch.Tensor:
    """The maximum over all ranks; in place."""
    if world() > 1:
        collective(lambda: dist.all_reduce(x, dist.ReduceOp.MAX))
    return x


def broadcast_from_first(module: nn.Module) -> None:
    """Give the tensors of a module the values that they have on rank 0: rounding must not make ranks drift apart."""
    for tensor in module.state_dict(keep_vars=True).values() if world() > 1 else ():
        data = tensor.detach().contiguous()
        collective(partial(dist.broadcast, data, 0))
        tensor.detach().copy_(data)


def first_then_all(action: Callable[[bool], T]) -> T:
    """Run `action(True)` on rank 0 and, when that is done, `action(False)` on the others."""
    if rank() == 0:
        result = action(True)
        wait()
        return result
    wait()
    return action(False)


def wait() -> None:
    """Go on when all ranks are here."""
    if world() > 1:
        collective(dist.barrier)


def from_first(value: T) -> T:
    """What rank 0 calls `value`."""
    if world() == 1:
        return value
    box = [value]
    collective(lambda: dist.broadcast_object_list(box, 0))
    return box[0]


@contextmanager
def shared_folder(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """`atomic_folder` for all ranks: it becomes `path` when all of them are done."""
    if rank() > 0:
        folder_of_first = from_first(None)
        if folder_of_first is None:
            raise QuarkError(f"Rank 0 could not make {path}.")
        yield folder_of_first
        wait()
        return
    told = False
    try:
        with atomic_folder(path, overwrite) as folder:
            from_first(folder)
            told = True
            yield folder
            wait()
    finally:
        if not told:
            from_first(None)


def collective(action: Callable[[], object]) -> None:
    """Run a collective operation. Raises QuarkError when another rank has died or does not answer in time."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise QuarkError(
            f"Rank {rank()} lost another process of its group, which died or did not answer in time: {first}"
        ) from error
