"""Forwards of single modules: another one for a while.

A module may have a forward of its own already, as those of a model with a `device_map` do: it moves tensors between
devices, and has to be there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from quark.base.libraries.accelerate import BEFORE, HOOK


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
    for name in ("forward", BEFORE, HOOK):
        copied.__dict__.pop(name, None)
    return copied


OFF = ("use_cache", "output_router_logits")
"""Switches of configs for outputs that only running blocks give, once: a cache would grow with each run of a block."""


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Within: the model makes nothing that would grow with each run of a block."""
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(each, name, getattr(each, name)) for each in configs.values() for name in OFF if hasattr(each, name)]
    try:
        for config, name, _ in before:
            setattr(config, name, False)
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def without_cache_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block without caches, which would grow with each of its runs."""

    def kept(x: Any) -> Any:
        return None if hasattr(x, "get_seq_length") else x

    return tuple(map(kept, args)), {key: kept(x) for key, x in kwargs.items()}
