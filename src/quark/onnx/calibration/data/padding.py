"""Takes the padding out of the samples of an ONNX model, so that masked positions count nowhere.

    a mask: an input (batch, length) of 1 and 0, from which the scores are masked that a Softmax reads

It is found by where it goes, whatever its name is. Inputs of its batch and length are cut to the positions that are
real, and the rows of a sample that are of unequal length become samples of their own. What cannot be cut (a model of
one length) runs whole; whatever looks at a tensor then sees those rows that belong to real positions, see `rows_at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.observers.real_rows import rows_at
from quark.errors import CalibrationError
from quark.onnx.calibration.data.inputs import Feed, Input, model_inputs
from quark.onnx.calibration.data.readers import CalibrationDataReader, as_reader
from quark.onnx.calibration.data.sample_batches import Axes, rows_of, sample_axes

ATTENTION = {"Attention": 3, "QAttention": 3, "MultiHeadAttention": 4, "GroupQueryAttention": 9}
"""Operators that mask by themselves: the first of their inputs that masks."""
ANYWHERE = {"Cast", "CastLike", "Sub", "Mul", "Add", "Div", "Neg", "Not", "And", "Or", "Equal", "Where", "Min", "Max"}
ANYWHERE |= {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Concat", "Identity", "Dropout", "ScatterND"}
"""Operators that hand a mask on, whichever of their inputs it is."""
AS_DATA = {"Unsqueeze", "Squeeze", "Reshape", "Expand", "Tile", "Slice", "Gather", "GatherND", "GatherElements"}
AS_DATA |= {"Clip", "Transpose", "Split", "Flatten"}
"""Operators that hand a mask on where it is their data: what looks up rows of a table is none."""


def mask_inputs(model: ir.Model) -> list[str]:
    """The inputs (batch, length) from which the scores of a Softmax are masked."""
    return [value.name or "" for value in model.graph.inputs if _may_mask(value) and _leads(value)[value]]


def mask_values(model: ir.Model) -> set[ir.Value]:
    """The tensors on the way from a mask to a Softmax: bare samples do not show how low they are where one masks."""
    found: set[ir.Value] = set()
    for value in filter(_may_mask, model.graph.inputs):
        found.update(one for one, leads in _leads(value).items() if leads)
    return found


def _may_mask(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 2 and value.dtype is not ir.DataType.STRING


def _leads(value: ir.Value) -> dict[ir.Value, bool]:
    """A value and what hands it on -> whether scores are masked from it."""
    order, seen = [value], {value}
    for one in order:
        new = [output for output in _handed_on(one) if output not in seen]
        order += new
        seen.update(new)
    leads = dict.fromkeys(order, False)
    waiting = [
        one
        for one in order
        if any(
            use.node.op_type == "Softmax" or use.idx >= ATTENTION.get(use.node.op_type, math.inf) for use in one.uses()
        )
    ]
    while waiting:
        one = waiting.pop()
        if one in leads and not leads[one]:
            leads[one] = True
            producer = one.producer()
            if producer is not None:
                waiting += [read for read in producer.inputs if read is not None and one in _handed_on(read)]
    return leads


def _handed_on(value: ir.Value) -> list[ir.Value]:
    """Return the outputs of those readers of a value that hand a mask on."""
    carriers = [n for n, at in value.uses() if n.op_type in ANYWHERE or (n.op_type in AS_DATA and at == 0)]
    return [output for node in carriers for output in node.outputs]


@dataclass(frozen=True)
class Padding:
    """Where the samples of a model are padded.

    Attributes:
        masks: Inputs that mask.
        inputs: Those of the model.
    """

    masks: tuple[str, ...]
    inputs: Mapping[str, Input]

    @classmethod
    def of(cls, model: ir.Model | onnx.ModelProto) -> Padding:
        """That of a model."""
        graph = model if isinstance(model, ir.Model) else ir.from_proto(model)
        return cls(tuple(mask_inputs(graph)), model_inputs(model))

    def real(self, feed: Feed) -> dict[str, NumpyArray]:
        """Mask -> which positions of a sample are real, (batch, length) bool; of those that mask something."""
        found = {}
        for name in self.masks if feed.keys() == self.inputs.keys() else ():
            array = feed.get(name)
            if isinstance(array, np.ndarray) and array.ndim == 2 and ((array == 0) | (array == 1)).all():
                found[name] = array != 0
        return {name: real for name, real in found.items() if not real.all() and self._cut_with(name, feed)}

    def without(self, feed: Feed) -> list[Feed]:
        """A sample without its padding: itself where nothing is masked, and where it cannot be cut.

        It cannot where the model takes no other length, between real positions, which would come nearer to each other,
        and where rows of unequal length cannot be told apart.
        """
        real = self.real(feed)
        if not real or _between(real):
            return [feed]
        filled = np.all([mask.any(axis=1) for mask in real.values()], axis=0)
        cut = self.can_cut(feed, real)
        if cut and (not filled.any() or _have_one_length(real)):
            return [self._row_at_real(feed, real, 0)] if filled.any() else []
        # Each row is an example, though of one length where none can be cut.
        axes = self._axes_of_rows(feed, len(filled)) if len(filled) > 1 and self._takes_rows(real) else None
        if axes is None:
            return [feed]
        apart = {row: rows_of(feed, axes, row, row + 1) for row in np.flatnonzero(filled).tolist()}
        return [self._row_at_real(part, real, row) if cut else part for row, part in apart.items()]

    def at_real(self, feed: Feed, arrays: Sequence[Any]) -> list[Any]:
        """Cut the tensors of a sample to its real positions; all are real where nothing is masked. See `rows_at`."""
        real = [*self.real(feed).values()]
        return [rows_at(x, real) if real and isinstance(x, np.ndarray) else x for x in arrays]

    def _takes_rows(self, masks: Iterable[str]) -> bool:
        """Return True where the model takes a single row of a batch."""
        return all(_is_open(self.inputs[name], 0) for name in masks)

    def _axes_of_rows(self, feed: Feed, rows: int) -> Axes | None:
        """Along which axis of each input its rows lie; None where one has no row for each."""
        try:
            axes = sample_axes(feed, self.inputs)
        except CalibrationError:
            return None
        return axes if all(axis is None or feed[name].shape[axis] == rows for name, axis in axes.items()) else None

    def can_cut(self, feed: Feed, real: Mapping[str, NumpyArray]) -> bool:
        """Return True where masks have no gaps and the model takes other lengths, and single rows where they differ."""
        if _between(real):
            return False
        open_axes = all(_is_open(self.inputs[name], 1) for mask in real for name in self._cut_with(mask, feed))
        rows = len(next(iter(real.values())))
        return open_axes and (rows == 1 or _have_one_length(real) or self._takes_rows(real))

    def _cut_with(self, mask: str, feed: Feed) -> list[str]:
        """The inputs that are cut with a mask, itself too; none where there is no other of its batch and length."""
        shape = feed[mask].shape
        same = [name for name, array in feed.items() if array.shape[:2] == shape]
        named = _name_of_length(self.inputs[mask])
        # Encoder and decoder may be equally long: then the names of their lengths, if there are, tell them apart.
        own = [name for name in same if named is None or _name_of_length(self.inputs[name]) in (None, named)]
        return own if len(own) > 1 else []

    def _row_at_real(self, feed: Feed, real: Mapping[str, NumpyArray], row: int) -> Feed:
        cut = dict(feed)
        for mask, places in real.items():
            for name in self._cut_with(mask, feed):
                cut[name] = cut[name][:, places[row]]
        return cut


def _have_one_length(real: Mapping[str, NumpyArray]) -> bool:
    return all(bool((mask == mask[:1]).all()) for mask in real.values())


def _is_open(entry: Input, axis: int) -> bool:
    return entry.shape is None or len(entry.shape) <= axis or not isinstance(entry.shape[axis], int)


def _name_of_length(entry: Input) -> str | None:
    size = entry.shape[1] if entry.shape is not None and len(entry.shape) > 1 else None
    return size if isinstance(size, str) else None


def _between(real: Mapping[str, NumpyArray]) -> bool:
    """Return True where masked positions lie between real ones, or the masks are of other batches."""
    return any(map(_has_gaps, real.values())) or len({len(mask) for mask in real.values()}) > 1


def _has_gaps(real: NumpyArray) -> bool:
    starts = np.diff(real.astype(np.int8), axis=1, prepend=0) == 1
    return bool((starts.sum(1) > 1).any())


class _BareSamples(CalibrationDataReader):
    """The samples of a reader without their padding; see `Padding`.

    Args:
        data: A reader, or an iterable of samples.
        padding: Of the model.
    """

    def __init__(self, data: Any, padding: Padding) -> None:
        self._data, self._padding = data, padding
        self._rest: Iterator[Feed] = iter(())
        self._reader: Any = None

    def get_next(self) -> Feed | None:
        """The next sample."""
        if (waiting := next(self._rest, None)) is not None:
            return waiting
        # Made when it is read: what is given with a dynamic quantization may be no data.
        self._reader = as_reader(self._data, self._padding.inputs) if self._reader is None else self._reader
        while (feed := self._reader.get_next()) is not None:
            if not isinstance(feed, dict):
                return feed  # what it is, is said by who checks it
            self._rest = iter(self._padding.without({name: np.asarray(value) for name, value in feed.items()}))
            if (first := next(self._rest, None)) is not None:
                return first
        return None


def without_padding(data: Any, model: ir.Model | onnx.ModelProto) -> Any:
    """A reader whose samples are padded nowhere; the data as they are, where the model has no mask.

    Args:
        data: A reader, or an iterable of samples; None stays None.
        model: That they are for.
    """
    padding = Padding.of(model) if data is not None else None
    return _BareSamples(data, padding) if padding is not None and padding.masks else data
