"""The rows of a tensor at real positions, where a batch holds masked ones too: what an observer is to see.

    rows of x: (batch, .., length, ..), (batch * length, ..), (batch * heads, length, ..)

Of scores (batch, heads, length, length) those of real queries and keys are taken, (1, heads, 1, scores). What has none
of these shapes counts whole: pooled states, and heads of which there are as many as positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quark.core.array import Array, NumpyArray, is_torch, namespace


def rows_at(x: Array, real: Sequence[NumpyArray]) -> Array:
    """Return the values of a tensor at real positions, of as many axes; all of it where it has none of the shapes.

    Args:
        x: Any tensor.
        real: (batch, length) bool, of each part of the model; the first that fits is taken, with all of its shape.
    """
    for first in real:
        mask = np.logical_or.reduce([other for other in real if other.shape == first.shape])
        batch, length = mask.shape
        axis = _axis(x, batch, length)
        if axis == 2 and x.ndim == 4 and x.shape[3] == length:
            pairs = mask[:, :, None] & mask[:, None, :]
            of_heads = x.swapaxes(0, 1).reshape(x.shape[1], -1)
            return _taken(of_heads.swapaxes(0, 1), pairs).swapaxes(0, 1)[None, :, None]
        if axis is not None:
            rows = x.swapaxes(axis, 1)
            return _taken(rows.reshape(batch * length, *rows.shape[2:]), mask)[None].swapaxes(1, axis)
        if x.ndim > 1 and x.shape[0] == batch * length:
            return _taken(x, mask)
        if x.ndim == 3 and x.shape[0] % batch == 0:
            apart = x.reshape(batch, -1, *x.shape[1:])
            found = rows_at(apart, [mask])
            if found is not apart:
                return found.reshape(-1, *found.shape[2:])
    return x


def _axis(x: Array, batch: int, length: int) -> int | None:
    """The axis of a tensor that goes along the positions; None where there is none, or it cannot be told."""
    axes = [axis for axis in range(1, x.ndim) if x.shape[axis] == length] if x.ndim and x.shape[0] == batch else []
    if len(axes) > 1 and not (x.ndim == 3 or axes == [2, 3]):  # scores of heads, whose queries come first
        return None
    return axes[0] if axes else None


def _taken(x: Array, mask: NumpyArray) -> Array:
    places = np.flatnonzero(mask)
    # Places are made on the host and sent: a device is not waited for.
    return x.index_select(0, namespace(x).from_numpy(places).to(x.device)) if is_torch(x) else x[places]
