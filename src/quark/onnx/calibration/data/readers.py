"""Calibration data readers: anything with `get_next() -> dict | None`, and iterables.

A sample ("feed") is a dict from each input of the model to an array that holds the batch axis too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from quark.core.scales import TINY
from quark.errors import CalibrationError, ConfigError, NonFiniteError, NotSupportedError, QuarkError
from quark.onnx.calibration.data.inputs import Feed, Input, check_feed
from quark.onnx.calibration.data.sample_batches import rebatch
from quark.onnx.graph.proto_file import reason

__all__ = ["CachedDataReader", "CalibrationDataReader"]


class TimeUpError(Exception):
    """The moment has come after which no sample is read; see `Samples.until`."""


class CalibrationDataReader(ABC):
    """Yields samples one by one; a class of ONNX Runtime's name and protocol."""

    @abstractmethod
    def get_next(self) -> Feed | None:
        """The next sample; None at the end."""

    def __iter__(self) -> Iterator[Feed]:
        while (feed := self.get_next()) is not None:
            yield feed

    def __next__(self) -> Feed:
        """The next sample. Raises StopIteration at the end."""
        feed = self.get_next()
        if feed is None:
            raise StopIteration
        return feed

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read the samples from one position up to another from now on, which it leaves out.

        Raises:
            NotSupportedError: The reader can only go forward.
        """
        raise NotSupportedError(f"{type(self).__name__} has no set_range: it only goes forward.")


class CachedDataReader(CalibrationDataReader):
    """All samples of a reader in memory, to be read more than once.

    Args:
        dr: The reader.
        data_size: Most samples kept; None for all.
        convert_nchw_to_nhwc: Move the channels of arrays with four dimensions to the end.
        quantize_fp16: Not in this version.
    """

    def __init__(
        self, dr: Any, data_size: int | None = None, convert_nchw_to_nhwc: bool = False, quantize_fp16: bool = False
    ) -> None:
        if quantize_fp16:
            raise NotSupportedError("CachedDataReader(quantize_fp16=True) is not part of this version.")
        self._feeds: list[Feed] = []
        reader = as_reader(dr)
        while (data_size is None or len(self) < data_size) and (feed := _next(reader, len(self))) is not None:
            if convert_nchw_to_nhwc:
                feed = {name: np.asarray(array) for name, array in feed.items()}
                feed = {name: x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for name, x in feed.items()}
            self._feeds.append(feed)
        self.reset_iter()

    def __len__(self) -> int:
        return len(self._feeds)

    def reset_iter(self) -> None:
        """Start again at the first sample, of all."""
        self._rest = iter(self._feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read the samples from one position up to another from now on, which it leaves out.

        Raises:
            ConfigError: There are no such positions.
        """
        check_range(start_index, end_index, len(self))
        self._rest = iter(self._feeds[start_index:end_index])

    def get_next(self) -> Feed | None:
        return next(self._rest, None)


def check_range(start: int, end: int, count: int) -> None:
    """Raise ConfigError unless both are positions of samples, or the end of them, in order."""
    if not 0 <= start <= end <= count:
        raise ConfigError(
            f"set_range({start}, {end}): there are {count} samples; possible: 0 <= start <= end <= {count}."
        )


class _Iterating(CalibrationDataReader):
    """An iterable of dicts, or of arrays for a model with one input."""

    def __init__(self, items: Iterable[Any], inputs: Mapping[str, Input]) -> None:
        self._items, self._inputs = items, inputs
        self._rest: Iterator[Any] | None = None

    def get_next(self) -> Feed | None:
        # Made here: an iterable may fail before its first item.
        self._rest = iter(self._items) if self._rest is None else self._rest
        for item in self._rest:
            try:
                if isinstance(item, Mapping):
                    return {name: np.asarray(value) for name, value in item.items()}
                if len(self._inputs) == 1:
                    return {next(iter(self._inputs)): np.asarray(item)}
            except (TypeError, ValueError, RuntimeError) as error:
                raise CalibrationError(f"A calibration sample cannot be turned into numpy arrays: {error}.") from None
            expected = ", ".join(map(str, self._inputs.values())) or "input name -> array"
            raise CalibrationError(f"A calibration sample is a {type(item).__name__}; expected: a dict of {expected}.")
        return None


def _stacked(data: Any, inputs: Mapping[str, Input]) -> Feed | None:
    """All samples in one array of each input; None where `data` are samples one by one."""
    if isinstance(data, Mapping) and data and all(isinstance(value, np.ndarray) for value in data.values()):
        return dict(data)
    if not isinstance(data, np.ndarray) or len(inputs) != 1:
        return None
    entry = next(iter(inputs.values()))
    return {entry.name: data} if entry.shape is not None and data.ndim == len(entry.shape) else None


def as_reader(data: Any, inputs: Mapping[str, Input] | None = None) -> Any:
    """Make a reader of what was given: a reader is itself; an iterable of dicts or arrays is read once.

    An array of as many dimensions as the one input, or a dict of arrays, holds all samples, as an .npz file does.

    Raises:
        CalibrationError: It is neither.
    """
    if callable(getattr(data, "get_next", None)):
        return data
    if (stacked := _stacked(data, inputs or {})) is not None:
        return _Iterating(rebatch([stacked], None, inputs or {}), inputs or {})
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise CalibrationError(
            f"A calibration reader needs get_next(), or is an iterable of samples; {type(data).__name__} is neither."
        )
    return _Iterating(data, inputs or {})


def samples(reader: Any, inputs: dict[str, Input], limit: int | None = None) -> Iterator[Feed]:
    """The samples of a reader or an iterable, each checked against the inputs of the model.

    Raises:
        CalibrationError: The reader fails, or gives what does not fit.
    """
    reader, count = as_reader(reader, inputs), 0
    while (limit is None or count < limit) and (feed := _next(reader, count)) is not None:
        check_feed(feed, inputs)
        yield feed
        count += 1


def _next(reader: Any, count: int) -> Any:
    """The next sample, its values as arrays; what a reader raises is said as what it is.

    A StopIteration is an error too: it may come from anything that the reader calls, and would cut the data short.
    """
    try:
        feed = reader.get_next()
        return {name: np.asarray(value) for name, value in feed.items()} if isinstance(feed, dict) else feed
    except (QuarkError, TimeUpError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {reason(error)}"
        advice = " Possible: return None at the end." if isinstance(error, StopIteration) else ""
        raise CalibrationError(f"The calibration reader fails after {count} samples: {what}{advice}") from error


def usable(feeds: Iterable[Feed]) -> Iterator[Feed]:
    """The samples, as calibration takes them.

    Raises:
        NonFiniteError: An input holds NaN: what it does to a range depends on the operators that it meets.
        CalibrationError: At the end, where every float in every sample was zero or below the normal float32: the
            ranges would be those of the biases. Zeros here and there, and a dead channel, are fine.
    """
    floats, alive = False, False
    for count, feed in enumerate(feeds):
        for name, array in feed.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise NonFiniteError(f"The input {name!r} of the calibration sample {count} holds NaN.")
            floats = floats or (array.dtype.kind == "f" and array.size > 0)
        alive = alive or is_alive(feed)
        yield feed
    if floats and not alive:
        raise CalibrationError(
            "Every calibration sample is zero, or below the smallest normal float32 (1.2e-38), in every float input: "
            "no ranges can be found from them. Possible: data that resemble those in use."
        )


def is_alive(feed: Feed) -> bool:
    """Return True where any value of a sample is other than zero; one below the normal float32 counts as zero."""
    return any(bool(((x != 0) & ((abs(x) >= TINY) if x.dtype.kind == "f" else True)).any()) for x in feed.values())
