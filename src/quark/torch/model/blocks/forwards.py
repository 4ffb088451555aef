"""Forwards of single modules: another one for a while.

A module may have a forward of its own already, as those of a model with a `device_map` do: it moves tensors between
devices, and has to be there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forward_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within: calling the module calls `forward`, between the module's hooks."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before


def with_plain_forward(copied: nn.Module) -> nn.Module:
    """A copy of a module, which calls the forward of its class, and computes where its tensors are."""
    for name in ("forward", "_old_forward", "_hf_hook"):
        copied.__dict__.pop(name, None)
    return copied
