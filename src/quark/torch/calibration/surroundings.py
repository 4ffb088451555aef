"""The surroundings of a job: what a program has set in torch for its own arithmetic changes no code of a model.

It does not change what is loaded of a file either.

Autocast would round the products of solvers to 16 bits, a default dtype of 64 bits make tensors that others do not fit,
and products in TF32 or bfloat16 lose the digits that second moments need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Within: no autocast, tensors are float32 by default and on the CPU, products of float32 are in float32.

    All of it is as it was afterwards.
    """
    with ExitStack() as stack:
        accelerator = torch.accelerator.current_accelerator()
        for device in {"cpu"} if accelerator is None else {"cpu", accelerator.type}:
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(default_dtype(torch.float32))
        stack.enter_context(_exact_products())
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within: tensors that are made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Within: products of float32 are not computed in TF32 or bfloat16, whichever of torch's settings asks for it."""
    libraries = [
        x for x in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)) if x is not None
    ]
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for one library, which has no name here
        precisions = [library.fp32_precision for library in libraries]
        for library in libraries:
            library.fp32_precision = "ieee"
        try:
            yield
        finally:
            for library, precision in zip(libraries, precisions, strict=True):
                library.fp32_precision = precision
        return
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
