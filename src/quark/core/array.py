"""One body of code for numpy arrays and torch tensors.

`namespace(x)` is the module whose functions compute on `x`. numpy and torch agree on most names that the
numerics need (`abs`, `where`, `floor`, `round`, `clip`, `amax(x, axis=..., keepdims=...)`), so only the few
that differ are here. torch is never imported: it is found in `sys.modules` once a tensor exists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from quark.errors import NotSupportedError

Array = Any
"""A `numpy.ndarray` or a `torch.Tensor`."""

NumpyArray = np.ndarray[Any, Any]
"""A `numpy.ndarray` of any type and shape."""


def is_torch(x: Array) -> bool:
    """Return True where `x` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_cpu(x: Array) -> bool:
    """Return True where `x` is an array of numpy, or a tensor on the CPU."""
    return not is_torch(x) or x.device.type == "cpu"


def namespace(x: Array) -> Any:
    """Return the module (`numpy` or `torch`) that computes on `x`."""
    return sys.modules["torch"] if is_torch(x) else np


def astype(x: Array, dtype: str) -> Array:
    """Convert `x` to the dtype named `dtype` ("float32", "int32", ...); no copy if it has it already."""
    if is_torch(x):
        return x.to(getattr(sys.modules["torch"], dtype))
    return np.asarray(x).astype(dtype, copy=False)


def dtype_name(x: Array) -> str:
    """Name of the element type of `x`: "float32", "bfloat16", ..."""
    return str(x.dtype).removeprefix("torch.")


def view(x: Array, dtype: str) -> Array:
    """Reinterpret the bits of `x` as another dtype of the same width.

    Raises NotSupportedError within `torch.jit.trace`, which ends in an assertion of its own of such a graph.
    """
    if not is_torch(x):
        return x.view(dtype)
    torch = sys.modules["torch"]
    if torch.jit.is_tracing():
        raise NotSupportedError(
            "torch.jit.trace has no operator that reads the bits of a number, as this type needs it. Possible: "
            "torch.export.export or torch.compile, or quark.torch.dequantize(model) before."
        )
    return x.view(getattr(torch, dtype))


def like(value: Any, x: Array, dtype: str = "float32") -> Array:
    """Return `value` as an array of the library and on the device of `x`."""
    if is_torch(x):
        torch = sys.modules["torch"]
        return torch.as_tensor(value, dtype=getattr(torch, dtype), device=x.device)
    return np.asarray(value, dtype=dtype)


_COPIES: dict[tuple[object, str], Array] = {}


def copied_once(key: object, make: Callable[[], NumpyArray], x: Array) -> Array:
    """A float32 constant of that name in the library and on the device of `x`: each copy to a device waits for it."""
    place = (key, str(x.device) if is_torch(x) else "numpy")
    if place not in _COPIES:
        _COPIES[place] = like(make(), x)
    return _COPIES[place]


def over(x: Array, number: float) -> Array:
    """Float32 values divided by a number, rounded once.

    On a GPU torch multiplies by the reciprocal of a number that is no tensor, which is rounded twice.
    """
    return x / number if on_cpu(x) else x / copied_once(number, lambda: np.asarray(number, np.float32), x)


def row_major(x: Array) -> Array:
    """`x` with its last axis contiguous, as native code and kernels read it; a copy only where it is not."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return `x` as a numpy array on the host (bfloat16 tensors become float32, which holds them exactly)."""
    if is_torch(x):
        torch = sys.modules["torch"]
        x = x.detach().to("cpu")
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    return np.asarray(x)


def minmax(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """Minimum and maximum over `axes`, which stay with length 1. NaN in, NaN out; 0 for no values."""
    axes = tuple(axes)
    xp = namespace(x)
    if not axes:
        # Nothing to reduce (torch would reduce everything); a copy, because statistics outlive x.
        return x * 1, x * 1
    if 0 in x.shape:
        empty = xp.zeros_like(x).sum(axis=axes, keepdims=True)
        return empty, empty
    if is_torch(x):
        if len(axes) == x.ndim:
            low, high = x.aminmax()
            return low.reshape([1] * x.ndim), high.reshape([1] * x.ndim)
        # torch reduces runs of 128 bytes or more of the innermost axis, and whole columns, two to eight times faster in
        # two passes of `amin` and `amax`, which are vectorised, than by `aminmax`.
        short = axes[0] in (-1, x.ndim - 1) and x.shape[axes[0]] * x.itemsize < 128
        if len(axes) == 1 and (x.device.type != "cpu" or short):
            return tuple(x.aminmax(dim=axes[0], keepdim=True))
    return xp.amin(x, axis=axes, keepdims=True), xp.amax(x, axis=axes, keepdims=True)


def pad_axis(x: Array, axis: int, count: int) -> Array:
    """Append `count` zeros along `axis`."""
    if count == 0:
        return x
    xp = namespace(x)
    shape = list(x.shape)
    shape[axis] = count
    tail = x.new_zeros(shape) if is_torch(x) else np.zeros(shape, dtype=x.dtype)
    return xp.concatenate([x, tail], axis=axis)


CACHE_CHUNK, DEVICE_CHUNK = 1 << 17, 1 << 28
"""Bytes that are worked on at once: on a CPU, and on a device, where each step is a kernel to be launched."""


def chunk_bytes_for(x: Array) -> int:
    """How much of x to work on at once."""
    return CACHE_CHUNK if on_cpu(x) else DEVICE_CHUNK


ONE_THREAD = 1 << 25
"""Multiplications of a matrix product up to which a second thread costs more than it gives: about a millisecond.
Between two products threads wait by spinning, which takes from others the cores that it waits for."""


@contextmanager
def threads_for(x: Array, products: int) -> Iterator[None]:
    """Let torch run many short steps on one thread.

    Args:
        x: What is computed on; numpy, and a tensor on a device, are left alone.
        products: Multiplications of the largest matrix product of a step.
    """
    if not is_torch(x) or x.device.type != "cpu" or products > ONE_THREAD:
        yield
        return
    torch = sys.modules["torch"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def row_chunks(rows: int, row_bytes: int, chunk_bytes: int = CACHE_CHUNK) -> Iterator[slice]:
    """Slices over `rows` so that one chunk and its half dozen temporaries stay in the L2 cache.

    At 128 KB an elementwise step is also just too short for torch to spread it over threads, which costs more than it
    gains: measured, 512 KB is up to three times slower.
    """
    step = max(1, chunk_bytes // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
