"""The memory of a device: what is free, an error that names what filled it, and smaller batches in the place of large.

A batch of several samples is halved until it fits, from the beginning: what algorithms have summed up of a block that
ran out of memory is gone with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from quark.base.log import logger
from quark.base.memory_and_disk import asked_bytes, is_out_of_memory
from quark.errors import TooLittleMemoryError
from quark.torch.calibration.distributed import world

T = TypeVar("T")
HELPS = (
    "shorter samples (--length), other programs off the device, another algorithm, or the CPU (--device cpu), which "
    "has the memory of the host"
)


def free_on(device: torch.device) -> int | None:
    """Bytes that are free on a GPU; None of other devices."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def check_device(device: torch.device, needed: int, what: str, possible: str) -> None:
    """Raise TooLittleMemoryError where `needed` bytes are more than a GPU has free.

    Args:
        device: Any; of others than GPUs nothing is said.
        needed: The least that the job can do with.
        what: What takes them.
        possible: What to do, a sentence without its first word.
    """
    free = free_on(device)
    if free is not None and needed > free:
        raise TooLittleMemoryError(
            f"{what} takes at least {needed / 1e9:.2f} GB on {device}, and {free / 1e9:.2f} GB are free there. "
            f"Possible: {possible}."
        )


@contextmanager
def naming_what_fills(block: str, device: torch.device | None) -> Iterator[None]:
    """Within: a GPU that is full becomes an error that says in which block, how much was asked for, and what helps."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        asked, free = asked_bytes(error), None if device is None else free_on(device)
        raise TooLittleMemoryError(
            f"{block or 'The model'}: {device or 'the device'} is full"
            f"{f', {asked} more were needed' if asked else ''}"
            f"{f' and {free / 1e9:.2f} GB are free' if free is not None else ''}. Possible: {HELPS}."
        ) from error


def with_smaller_batches(run: Callable[[list[Any] | None], T], data: list[Any] | None) -> T:
    """Return the result of a run on batches: where a device is full, on halves of the batches, down to one sample each.

    Args:
        run: Takes the batches; it leaves nothing where it fails.
        data: Batches of tensors with a row for each sample, or mappings of such; others are not parted.

    Raises:
        TooLittleMemoryError: Batches of one sample do not fit, or several processes work together.
    """
    while True:
        try:
            return run(data)
        except (TooLittleMemoryError, torch.OutOfMemoryError) as error:
            # The others of several processes go on with their own batches, and would wait for this one.
            parted = halves_of(data) if data is not None and world() == 1 and filled_a_device(error) else None
            if parted is None or data is None:
                raise
            logger.info(
                "The device is full: trying again with %d smaller batches instead of %d.", len(parted), len(data)
            )
            data = parted
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def filled_a_device(error: BaseException) -> bool:
    """Return True where an error comes from a device that was full; else nothing has run yet, or the host was full."""
    return any(isinstance(each, RuntimeError) and is_out_of_memory(each) for each in (error, error.__cause__))


def halves_of(data: list[Any]) -> list[Any] | None:
    """Batches of half as many samples; None where one cannot be parted, or all are single samples."""
    parted: list[Any] = []
    for batch in data:
        tensors = (
            [batch] if isinstance(batch, torch.Tensor) else [*batch.values()] if isinstance(batch, Mapping) else []
        )
        rows = {len(x) for x in tensors if isinstance(x, torch.Tensor) and x.ndim}
        if len(rows) != 1 or not all(isinstance(x, torch.Tensor) and x.ndim for x in tensors):
            return None
        half = -(-rows.pop() // 2)
        if isinstance(batch, torch.Tensor):
            parted += torch.split(batch, half)
        else:
            pieces = {key: torch.split(x, half) for key, x in batch.items()}
            parted += [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)]
    return parted if len(parted) > len(data) else None
