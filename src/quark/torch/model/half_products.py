"""Products of 16-bit floats on a processor without instructions for them: computed in float32, rounded once.

    y = round16(a32 b32),   a32 and b32 the operands, exact in float32

What such a processor does by itself has the same sums in another order, and takes 4 times as long where it has a
routine (float16 times a transposed weight) and 100 times where it has none (gradients, attention).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROWS = 8
"""Fewer rows (a token that is generated) are multiplied sooner as they are than widened with all of a weight."""
PIECE = 1 << 24
"""Elements of a matrix that are widened at once: a head over many words would take twice its size more."""


@contextmanager
def half_products(model: nn.Module) -> Iterator[None]:
    """Within: what this thread computes of the model, forward and back, is fast in any of its types on a CPU.

    Nothing happens where the model has no parameter of a type that the processor lacks. Sums are those of float32
    operands, rounded to the type of the model where that does it, so that results differ by the order of summation.

    Args:
        model: With or without its weights; not changed.
    """
    lacking = lacking_types()
    if getattr(_THREAD, "widens", False) or not any(p.dtype in lacking for p in model.parameters()):
        yield
        return
    _THREAD.widens = True
    try:
        with _Widened(lacking):
            yield
    finally:
        _THREAD.widens = False


_THREAD = threading.local()
"""Of a thread: whether it `widens` products already."""


@cache
def lacking_types() -> frozenset[torch.dtype]:
    """The 16-bit floats that the processor has no products for."""
    knows = torch.ops.mkldnn
    asked = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}
    return frozenset(dtype for dtype, name in asked.items() if hasattr(knows, name) and not getattr(knows, name)())


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator, those of backward too, and computes the products itself."""

    def __init__(self, lacking: frozenset[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lacking = lacking

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code that the user has compiled stay compiled: PyTorch asks this."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        product = PRODUCTS.get(operator)
        if product is None or (dtype := self._lacked_by(args)) is None:
            return operator(*args, **(kwargs or {}))
        return product(operator, args, kwargs or {}, dtype)

    def _lacked_by(self, args: Sequence[Any]) -> torch.dtype | None:
        """The type of operands that are to be widened, on a CPU and of several rows."""
        operand = next((x for x in args if isinstance(x, torch.Tensor) and x.dim() > 1), None)
        if operand is None or operand.dtype not in self.lacking or operand.device.type != "cpu":
            return None
        return operand.dtype if operand.shape[-2] >= ROWS else None


def _widened(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The operator on float32, each of its results rounded."""
    wide, named = _wide((tuple(args), dict(kwargs)), dtype)
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) else x, operator(*wide, **named))


def _attention(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Attention, whose second result, the logarithms of its sums, is float32 for every type."""
    wide, named = _wide((tuple(args), dict(kwargs)), dtype)
    values, *others = operator(*wide, **named)
    return (values.to(dtype), *others)


def _matrices(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Of two matrices, perhaps with an offset: some columns of the second one at a time."""
    *offset, a, b = args
    if b.numel() <= PIECE:
        return _widened(operator, args, kwargs, dtype)
    wide, columns = a.float(), max(1, PIECE // len(b))
    found = torch.empty(len(a), b.shape[1], dtype=dtype, device=a.device)
    for start in range(0, b.shape[1], columns):
        piece = slice(start, start + columns)
        own = [x.expand_as(found)[:, piece].float() for x in offset]
        found[:, piece] = operator(*own, wide, b[:, piece].float(), **kwargs)
    return found


def _wide(given: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype is dtype else x, given)


_aten = torch.ops.aten
PRODUCTS: dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any], torch.dtype], Any]] = {
    _aten.mm.default: _matrices,
    _aten.addmm.default: _matrices,
    _aten.bmm.default: _widened,
    _aten.baddbmm.default: _widened,
    _aten.linear.default: _widened,
    _aten.convolution.default: _widened,
    _aten.convolution_backward.default: _widened,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _widened,
}
"""Operators of which a 16-bit float is many times slower, and how each is computed instead."""
