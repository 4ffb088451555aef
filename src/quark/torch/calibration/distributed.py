"""Distributed calibration under torchrun: each process takes a part of the data, and what they saw is put together.

    torchrun --nproc-per-node 4 script.py       with `with processes(): ...` around the work in it

Minima, maxima and counts add up in any order, and floating sums are taken in the order of the data. So all ranks find
the scales and weights of one process, to the bit; rank 0 writes. Without a process group every function here is the
identity.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from quark.base.files import atomic_file, atomic_folder, remove_dead, scratch_folder
from quark.core.observers import Observer
from quark.errors import CalibrationError, ConfigError, OutputError, ProcessLostError, one_line
from quark.torch.calibration.heartbeat import Heartbeat
from quark.torch.calibration.rendezvous import Rendezvous, check_own_card, own_index, shared_card
from quark.torch.layers.fake_quant import FakeQuantize

T = TypeVar("T")


@contextmanager
def processes(timeout: float = 600.0, device: str = "cpu") -> Iterator[int]:
    """Within: the processes that torchrun started work together. Yields the rank; 0 where there is one process only.

    Args:
        timeout: Seconds after which a rank that waits for another gives up with an error: while they come together,
            and later. After ten seconds the log says for whom it waits.
        device: Where the work will run. A GPU is refused at once where processes would share one.

    Raises:
        ConfigError: `timeout` is not a positive number, the environment is not that of torchrun, or there are fewer
            GPUs than processes.
        ProcessLostError: Another process died, failed, did not come or could not be reached; names it.
    """
    global _group
    if not 0 < timeout < 1e6:
        raise ConfigError(f"timeout={timeout}: seconds are needed, more than 0 and less than a million.")
    if _in_environment("WORLD_SIZE", "1") == 1 or dist.is_initialized():
        yield rank()
        return
    group = _form_group(timeout)
    error: BaseException | None = None
    try:
        with _told_to_stop():
            check_devices([device])
            yield rank()
    except _ToldToStopError as stopped:
        error = stopped
        raise _lost("torchrun ended it") from None
    except BaseException as raised:
        error = raised
        raise
    finally:
        # An error that only says that another process is lost is told to none.
        echo = error is None or isinstance(error, (ProcessLostError, _ToldToStopError))
        group.heartbeat.stop(group.heartbeat.overdue if error is None or echo else one_line(error))
        _group = None
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Group:
    """The group that this process is in.

    Attributes:
        meeting: Where it came together.
        heartbeat: Who is alive in it.
        card: Number of this process's GPU; None where there are none.
        shared_card: Which processes would share a GPU, in words; None: none.
        before_nccl: Where the processes meet before they exchange what is on GPUs. NCCL does not let the host wait, so
            that one that does not come would be noticed anywhere, and by the end of the process. None without NCCL.
    """

    meeting: Rendezvous
    heartbeat: Heartbeat
    card: int | None
    shared_card: str | None
    before_nccl: Any = None


_group: _Group | None = None


class _ToldToStopError(BaseException):
    """SIGTERM came: torchrun sends it to the others when one process ends. No `except Exception` takes it."""


def _in_environment(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"The environment has {name}={text!r}, where torchrun sets a number. Possible: start the program by "
            "torchrun, or unset WORLD_SIZE."
        )
    return int(text)


def _form_group(timeout: float) -> _Group:
    """Join the process group of torchrun's environment, and begin to listen to its members."""
    global _group
    own, size = _in_environment("RANK"), _in_environment("WORLD_SIZE")
    _in_environment("MASTER_PORT")
    _in_environment("LOCAL_RANK", "0")
    if not os.environ.get("MASTER_ADDR") or own >= size:
        raise ConfigError(
            f"The environment has RANK={own}, WORLD_SIZE={size}, MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}. "
            "Possible: start the program by torchrun, which sets them."
        )
    meeting = Rendezvous(own, size, timeout)
    card = own_index() if torch.cuda.is_available() else None
    if card is not None:
        torch.cuda.set_device(card)
    cards = meeting.cards()
    group = _Group(meeting, Heartbeat(meeting), card, shared_card(cards))
    nccl, limit = all(cards) and group.shared_card is None, timedelta(seconds=timeout)
    try:
        group.heartbeat.start()
        store = dist.PrefixStore("group", meeting.store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=limit)
        _group = replace(group, before_nccl=dist.new_group(backend="gloo", timeout=limit) if nccl else None)
        wait()
    except (RuntimeError, ValueError) as error:
        group.heartbeat.stop(None)
        _group = None
        if dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(error, ProcessLostError):
            raise
        raise ProcessLostError(
            f"Rank {own} reached all {size} processes ({', '.join(meeting.names)}), which cannot exchange anything: "
            f"{_first_sentence(error)}. Possible: GLOO_SOCKET_IFNAME, the network between them."
        ) from error
    return _group


def check_devices(devices: Iterable[torch.device | str]) -> None:
    """Raise ConfigError for a GPU that is not this process's own, where several work together."""
    if _group is not None:
        for device in {*map(torch.device, devices)}:
            check_own_card(device, _group.card or 0, _group.shared_card)


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Within: SIGTERM ends the work by an error, so that what is half written is removed."""

    def stop(*_: object) -> None:
        raise _ToldToStopError

    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lost(why: str, waited: float = 0.0) -> ProcessLostError:
    """The error for a group that is no longer whole; names who left, or for whom it has waited for so many seconds."""
    reason = _group.heartbeat.reason(waited) if _group is not None else "another process is gone"
    return ProcessLostError(f"Rank {rank()} cannot go on: {reason} ({why}). Start all processes again.")


def check_alive() -> None:
    """Raise ProcessLostError where another process has been silent for long; costs nothing."""
    if _group is not None and _group.heartbeat.lost():
        raise _lost("seen while this one worked")


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
        other.restore({key: _on_device_of(value, observer.low) for key, value in state.items()})
        other.model_dtype = dtype
        total.merge(other)
    return total


def _on_device_of(value: Any, like: Any) -> Any:
    """A tensor from another rank, on the device of this one's."""
    both = isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)
    return value.to(like.device) if both else value


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks; in place."""
    if world() > 1:
        collective(lambda: dist.all_reduce(x))
    return x


def in_order(
    own: Iterable[torch.Tensor],
    load: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    device: torch.device | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the tensors of all ranks, one for each of their batches, in the order of the data; on each of the ranks.

    One tensor is in memory beside the rank's own, which `load` brings there. Batch i of the data is that of rank i
    modulo `world()`, see `part_of`.

    Args:
        own: Those of this rank.
        load: Brings one to memory.
        device: Where it comes; default: where they are.
        numbers: Which batches of this rank they are of; None: all.
    """
    if world() == 1:
        yield from map(load, own)
        return
    here = list(own)
    shapes: list[list[tuple[int, torch.Size]]] = [[] for _ in range(world())]
    own_shapes = [(n, x.shape) for n, x in zip(numbers or range(len(here)), here, strict=True)]
    collective(lambda: dist.all_gather_object(shapes, own_shapes))
    order = sorted((n, owner, place) for owner, of in enumerate(shapes) for place, (n, _) in enumerate(of))
    for _, owner, place in order:
        mine = owner == rank()
        x = load(here[place]).contiguous() if mine else here[0].new_empty(shapes[owner][place][1], device=device)
        if x.numel():
            collective(partial(dist.broadcast, x, owner))
        yield x


def from_owner(x: torch.Tensor, owner: int) -> None:
    """Give a tensor the values that it has on one rank; in place."""
    if world() > 1:
        data = x.contiguous()
        collective(lambda: dist.broadcast(data, owner))
        x.copy_(data)


_turn = 0
"""Which rank takes the first piece of the next work: what is over falls to each in turn."""


def shared_work(count: int, work: Callable[[int], T], device: torch.device) -> Iterator[T]:
    """`work(i)` for each i below `count`, in order; each is done by one rank and given to all.

    Args:
        count: Pieces of work. They must not depend on how many ranks there are, for the bits may.
        work: Returns tensors, or dataclasses, lists and tuples of them.
        device: Where the results are wanted.
    """
    global _turn
    if world() == 1:
        yield from map(work, range(count))
        return
    cpu, first = torch.device("cpu"), _turn
    _turn = (first + count) % world()
    for begin in range(0, count, world()):
        own = begin + (rank() - first) % world()
        done = moved(work(own), cpu) if own < count else None
        for piece in range(min(world(), count - begin)):
            owner = (first + piece) % world()
            box = [done if owner == rank() else None]
            collective(partial(dist.broadcast_object_list, box, owner))
            yield moved(box[0], device)


def shared_parts(parts: Sequence[torch.Tensor], fill: Callable[[int], object]) -> None:
    """`fill(i)` for each i, which fills `parts[i]` in place; each is filled by one rank and given to all."""
    owners = [owner_of(index) for index in range(len(parts))]
    for index, owner in enumerate(owners):
        if owner == rank():
            fill(index)
    for part, owner in zip(parts, owners, strict=True):
        from_owner(part, owner)


def owner_of(index: int) -> int:
    """Which rank takes a part: there and back again, for parts that are each a little less work than the one before."""
    place = index % (2 * world())
    return min(place, 2 * world() - 1 - place)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, or dataclasses, lists and tuples of them, on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        tensors = {field.name: moved(getattr(value, field.name), device) for field in fields(value) if field.init}
        return replace(value, **tensors)
    return value


def largest(x: torch.Tensor) -> torch.Tensor:
    """The maximum over all ranks; in place."""
    if world() > 1:
        collective(lambda: dist.all_reduce(x, dist.ReduceOp.MAX))
    return x


def broadcast_from_first(module: nn.Module) -> None:
    """Give the tensors of a module the values that they have on rank 0: rounding must not make ranks drift apart."""
    for tensor in module.state_dict(keep_vars=True).values() if world() > 1 else ():
        from_owner(tensor.detach(), 0)


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
    """Return the `value` of rank 0."""
    if world() == 1:
        return value
    box = [value]
    collective(lambda: dist.broadcast_object_list(box, 0))
    return box[0]


@contextmanager
def shared_output(
    path: str | os.PathLike[str], overwrite: bool = False, is_file: bool = False, anything: bool = False
) -> Iterator[Path]:
    """`atomic_folder` or `atomic_file` for all ranks, on a file system that all of them see: it becomes `path` when all
    are done.

    Raises:
        OutputError: A rank does not see the folder that rank 0 made; names it. Or see `atomic_folder`.
        ProcessLostError: Rank 0 could not make it, or another process is lost.
    """
    if rank() > 0:
        made: Path | None = from_first(None)
        if made is None:
            raise ProcessLostError(f"Rank {rank()} cannot go on: rank 0 could not make {path}.")
        _require_seen(made.parent)
        try:
            yield made
            wait()
            wait()  # rank 0 gives it its name
        except (ProcessLostError, OSError) as error:
            # Rank 0, as it ends, removes what the ranks write, file by file: the folder may still be there.
            gone = isinstance(error, FileNotFoundError) and Path(error.filename or "").is_relative_to(made.parent)
            if isinstance(error, OSError) and not gone and made.parent.is_dir():
                raise OutputError(f"Rank {rank()} could not write {path}: {error.strerror or error}.") from error
            remove_dead(made.parents[1])  # rank 0 would have, were it alive
            raise error if isinstance(error, ProcessLostError) else _lost(f"{made} is gone") from error
        return
    told = False
    try:
        with atomic_file(path, overwrite) if is_file else atomic_folder(path, overwrite, anything) as made:
            from_first(made)
            told = True
            _require_seen(made.parent)
            yield made
            wait()
        wait()
    finally:
        if not told:
            from_first(None)


def require_shared(folder: Path) -> None:
    """Raise OutputError on all ranks where one of them does not see what rank 0 makes in a folder, or would make there.

    Each machine may have a folder of that name: so rank 0 makes one in it that no other has.
    """
    if world() == 1:
        return
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    with scratch_folder(there) if rank() == 0 else nullcontext() as made:
        _require_seen(from_first(made or there))


def _require_seen(folder: Path) -> None:
    """Raise OutputError on all ranks where one of them does not see a folder that rank 0 has made."""
    if world() == 1:
        return
    sees: list[bool] = [False] * world()
    own = folder.is_dir()
    collective(lambda: dist.all_gather_object(sees, own))
    blind = [str(other) for other, seen in enumerate(sees) if not seen]
    if blind:
        raise OutputError(
            f"Rank {', '.join(blind)} does not see {folder}, which rank 0 made. The output must lie on a file system "
            "that all machines share, under the same name."
        )


def collective(action: Callable[[], object]) -> None:
    """Run a collective operation. Raises ProcessLostError when another rank has died or does not answer in time."""
    check_alive()
    begin = time.monotonic()
    try:
        with nullcontext() if _group is None else _group.heartbeat.waiting():
            if _group is not None and _group.before_nccl is not None:
                dist.barrier(_group.before_nccl)
            action()
    except (RuntimeError, ValueError) as error:
        raise _lost(_first_sentence(error), time.monotonic() - begin) from error


def _first_sentence(error: Exception) -> str:
    """The first sentence of a communication library, without the place in its source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
