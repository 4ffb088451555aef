"""The names of accelerate that quark takes beside its documented ones."""

from __future__ import annotations

from typing import Any

from quark.base.libraries.names import Name

NAMES = (
    Name("hooks", "AlignDevicesHook", "brings weights before a forward"),
    Name("hooks", "add_hook_to_module", "puts such a hook on a module"),
    Name("hooks", "_hf_hook", "the hook of a module"),
    Name("utils.modeling", "named_module_tensors", "what a hook brings"),
    Name("utils.modeling", "set_module_tensor_to_device", "takes a weight away"),
)
HOOK = "_hf_hook"
"""The attribute of a module that holds its hook, and the method that stood before one was put on."""
BEFORE = "_old_forward"


def hook_of(module: Any) -> Any:
    """The hook of a module, which may be several in one; None: it has none."""
    return module.__dict__.get(HOOK)


def names_brought(module: Any, hook: Any) -> list[str]:
    """The names of the tensors of a module that a hook brings."""
    from accelerate.utils import named_module_tensors

    found = named_module_tensors(module, hook.offload_buffers, hook.place_submodules, remove_non_persistent=True)
    return [name for name, _ in found]


def bring_before_forward(module: Any, device: Any, weights: Any) -> None:
    """Let a hook bring the weights of a module to a device before each forward.

    Args:
        module: A module.
        device: Where it runs.
        weights: Name of a tensor -> its values.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(module, AlignDevicesHook(device, offload=True, weights_map=weights), append=True)


def take_away(module: Any, name: str) -> None:
    """Leave a tensor of a module without values."""
    from accelerate.utils import set_module_tensor_to_device

    set_module_tensor_to_device(module, name, "meta")
