"""A layer as a product: which rows (patches of an image), times its weight, give each of its outputs.

    Conv             the patch under an output position
    ConvTranspose    the same, of the input with zeros between its elements, under the kernel turned around
    Gemm, MatMul     a vector along the last axis

A sample is an index of the first axis; its positions are what is left of the axes when channels are taken away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import NotSupportedError
from quark.onnx.operators import data_axis, output_axis


@dataclass(frozen=True)
class _Dense:
    """Gemm or MatMul with a constant second operand.

    Attributes:
        transposed_input: Whether the input is (columns, rows).
        transposed_weight: Whether the weight is (outputs, columns).
        factor: On the product.
    """

    transposed_input: bool = False
    transposed_weight: bool = False
    factor: float = 1.0

    @property
    def flipped(self) -> bool:
        """True where the weight lies in memory as (columns, outputs)."""
        return not self.transposed_weight

    def matrix(self, weight: Any) -> Any:
        """The weight, numpy or torch, as (groups, outputs, columns)."""
        return (weight if self.transposed_weight else weight.T)[None]

    def native(self, matrix: Any) -> Any:
        """Back."""
        return matrix[0] if self.transposed_weight else matrix[0].T

    def shape(self, y: NumpyArray) -> tuple[int, ...]:
        """The positions of the outputs of a sample."""
        return tuple(y.shape[1:-1])

    def rows(self, x: NumpyArray, sample: int, shape: Sequence[int], positions: NumpyArray) -> NumpyArray:
        """Return the rows that the outputs at some of the positions are products of, (positions, columns)."""
        x = x.T if self.transposed_input else x
        return np.asarray(x[sample].reshape(-1, x.shape[-1])[positions] * np.float32(self.factor))

    def outputs(self, y: NumpyArray, sample: int, positions: NumpyArray) -> NumpyArray:
        """The outputs there, (positions, outputs)."""
        return np.asarray(y[sample].reshape(-1, y.shape[-1])[positions])


@dataclass(frozen=True)
class _Convolution:
    """Conv or ConvTranspose.

    Attributes:
        kernel, strides, dilations: For each spatial axis.
        begins: Padding before each axis; None: what `SAME` padding needs, the odd one before or, if `upper`, after.
        groups: Parts of the channels that are convolved apart.
        transposed: Whether it is a ConvTranspose.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...] | None
    groups: int
    upper: bool = True
    transposed: bool = False
    flipped: ClassVar[bool] = False

    def matrix(self, weight: Any) -> Any:
        """The weight, numpy or torch, as (groups, outputs, columns)."""
        if not self.transposed:
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        inputs, outputs = weight.shape[0] // self.groups, weight.shape[1]
        return weight.reshape(self.groups, inputs, outputs, -1).swapaxes(1, 2).reshape(self.groups, outputs, -1)

    def native(self, matrix: Any) -> Any:
        """Back."""
        groups, outputs, _ = matrix.shape
        if not self.transposed:
            return matrix.reshape(groups * outputs, -1, *self.kernel)
        parts = matrix.reshape(groups, outputs, -1, math.prod(self.kernel)).swapaxes(1, 2)
        return parts.reshape(-1, outputs, *self.kernel)

    def shape(self, y: NumpyArray) -> tuple[int, ...]:
        """The positions of the outputs of a sample."""
        return tuple(y.shape[2:])

    def rows(self, x: NumpyArray, sample: int, shape: Sequence[int], positions: NumpyArray) -> NumpyArray:
        """Return the rows that the outputs at some of the positions are products of, (positions, groups * columns)."""
        padded, reach = self._padded(x[sample], shape)
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(1, padded.ndim)))
        turn = -1 if self.transposed else 1
        # A ConvTranspose reads its kernel from the end; sizes are such that the last element is met.
        taken: Any = (..., *(slice(None, None, turn * dilation) for dilation in self.dilations))
        steps = [1 if self.transposed else stride for stride in self.strides]
        corners = zip(np.unravel_index(positions, tuple(shape)), steps, strict=True)
        at: Any = (slice(None), *(index * step for index, step in corners))
        # (channels, positions, *kernel) -> (positions, channels * kernel)
        return np.moveaxis(windows[taken][at], 0, 1).reshape(len(positions), -1)

    def outputs(self, y: NumpyArray, sample: int, positions: NumpyArray) -> NumpyArray:
        """The outputs there, (positions, outputs)."""
        return np.asarray(y[sample].reshape(y.shape[1], -1)[:, positions].T)

    def _padded(self, x: NumpyArray, shape: Sequence[int]) -> tuple[NumpyArray, list[int]]:
        """The input (channels, *spatial) under all windows, and the length of a window along each axis."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        begins, strides = self.begins, self.strides
        if self.transposed:
            assert begins is not None
            spread = np.zeros((len(x), *((size - 1) * s + 1 for size, s in zip(x.shape[1:], strides, strict=True))))
            spread[(slice(None), *(slice(None, None, s) for s in strides))] = x
            x, begins = spread.astype(np.float32), tuple(r - 1 - b for r, b in zip(reach, begins, strict=True))
            strides = (1,) * len(strides)
        pads = [(0, 0)]
        for axis, (r, size) in enumerate(zip(reach, x.shape[1:], strict=True)):
            needed = (shape[axis] - 1) * strides[axis] + r
            extra = max(0, needed - size)
            begin = begins[axis] if begins is not None else (extra if self.upper else extra + 1) // 2
            if begin < 0:
                x, begin = np.delete(x, slice(-begin), axis + 1), 0
            pads.append((begin, max(0, needed - begin - x.shape[axis + 1])))
        return np.pad(x, pads), reach


Product = _Dense | _Convolution


def product_of(node: ir.Node, weight: NumpyArray) -> Product:
    """How a node with a constant weight is a product.

    Raises:
        NotSupportedError: It is none of one matrix, or its padding is not written out.
    """
    if node.op_type == "MatMul":
        if weight.ndim != 2:
            raise NotSupportedError(f"a MatMul with a weight of {weight.ndim} axes; possible: 2")
        return _Dense()
    if node.op_type == "Gemm":
        factor = node.attributes.get_float("alpha", 1.0)
        return _Dense(data_axis(node) == 0, output_axis(node) == 0, factor)
    return _convolution(node, weight)


def _convolution(node: ir.Node, weight: NumpyArray) -> _Convolution:
    attributes, kernel, axes = node.attributes, tuple(weight.shape[2:]), weight.ndim - 2
    strides = tuple(attributes.get_ints("strides", (1,) * axes) or ())
    dilations = tuple(attributes.get_ints("dilations", (1,) * axes) or ())
    pads: tuple[int, ...] | None = tuple(attributes.get_ints("pads", (0,) * 2 * axes) or ())[:axes]
    auto, transposed = attributes.get_string("auto_pad", "NOTSET"), node.op_type == "ConvTranspose"
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = None
    if transposed and (pads is None or "output_shape" in attributes):
        raise NotSupportedError("a ConvTranspose whose padding follows from its output; possible: `pads`")
    group = attributes.get_int("group", 1) or 1
    return _Convolution(kernel, strides, dilations, pads, group, auto == "SAME_UPPER", transposed)
