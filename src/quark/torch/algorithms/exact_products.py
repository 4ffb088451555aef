"""Products of float32 matrices whose values are bfloat16, on the units that multiply bfloat16: the same, and faster.

    a b = sum of products of 8-bit significands, each exact in float32; the sum is one in float32 either way

The second moments of the inputs of a bfloat16 model are such products, and the largest part of an algorithm's work
where there is much data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_in_bfloat16(*operands: torch.Tensor) -> Iterator[None]:
    """Within: products on a CPU may round their operands to bfloat16, if these are all of that type.

    The setting is the process's, so nothing but such products belongs inside. PyTorch before 2.9 has none that is the
    CPU's alone; there, and where the processor has no tiles (AMX), products are as ever: the bfloat16 instructions of
    AVX-512 took 1.5 times as long as float32.

    Args:
        operands: What is multiplied, in the type in which it came.
    """
    setting = _setting()
    if setting is None or any(x.dtype is not torch.bfloat16 or x.device.type != "cpu" for x in operands):
        yield
        return
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _setting() -> Any:
    """PyTorch's precision of products by oneDNN, the library of its CPU kernels; None where it would gain nothing."""
    if not _has_tiles():
        return None
    of_products = getattr(torch.backends.mkldnn, "matmul", None)
    return of_products if hasattr(of_products, "fp32_precision") else None


def _has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16."""
    # PyTorch has a public name in its latest versions only; this one is there wherever the setting is.
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
