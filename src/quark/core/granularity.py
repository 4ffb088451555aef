"""Granularity: how a tensor is split, and so the shape of its scale.

Each granularity offers a view of x (`blocks`) in which every part that shares one scale lies along `axes`;
no data moves. The statistic of a part keeps length 1 on those axes and so broadcasts against the view:

    x (8, 64)                blocks(x)      axes      scale shape
    PerTensor()              (8, 64)        (0, 1)    ()
    PerChannel(axis=0)       (8, 64)        (1,)      (8,)
    PerToken()               (8, 64)        (1,)      (8,)
    PerGroup(-1, 32)         (8, 2, 32)     (2,)      (8, 2)
    PerBlock((4, 32))        (2, 4, 2, 32)  (1, 3)    (2, 2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quark.core.array import Array, namespace, pad_axis
from quark.errors import ShapeError


@dataclass(frozen=True)
class Granularity:
    """Base of all granularities. Shapes are those of the tensor that is quantized."""

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Axes of the block view over which one scale is shared."""
        raise NotImplementedError

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale as it is stored."""
        raise NotImplementedError

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the block view (padding included)."""
        return tuple(shape)

    def blocks(self, x: Array) -> Array:
        """The block view of x. Raises ShapeError when the split does not fit."""
        return x

    def unblock(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        """Inverse of `blocks`: back to `shape`, padding cut off."""
        return blocks.reshape(tuple(shape))

    def to_blocks(self, scale: Array, shape: tuple[int, ...]) -> Array:
        """A stored scale, reshaped so that it broadcasts against the block view of a tensor of `shape`."""
        view = list(self.block_shape(shape))
        for axis in self.axes(len(shape)):
            view[axis] = 1
        if math.prod(view) != math.prod(scale.shape):
            raise ShapeError(
                f"A scale of shape {tuple(scale.shape)} does not fit a tensor of shape {tuple(shape)} "
                f"split {self}: {self.scale_shape(shape)} is needed."
            )
        return scale.reshape(view)

    def to_elements(self, scale: Array, shape: tuple[int, ...]) -> Array:
        """A stored scale as one value for each element of a tensor of `shape`."""
        blocks = namespace(scale).broadcast_to(self.to_blocks(scale, shape), self.block_shape(shape))
        return self.unblock(blocks, shape)

    def sums(self, x: Array) -> Array:
        """The sum of each part of x that shares a scale, in the shape of the stored scale."""
        blocks, axes = self.blocks(x), self.axes(x.ndim)
        # No axes would be all of them to torch.
        return (blocks.sum(axes) if axes else blocks).reshape(self.scale_shape(tuple(x.shape)))


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor; scale shape ()."""

    def __str__(self) -> str:
        return "tensor"

    def axes(self, ndim: int) -> tuple[int, ...]:
        return tuple(range(ndim))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class PerChannel(Granularity):
    """One scale for each index of `axis`; scale shape (C,)."""

    axis: int = 0

    def __str__(self) -> str:
        return f"channel {self.axis}"

    def axes(self, ndim: int) -> tuple[int, ...]:
        axis = _axis(self, self.axis, ndim)
        return tuple(i for i in range(ndim) if i != axis)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[_axis(self, self.axis, len(shape))],)


HEADS = PerChannel(-3)
"""Each head of the keys or values that a cache stores: (batch, heads, tokens, size of a head)."""


@dataclass(frozen=True)
class PerToken(Granularity):
    """One scale for each vector along the last axis; scale shape x.shape[:-1]. For live activations."""

    def __str__(self) -> str:
        return "token"

    def axes(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1,)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[:-1])


@dataclass(frozen=True)
class PerGroup(Granularity):
    """One scale for each run of `size` values along `axis`; scale shape: x.shape with n_groups on that axis.

    `size=-1` is one group for the whole axis. A size that does not divide the axis raises ShapeError, unless
    `pad`: then zeros fill the last group (they change no maximum of magnitudes) and are cut off again.
    """

    axis: int = -1
    size: int = 128
    pad: bool = False

    def __str__(self) -> str:
        return f"group {self.size}" + ("" if self.axis == -1 else f" axis {self.axis}")

    def axes(self, ndim: int) -> tuple[int, ...]:
        return (_axis(self, self.axis, ndim) + 1,)

    def split(self, length: int) -> tuple[int, int]:
        """(number of groups, group size) along an axis of `length`."""
        size = max(1, length) if self.size == -1 else self.size
        if size < 1 or (not self.pad and length % size):
            divisors = [d for d in (16, 32, 64, 128, 256) if length % d == 0]
            raise ShapeError(
                f"group_size {self.size} does not divide axis {self.axis} of length {length}. "
                f"Possible: {', '.join(map(str, [*divisors, -1]))} (-1: the whole axis)."
            )
        return -(-length // size), size

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = _axis(self, self.axis, len(shape))
        return (*shape[:axis], self.split(shape[axis])[0], *shape[axis + 1 :])

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = _axis(self, self.axis, len(shape))
        return (*shape[:axis], *self.split(shape[axis]), *shape[axis + 1 :])

    def blocks(self, x: Array) -> Array:
        axis = _axis(self, self.axis, x.ndim)
        groups, size = self.split(x.shape[axis])
        shape = self.block_shape(tuple(x.shape))
        return pad_axis(x, axis, groups * size - x.shape[axis]).reshape(shape)

    def unblock(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        axis = _axis(self, self.axis, len(shape))
        padded = (*shape[:axis], math.prod(blocks.shape[axis : axis + 2]), *shape[axis + 1 :])
        whole = blocks.reshape(padded)
        return whole if padded == tuple(shape) else whole[(slice(None),) * axis + (slice(0, shape[axis]),)]


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale for each `size` = (rows, columns) tile of the last two axes; scale shape (..., R/r, C/c).

    Sides that do not divide the axes raise ShapeError, unless `pad`: then zeros fill the last tiles, and are cut off
    again.
    """

    size: tuple[int, int] = (128, 128)
    pad: bool = False

    def __str__(self) -> str:
        return f"block {self.size[0]}x{self.size[1]}"

    def axes(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1, ndim + 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        whole = self.block_shape(shape)
        return (*whole[:-4], whole[-4], whole[-2])

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ragged = len(shape) > 1 and (shape[-2] % self.size[0] or shape[-1] % self.size[1])
        if len(shape) < 2 or (ragged and not self.pad):
            raise ShapeError(
                f"block_size {self.size} does not divide the last two axes of shape {tuple(shape)}. "
                "Possible: tiles whose sides divide both axes."
            )
        (r, c), (rows, columns) = self.size, shape[-2:]
        return (*shape[:-2], -(-rows // r), r, -(-columns // c), c)

    def blocks(self, x: Array) -> Array:
        whole = self.block_shape(tuple(x.shape))
        for axis, size in ((-2, self.size[0]), (-1, self.size[1])):
            x = pad_axis(x, x.ndim + axis, -x.shape[axis] % size)
        return x.reshape(whole)

    def unblock(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        down, high, along, wide = blocks.shape[-4:]
        whole = blocks.reshape((*shape[:-2], down * high, along * wide))
        return whole if whole.shape == tuple(shape) else whole[..., : shape[-2], : shape[-1]]


def _axis(granularity: Granularity, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{granularity} needs axis {axis}, but the tensor has {ndim} dimensions.")
    return axis % ndim
