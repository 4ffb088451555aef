"""Calibration data as users have it, checked batch by batch as it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.base.log import logger
from quark.core.checks import naming, read
from quark.core.scales import TINY
from quark.errors import CalibrationError, QuarkError, one_line
from quark.torch.model.calibration_data.model_arguments import ModelArguments, positional_parameters
from quark.torch.model.calibration_data.unpadding import nothing_masked, unpadded

TARGETS = frozenset({"label", "labels", "target", "targets", "y"})
"""The names of the argument of a forward that takes the labels of a sample."""


def calibration_data(model: nn.Module, data: Iterable[Any] | None) -> Batches | None:
    """The batches, checked as they are read.

    Args:
        model: What takes them.
        data: An iterable of batches; None where there is none.

    Raises:
        CalibrationError: It is one batch, or nothing that has batches.
    """
    if data is None:
        return None
    kind = type(data).__name__
    if isinstance(data, (torch.Tensor, np.ndarray, Mapping)) or hasattr(data, "keys"):
        raise CalibrationError(
            f"The calibration data is a {kind}, which is one batch: pass a list of batches, [batch]."
        )
    if isinstance(data, (str, bytes, Path)) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise CalibrationError(
            f"The calibration data is a {kind}; possible: a DataLoader, a list or another iterable of batches."
        )
    return CountedBatches(model, data) if _has_length(data) else Batches(model, data)


def _has_length(data: Iterable[Any]) -> bool:
    try:
        return len(data) >= 0  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a DataLoader of a stream has a __len__ that raises
        return False


class Batches:
    """Batches as they come, arrays as tensors, without padding: see `unpadded`.

    Args:
        model: What takes them.
        data: An iterable of them.
    """

    def __init__(self, model: nn.Module, data: Iterable[Any]) -> None:
        self.data = data
        self._forward = positional_parameters(model.forward)
        self._arguments = ModelArguments.of(model)
        self._dropped = False
        self._count: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Raises CalibrationError for batches that cannot be read, hold labels, or are all zero together."""
        batches, index, found, empty = self._start(), 0, 0, True
        whole = self._whole_on_device()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except (QuarkError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a reader may raise anything
                said = f"{type(error).__name__}: {one_line(error)}"
                raise CalibrationError(f"The calibration data failed at batch {index}: {said}.") from error
            batch = _as_tensors(batch, index)
            batch = self._without_labels(batch)
            self._refuse_labels(batch, index)
            empty = empty and _is_zero(batch)
            with naming(f"Calibration batch {index}"):
                samples = [batch] if index in whole else unpadded(batch, self._arguments)
            found += len(samples)
            yield from samples
            index += 1
        self._count = found
        if index and not found:
            raise CalibrationError(f"All positions of all {index} calibration batches are masked: nothing is left.")
        if index and empty:
            raise CalibrationError(f"All {index} calibration batches hold zeros (or less than {TINY:.1e}) only.")

    def _whole_on_device(self) -> set[int]:
        """Numbers of the batches of a list whose masks lie on a device and mask nothing: it is waited for once."""
        flags = {}
        for index, batch in enumerate(self.data) if isinstance(self.data, (list, tuple)) else ():
            with naming(f"Calibration batch {index}"):
                flag = nothing_masked(batch, self._arguments)
            if flag is not None and flag.device.type != "cpu":
                flags[index] = flag
        here = next((flag.device for flag in flags.values()), None)
        read_flags = read(torch.stack([flag.to(here) for flag in flags.values()])) if flags else []
        return {index for index, flag in zip(flags, read_flags, strict=True) if flag}

    def _start(self) -> Iterator[Any]:
        try:
            return iter(self.data)
        except QuarkError:
            raise
        except Exception as error:  # as above
            raise CalibrationError(f"The calibration data cannot be read: {one_line(error)}.") from error

    def _without_labels(self, batch: Any) -> Any:
        """A batch of a data set without its labels, where forward has no argument for them."""
        if self._forward is None or not isinstance(batch, (tuple, list)) or len(batch) != len(self._forward) + 1:
            return batch
        if len(batch) < 2 or not _is_labels(batch[-1], batch[0]):
            return batch
        if not self._dropped:
            logger.info("The labels in the calibration data are left out: forward takes none.")
            self._dropped = True
        return batch[:-1]

    def _refuse_labels(self, batch: Any, index: int) -> None:
        """Refuse a batch with more items than forward takes, or with one label for each sample among its arguments."""
        if self._forward is None or not isinstance(batch, (tuple, list)) or len(batch) < 2:
            return
        fix = "Pass the inputs alone, [x for x, *_ in data], or a dict of arguments as each batch."
        if len(batch) > len(self._forward):
            takes = ", ".join(parameter.name for parameter in self._forward) or "none"
            raise CalibrationError(
                f"Calibration batch {index} holds {len(batch)} items, and forward takes {len(self._forward)} "
                f"({takes}). {fix}"
            )
        for item, parameter in zip(batch[1:], self._forward[1:], strict=False):
            optional = parameter.default is not parameter.empty
            if optional and parameter.name not in TARGETS and _is_labels(item, batch[0]):
                raise CalibrationError(
                    f"Calibration batch {index} holds one integer for each sample, as labels are, which forward would "
                    f"take as its optional {parameter.name!r}. {fix}"
                )


class CountedBatches(Batches):
    """Batches of known number: that of the data, until it is seen how many samples are taken out of padding."""

    def __len__(self) -> int:
        assert isinstance(self.data, Sized)
        return len(self.data) if self._count is None else self._count


def _as_tensors(batch: Any, index: int) -> Any:
    """A batch whose numpy arrays are tensors. Raises CalibrationError for tensors without an array of values."""
    if isinstance(batch, torch.Tensor) and (batch.is_meta or batch.layout is not torch.strided):
        kind = "on the meta device: it has no values" if batch.is_meta else "sparse: make it dense, by to_dense()"
        raise CalibrationError(f"Calibration batch {index} holds a tensor {tuple(batch.shape)} that is {kind}.")
    if isinstance(batch, np.ndarray):
        try:
            return torch.from_numpy(batch if batch.flags.writeable else batch.copy())
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"Calibration batch {index} is no array of numbers: {one_line(error)}") from None
    if type(batch) in (list, tuple):
        return type(batch)(_as_tensors(item, index) for item in batch)
    if isinstance(batch, Mapping) and type(batch) is not dict:
        for value in batch.values():
            _as_tensors(value, index)
    if type(batch) is dict:
        return {key: _as_tensors(value, index) for key, value in batch.items()}
    return batch


def _is_labels(item: Any, first: Any) -> bool:
    """Return True where an item is one integer for each sample of the first."""
    both = isinstance(item, torch.Tensor) and isinstance(first, torch.Tensor)
    return both and item.ndim == 1 < first.ndim and len(item) == len(first) and not item.is_floating_point()


def _is_zero(batch: Any) -> bool:
    """Return True where a batch holds floats, and nothing in it is a normal number."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel()]
    if not any(tensor.is_floating_point() for tensor in tensors):
        return False
    # NaN is no zero: it has an error of its own, which names the layer.
    return all(bool((tensor.detach().abs() < TINY).all()) for tensor in tensors)
