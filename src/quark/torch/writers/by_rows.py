"""Tensors on their way from a file into another, some rows at a time: a table of a vocabulary is as large as memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import QuarkError
from quark.torch.calibration.calibrate import of_own_values
from quark.torch.checkpoint.loading import stored_on_meta
from quark.torch.checkpoint.safetensors_file import ByteRange, write_across
from quark.torch.checkpoint.shards import Entry
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.writers.writer import Move, Writer

PIECE = 1 << 22
"""Bytes that are copied, or converted, at once."""

Way = tuple[Move, list[ByteRange]]
"""The change of a stored tensor, and the places of its rows."""


def ways_of(entry: Entry, writer: Writer, places: Mapping[str, ByteRange]) -> dict[str, Way]:
    """The ways of what is stored of a tensor, by suffix."""
    moves = {suffix: writer.move(entry[0], suffix) for suffix in entry[2]}
    return {suffix: (move, [places[key] for key in move.keys]) for suffix, move in moves.items()}


def copy_pieces(x: torch.Tensor, way: Way, release: Callable[[], None]) -> None:
    """Write a tensor that is not quantized, and give back each piece of it before the next one.

    Args:
        x: The tensor, over a file.
        way: What becomes of it, and where it goes.
        release: Gives back the memory of what was read of it.
    """
    move, places = way
    pieces = torch.split(x.reshape(-1), max(1, PIECE // x.dtype.itemsize)) if move.stays else [move(x)]
    for values in pieces:
        places = write_across(values, places)
        release()


@dataclass(frozen=True)
class RowsOfWeight:
    """A weight whose rows are quantized and stored on their own.

    Attributes:
        layout: How they are stored.
        spec: How they are quantized.
        shape, dtype: Of the float tensor.
        ways: What becomes of its stored tensors, by suffix, and where they go.
        step: So many rows at a time.
    """

    layout: Layout
    spec: TensorSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    ways: Mapping[str, Way]
    step: int

    @classmethod
    def of(
        cls, layout: Layout, spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype, ways: Mapping[str, Way]
    ) -> RowsOfWeight | None:
        """The rows of a weight; None where a scale spans all rows, where there are few, or where they lie so in the
        file that it has to be seen as a whole.
        """
        unit, order = layout.rows_alone(shape), ways[""][0].order
        if unit is None or not of_own_values(spec) or (order is not None and unit != 1):
            return None
        step = max(1, PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize) // unit) * unit
        return None if step >= shape[0] else cls(layout, spec, shape, dtype, ways, step)

    def write(self, x: torch.Tensor, qparams: Callable[[torch.Tensor], QParams], release: Callable[[], None]) -> bool:
        """Quantize and write a tensor, and give back what was read of some rows before the next ones.

        Args:
            x: The tensor, over a file.
            qparams: Finds the scales of some of its rows.
            release: Gives back the memory of what was read of it.

        Returns:
            Whether it was done. Where some rows on their own are refused, the tensor has to be seen as a whole: what is
            said of it says where, and how much.
        """
        order, constants = self.ways[""][0].order, self.layout.constants(self.shape)
        whole = stored_on_meta(self.layout, self.spec, self.shape, self.dtype)
        stored = _StoredRows({suffix: x for suffix, x in whole.items() if suffix not in constants}, self.ways)
        try:
            for rows in torch.split(x, self.step) if order is None else (x[i] for i in torch.split(order, self.step)):
                stored.add(self.layout.store(rows, qparams(rows)))
                release()
        except QuarkError:
            return False
        stored.write()
        for suffix, tensor in constants.items():
            move, places = self.ways[suffix]
            write_across(move(tensor), places)
        return True


class _StoredRows:
    """The stored tensors of a weight, made some rows at a time.

    Those that lie in the file in this order are written at once, the transposed ones when they are whole.

    Args:
        whole: The tensors of all rows, on the meta device, by suffix.
        ways: Where each goes.
    """

    def __init__(self, whole: Tensors, ways: Mapping[str, Way]) -> None:
        self._whole, self._places = whole, {suffix: places for suffix, (_, places) in ways.items()}
        self._kept: Tensors = {}
        self._filled = dict.fromkeys(whole, 0)

    def add(self, pieces: Tensors) -> None:
        """The tensors of the next rows."""
        for suffix, like in self._whole.items():
            piece = pieces[suffix]
            axis = next(axis for axis in range(like.ndim) if piece.shape[axis] != like.shape[axis])
            if axis == 0:
                self._places[suffix] = write_across(piece, self._places[suffix])
                continue
            if suffix not in self._kept:
                self._kept[suffix] = torch.empty_like(like, device="cpu")
            self._kept[suffix].narrow(axis, self._filled[suffix], piece.shape[axis]).copy_(piece)
            self._filled[suffix] += piece.shape[axis]

    def write(self) -> None:
        """Write what is not written."""
        for suffix, tensor in self._kept.items():
            write_across(tensor, self._places[suffix])
