"""The mean of what a linear layer gives, from the means of what it reads: the layer itself need not run.

    mean_p y[o, p] = b[o] + 1/P sum_{c, t} W[o, c, t] S[c, t]

    S[c, t] = sum_h x[c, h] prod_axes A[t, h]        A[t, h]: whether tap t of the window reads position h, at any of
                                                     the P positions of the output; a product has one tap

apart for each example. Beside the layer's own products this is nothing: W is read once for a whole position map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.calibration.byproducts import position_means
from quark.onnx.graph.channels import matmul_bias
from quark.onnx.graph.model_file import constant, is_constant
from quark.onnx.operators import CONVOLUTIONS, PRODUCTS


def is_plain_decoder(node: ir.Node | None) -> bool:
    """Return True where a node is a DequantizeLinear whose scale is constant, one or one for each channel."""
    if node is None or node.op_type != "DequantizeLinear":  # of ONNX or com.microsoft
        return False
    block: int = node.attributes.get_int("block_size", 0)
    return not block and all(is_constant(value) for value in node.inputs[1:])


def decoded_codes(node: ir.Node, codes: NumpyArray) -> NumpyArray:
    """Decode codes as a DequantizeLinear with one scale, or with one for each channel, does; float32."""
    scale = np.asarray(constant(node.inputs[1]), np.float32)
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    shape = [1] * codes.ndim
    if scale.ndim and codes.ndim:
        shape[node.attributes.get_int("axis", 1)] = -1
    found = codes.astype(np.float32)
    if zero is not None and np.any(zero):
        found -= np.asarray(zero, np.float32).reshape(shape if np.ndim(zero) else ())
    found *= scale.reshape(shape if scale.ndim else ())
    return found


@dataclass(frozen=True)
class LinearMeans:
    """A layer whose means follow from what it reads.

    Attributes:
        node: Conv, ConvTranspose, Gemm or MatMul.
        weight: What it computes with, float32.
        bias: What it adds, (channels,), or None.
    """

    node: ir.Node
    weight: NumpyArray
    bias: NumpyArray | None

    @classmethod
    def of(cls, node: ir.Node, read: Callable[[ir.Value], NumpyArray] = constant) -> LinearMeans | None:
        """The layer of a quantized model as it is now; None where the means do not follow so.

        Args:
            node: The layer.
            read: Gives the codes of its weight.
        """
        if not _is_linear(node):
            return None
        weight = _constant_input(node, 1, read)
        bias = None if matmul_bias(node) is not None else _constant_input(node, 2)
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        if weight is None or (has_bias and bias is None) or (node.op_type == "MatMul" and weight.ndim != 2):
            return None
        if bias is not None and bias.ndim > 1 and bias.size != bias.shape[-1]:
            return None  # that of a Gemm may differ by row
        return cls(node, weight, bias)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layers whose `inputs` are equal for one tensor."""
        return ("rows",) if self.node.op_type in PRODUCTS else self._geometry

    @cached_property
    def _geometry(self) -> _Geometry:
        return _Geometry.of(self.node, self.weight.shape[2:])

    def inputs(self, x: NumpyArray) -> NumpyArray:
        """Return what the means follow from: means of the rows that a product reads, or `window` of a convolution."""
        return position_means(x, -1) if self.node.op_type in PRODUCTS else self.window(x)

    def of_codes(self, found: NumpyArray, sizes: tuple[int, ...], decoder: ir.Node) -> NumpyArray:
        """Return what `inputs` gives for values, by what it gave for codes: there are fewer sums to decode.

        Args:
            found: What it gave.
            sizes: Of the positions of a convolution.
            decoder: A DequantizeLinear with one scale.
        """
        scale, zero = float(constant(decoder.inputs[1])), 0.0
        if len(decoder.inputs) > 2:
            zero = float(constant(decoder.inputs[2]))
        if zero:
            found = found - zero * (
                1.0 if self.node.op_type in PRODUCTS else self.window(np.ones((1, 1, *sizes), np.float32))
            )
        return np.asarray(found * scale, found.dtype)

    def window(self, x: NumpyArray) -> NumpyArray:
        """Of a convolution: S / P of what it reads, (examples, channels, positions ...) -> (.., channels, taps ..)."""
        kernel, sizes = self._geometry.kernel, x.shape[2:]
        axes, count = _taps(self._geometry, sizes)
        positions = math.prod(sizes)
        if math.prod(kernel) * positions <= _AT_ONCE:
            x = (x.reshape(-1, positions) @ _all_taps(self._geometry, sizes)).reshape(*x.shape[:2], *kernel)
        else:
            for axis in reversed(range(len(kernel))):
                x = np.moveaxis(np.tensordot(x, axes[axis], (2 + axis, 1)), -1, 2 + axis)
        return x / np.float32(max(count, 1))

    def __call__(self, means: NumpyArray) -> NumpyArray:
        """Means of what the layer gives, (examples, channels).

        Args:
            means: Of a convolution what `window` gives; of a product those of its rows, (examples, inputs).
        """
        if self.node.op_type in CONVOLUTIONS:
            return self._with_bias(self._convolved(means))
        weight = self.weight.T if self.node.attributes.get_int("transB", 0) else self.weight
        product = self.node.attributes.get_float("alpha", 1.0) * (means.astype(np.float32) @ weight)
        return self._with_bias(product, self.node.attributes.get_float("beta", 1.0))

    def _convolved(self, means: NumpyArray) -> NumpyArray:
        groups, taps = self.node.attributes.get_int("group", 1), int(np.prod(self.weight.shape[2:]))
        if self.node.op_type == "ConvTranspose":  # (inputs of all groups, outputs of one, taps)
            weight = self.weight.reshape(groups, -1, self.weight.shape[1], taps).swapaxes(1, 2)
        else:
            weight = self.weight.reshape(groups, len(self.weight) // groups, -1, taps)
        inputs = math.prod(means.shape[1:]) // groups  # said, since there may be no example
        sums = means.reshape(len(means), groups, inputs).swapaxes(0, 1)
        found = np.matmul(sums, weight.reshape(groups, weight.shape[1], -1).swapaxes(1, 2))
        return found.swapaxes(0, 1).reshape(len(means), groups * weight.shape[1])

    def _with_bias(self, means: NumpyArray, factor: float = 1.0) -> NumpyArray:
        return np.asarray(means if self.bias is None else means + factor * self.bias.reshape(-1), np.float64)


def _is_linear(node: ir.Node) -> bool:
    """Return True where the weight and the geometry of a node are ones that the formula has."""
    if node.domain not in ("", "ai.onnx"):
        return False
    attributes = node.attributes
    if node.op_type == "ConvTranspose":
        return attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in attributes
    return node.op_type in ("Conv", "MatMul") or (node.op_type == "Gemm" and not attributes.get_int("transA", 0))


def _constant_input(node: ir.Node, index: int, read: Callable[[ir.Value], NumpyArray] = constant) -> NumpyArray | None:
    """A constant, or what is decoded from one, float32; None for what a run computes."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return None
    if is_constant(value):
        return np.asarray(constant(value), np.float32)
    source = value.producer()
    if source is None or not is_plain_decoder(source) or not is_constant(source.inputs[0]):
        return None
    codes = source.inputs[0]
    assert codes is not None
    return decoded_codes(source, read(codes) if codes.is_initializer() else constant(codes))


class _Geometry(NamedTuple):
    """The window of a convolution: of each axis its size, step, dilation, padding before, after, and of the output."""

    transposed: bool
    auto_pad: str
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    output_padding: tuple[int, ...]

    @classmethod
    def of(cls, node: ir.Node, kernel: tuple[int, ...]) -> _Geometry:
        """That of a Conv or ConvTranspose whose weight has these positions."""
        attributes, axes = node.attributes, len(kernel)

        def numbers(name: str, default: int, count: int) -> tuple[int, ...]:
            return tuple(attributes.get_ints(name, [])) or (default,) * count

        pads = numbers("pads", 0, 2 * axes)
        return cls(
            node.op_type == "ConvTranspose", attributes.get_string("auto_pad", "NOTSET"), kernel,
            numbers("strides", 1, axes), numbers("dilations", 1, axes), pads[:axes], pads[axes:],
            numbers("output_padding", 0, axes),
        )  # fmt: skip

    def taps(self, axis: int, size: int) -> tuple[NumpyArray, int]:
        """Which positions of an axis of what is read each tap uses, (taps, positions); how many it gives."""
        kernel, stride, step = self.kernel[axis], self.strides[axis], self.dilations[axis]
        before, after, reach = self.before[axis], self.after[axis], step * (kernel - 1) + 1
        place = np.arange(size)[None, :]
        tap = step * np.arange(kernel)[:, None]
        if self.transposed:
            count = stride * (size - 1) + self.output_padding[axis] + reach - before - after
            given = place * stride + tap - before
            return ((given >= 0) & (given < count)).astype(np.float32), count
        if self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            count = -(-size // stride)
            padding = max((count - 1) * stride + reach - size, 0)
            before = padding // 2 if self.auto_pad == "SAME_UPPER" else padding - padding // 2
        else:
            before, after = (0, 0) if self.auto_pad == "VALID" else (before, after)
            count = (size + before + after - reach) // stride + 1
        start = place + before - tap
        read = (start % stride == 0) & (start >= 0) & (start < count * stride)
        return read.astype(np.float32), count


_AT_ONCE = 1 << 18
"""Taps times positions of a window that is summed in one product; the table of it is kept."""


@lru_cache(maxsize=256)
def _taps(geometry: _Geometry, sizes: tuple[int, ...]) -> tuple[list[NumpyArray], int]:
    """The taps of each axis, and how many positions the output has."""
    found = [geometry.taps(axis, size) for axis, size in enumerate(sizes)]
    return [taps for taps, _ in found], math.prod(count for _, count in found)


@lru_cache(maxsize=64)
def _all_taps(geometry: _Geometry, sizes: tuple[int, ...]) -> NumpyArray:
    """The taps of all axes as one matrix, (positions, taps)."""
    return np.asarray(reduce(np.kron, _taps(geometry, sizes)[0]).T, order="C")
