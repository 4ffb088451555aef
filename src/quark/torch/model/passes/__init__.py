"""Passes: parts of a model that quark has no layer for become parts that it has.

A new one is a file here and a line below.
A pass changes no output, does nothing the second time, and returns what it replaced so that it can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quark.base.libraries.transformers import is_conv1d
from quark.core.names.registry import Registry
from quark.torch.layers.base import take_over_forward
from quark.torch.layers.replace import set_submodule
from quark.torch.model.passes.base import Pass, Wanted
from quark.torch.model.passes.conv1d import as_linear, conv1d_to_linear
from quark.torch.model.passes.unfuse_experts import UnfusedExperts, fused_blocks, other_experts, unfuse_experts

PASSES: Registry[Pass] = Registry("pass")
PASSES.register("conv1d_to_linear", conv1d_to_linear)
PASSES.register("unfuse_experts", unfuse_experts)


def prepare(model: nn.Module, wanted: Wanted) -> dict[str, nn.Module]:
    """Run every pass.

    Args:
        model: Float model, on the meta device too; changed in place, and on any error as it was.
        wanted: Whether the linear layer of a name is to be quantized; the others stay as they are.

    Returns:
        Name -> the module that was replaced; `undo` puts them back.
    """
    originals: dict[str, nn.Module] = {}
    try:
        for run in PASSES.values():
            replaced = run(model, wanted)
            originals.update(replaced)
            for name, module in replaced.items():
                take_over_forward(model.get_submodule(name), module)
    except BaseException:
        undo(model, originals)
        raise
    return originals


def unconverted(model: nn.Module) -> list[str]:
    """Patterns that name what the passes left alone in a model: a config with them leaves it alone again."""
    blocks = [pattern for name in (*fused_blocks(model), *other_experts(model)) for pattern in (name, f"{name}.*")]
    return [name for name, module in model.named_modules() if is_conv1d(module)] + blocks


def made_again(made: nn.Module, original: nn.Module) -> nn.Module:
    """Return the module that a pass makes of the weights that a module has now.

    Args:
        made: What it made of the module before.
        original: The module.
    """
    return UnfusedExperts(original, made.names) if isinstance(made, UnfusedExperts) else as_linear(original)


def undo(model: nn.Module, originals: dict[str, nn.Module]) -> None:
    """Put back what `prepare` replaced."""
    for name, module in originals.items():
        set_submodule(model, name, module)


@contextmanager
def while_prepared(model: nn.Module, wanted: Wanted) -> Iterator[None]:
    """Within: every pass has run, as `prepare` says."""
    originals = prepare(model, wanted)
    try:
        yield
    finally:
        undo(model, originals)


__all__ = [
    "PASSES",
    "Pass",
    "UnfusedExperts",
    "Wanted",
    "made_again",
    "prepare",
    "unconverted",
    "undo",
    "while_prepared",
]
