"""Forwards of single modules: another one for a while, and those of a model with a `device_map`.

A module may have a forward of its own already, as those of a model with a `device_map` do: it moves tensors between
devices, and has to be there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from quark.errors import NotSupportedError


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
    """A copy of a module, which calls the forward of its class."""
    copied.__dict__.pop("forward", None)
    return copied


def refuse_offloaded(model: nn.Module) -> None:
    """Raise NotSupportedError for a module whose weights accelerate keeps on the CPU or on disk; names it."""
    for name, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        hooks = (hook, *getattr(hook, "hooks", ()))
        if any(getattr(one, "offload", False) for one in hooks) and any(p.is_meta for p in module.parameters()):
            raise NotSupportedError(
                f"{name or 'The model'} lies on the CPU or on disk by its device_map, and accelerate hands its weights "
                "out only while it runs. Possible: load the model without a device_map, with QuantFlow.per_block, "
                "whose blocks visit the GPU; or stream its folder."
            )
