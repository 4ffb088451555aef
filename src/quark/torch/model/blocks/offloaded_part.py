"""A part of a model that lies elsewhere than where it runs: a block, or a layer outside, which visits its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.base.libraries.accelerate import hook_of
from quark.torch.model.blocks.mapped_tensors import keep_in_file

Home = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and its values where it lies when it is not on its device."""
CPU = torch.device("cpu")


class OffloadedPart:
    """Stands as `forward` on a module whose weights are elsewhere than where it runs. Copies with its module.

    Args:
        module: The part.
        device: Where it runs, as its hook says it.
        folder: Of files in which changed weights are kept; None: in memory.
        deep: Whether the modules in it belong to it.
    """

    def __init__(self, module: nn.Module, device: Any, folder: Path | None, deep: bool) -> None:
        self.module, self.given, self.folder, self.deep = module, device, folder, deep
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or CPU)
        self.inner = module.__dict__.get("forward")
        self.depth = 0
        self.stays = False
        self.homes: list[Home] = []
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its device."""
        if self.depth == 0 and (self.stays or torch.is_grad_enabled() or self._has_others()):
            # Gradients want the weights until long after the forward, and others are not ours: it runs where they lie.
            move(self.tensors(), CPU, [])
            return _moved(self._run(CPU, args, kwargs), self.device)
        self.bring()
        try:
            return self._run(self.device, args, kwargs)
        finally:
            self.leave()

    def _has_others(self) -> bool:
        """Return True where somebody put tensors in the place of parameters, as functional calls do."""
        found = (x for module in self.modules() for x in module._parameters.values())
        return any(x is not None and not isinstance(x, nn.Parameter) for x in found)

    def _run(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.inner or type(self.module).forward.__get__(self.module)
        return forward(*_moved(args, device), **_moved(kwargs, device))

    def take_over(self, module: nn.Module) -> None:
        """Stand on another module, too, which takes the place of this one, around the forward that it has."""
        OffloadedPart(module, self.given, self.folder, self.deep)

    def modules(self) -> Iterator[nn.Module]:
        """Those that belong to the part."""
        yield from self.module.modules() if self.deep else (self.module,)

    def tensors(self) -> list[torch.Tensor]:
        """Its parameters and buffers."""
        return tensors_of(self.modules())

    def bring(self) -> None:
        """Let the weights be on the device, from now on or as they are."""
        self.depth += 1
        if self.depth == 1:
            move(self.tensors(), self.device, self.homes, copies=self.folder is not None)
            self.run_on(self.given)

    def take(self) -> None:
        """Let them be where they lie, with the values that they have now."""
        if self.depth == 1:
            settle(self.tensors(), self.homes, self.folder)
            self.homes = []
        self.leave()

    def leave(self) -> None:
        """Let them be where they lie, with the values that they had."""
        self.depth -= 1
        if self.depth == 0:
            for tensor, home in self.homes:
                tensor.data = home
            self.homes = []
            self.run_on(CPU)

    def run_on(self, device: Any) -> None:
        """Let accelerate's hooks move arguments there."""
        for module in self.modules():
            for hook in hooks_of(module):
                if hasattr(hook, "execution_device"):
                    hook.execution_device = device


def hooks_of(module: nn.Module) -> list[Any]:
    """Accelerate's hooks on a module."""
    hook = hook_of(module)
    return [] if hook is None else [*getattr(hook, "hooks", (hook,))]


def part_on(module: nn.Module) -> OffloadedPart | None:
    """Return the forward of a module, if it is an OffloadedPart."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, OffloadedPart) else None


def parts_of(model: nn.Module) -> list[OffloadedPart]:
    """All parts in a module, itself among them."""
    return [part for part in map(part_on, model.modules()) if part is not None]


def tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    found = (x for m in modules for x in (*m._parameters.values(), *m._buffers.values()) if x is not None)
    return [*{id(x): x for x in found}.values()]


def move(tensors: Iterable[torch.Tensor], device: torch.device, homes: list[Home], copies: bool = False) -> None:
    """Let tensors have their values on a device.

    Args:
        tensors: Stay the same objects.
        device: Where to.
        homes: Gets where those that move were, one by one: a device may have no room for the next.
        copies: Whether a tensor that is there already becomes a copy, for what it is must not be written to.
    """
    for tensor in tensors:
        if tensor.device != device or copies:
            home = tensor.data
            tensor.data = home.to(device, copy=copies)
            homes.append((tensor, home))


def _fitting_home(home: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor | None:
    """Where a tensor was, if it has the shape and the dtype of then."""
    fits = home is not None and home.shape == now.shape and home.dtype == now.dtype
    return home if fits else None


def settle(tensors: Iterable[torch.Tensor], homes: Iterable[Home], folder: Path | None) -> None:
    """Let tensors that were moved be where they were, with the values of now; what was made meanwhile is there, too."""
    known = {id(tensor): home for tensor, home in homes}
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in tensors:
        now = tensor.data
        home = _fitting_home(known.get(id(tensor)), now)
        if folder is None and home is not None and not home.is_inference():
            home.copy_(now)
            tensor.data = home
        elif folder is None or not isinstance(tensor, nn.Parameter):
            tensor.data = now.to(CPU)
        elif home is not None and torch.equal(home, now.to(CPU)):
            tensor.data = home
        else:
            changed.append((tensor, now.to(CPU)))
    if changed and folder is not None:
        kept = keep_in_file([value for _, value in changed], folder)
        for (tensor, _), value in zip(changed, kept, strict=True):
            tensor.data = value


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)
