"""QuantLayer: what every quantized layer shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.base.libraries.accelerate import BEFORE, HOOK, hook_of
from quark.core.spec import LayerSpec
from quark.torch.layers.fake_quant import FakeQuantize, Mode

ROLES = ("weight", "bias", "input", "output")
"""The tensors of a layer that can be quantized; `<role>_quantizer` is the module that does it."""


EXTRA_SUFFIXES = ("scale_2", "zero_point_2", "shift", "g_idx")
"""Second-level scale and zero point, the pair shifts of the micro-exponent formats, and the group of each input."""


class QuantLayer(nn.Module):
    """Mixin before a float layer class: quantizes weight, bias, input and output around its forward.

    Subclasses are `class QuantX(QuantLayer, nn.X)` and define `forward` with `self.quantized(role, tensor)`.

    Attributes:
        float_class: The layer that is replaced.
        weight_quantizer, bias_quantizer, input_quantizer, output_quantizer: Modules, or None to keep float.
    """

    float_class: ClassVar[type[nn.Module]]
    spec: LayerSpec

    @classmethod
    def from_float(cls, module: nn.Module, spec: LayerSpec) -> QuantLayer:
        """A quantized layer that shares parameters, hooks and flags with `module`, which stays as it is."""
        layer = cls.__new__(cls)
        # A shallow copy of the attributes: nothing is allocated or initialised, even for huge or meta weights.
        layer.__dict__.update({key: copy.copy(value) for key, value in module.__dict__.items()})
        take_over_forward(layer, module)
        layer.attach(spec)
        return layer

    def attach(self, spec: LayerSpec) -> None:
        """Add the quantizers that the spec asks for, without scales, each of the class of the one in its place."""
        self.spec = spec
        for role in ROLES:
            tensor_spec = getattr(spec, role)
            absent = role == "bias" and getattr(self, "bias", None) is None
            before = self._modules.get(f"{role}_quantizer")
            kind = type(before) if isinstance(before, FakeQuantize) else FakeQuantize
            quantizer = None if tensor_spec is None or absent else kind(tensor_spec)
            self.add_module(f"{role}_quantizer", quantizer)

    def quantizer(self, role: str) -> nn.Module | None:
        """The module that quantizes `role`, or None."""
        return self._modules[f"{role}_quantizer"]

    @property
    def float_weight(self) -> torch.Tensor:
        """The weight, or where it is stored as codes a tensor on the meta device of the shape and dtype they decode to.

        Of its values only those that are there may be read.
        """
        weight: torch.Tensor = getattr(self.quantizer("weight"), "float_like", self.weight)  # type: ignore[arg-type]
        return weight

    def quantized(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """x, quantized as the role's spec says."""
        quantizer = self.quantizer(role)
        if quantizer is None:
            return x
        # A frozen layer is as fast as the float one: calling a module that gives its input back costs as much as the
        # product of a small layer. An export puts a forward of its own into the module, which marks the tensor.
        idle = type(quantizer) is FakeQuantize and (quantizer.mode is Mode.frozen or quantizer.mode is Mode.off)
        if idle and "forward" not in quantizer.__dict__:
            return x
        result: torch.Tensor = quantizer(x, self.extras(role))
        return result

    def quantized_weight(self) -> torch.Tensor:
        """The weight, quantized as its spec says."""
        return self.quantized("weight", self.weight)  # type: ignore[arg-type]

    def quantized_bias(self) -> torch.Tensor | None:
        """The bias, quantized as its spec says."""
        bias: torch.Tensor | None = getattr(self, "bias", None)
        return bias if bias is None else self.quantized("bias", bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        """Load, also from the state of a layer that holds codes; see `NotesOnCodes`."""
        super()._load_from_state_dict(state_dict, prefix, dict(metadata), *rest)

    def extras(self, role: str) -> dict[str, torch.Tensor]:
        """Tensors of a loaded checkpoint that live on the layer under their file names: transformers renames only
        scale and zero point to `<role>_quantizer.*` when it loads.
        """
        # In torch's own tables: an attribute that is not there costs a search and an exception, in every forward.
        names = {suffix: f"{role}_{suffix}" for suffix in EXTRA_SUFFIXES}
        found = {suffix: self._buffers.get(name, self._parameters.get(name)) for suffix, name in names.items()}
        return {suffix: tensor for suffix, tensor in found.items() if tensor is not None}


def take_over_forward(layer: nn.Module, module: nn.Module) -> None:
    """Let what stands around the forward of a module, which moves tensors between devices, stand around the layer's.

    A model with a `device_map` has it: accelerate's `forward` is a partial of the module, `_old_forward` the method it
    had, and `_hf_hook` what moves. Around that is ours, while a part that lies elsewhere is worked on.
    """
    around = module.__dict__.get("forward")
    inner = getattr(around, "inner", around)
    copied = layer.__dict__.pop("forward", None)
    if isinstance(inner, partial) and BEFORE in module.__dict__:
        arguments = [layer if argument is module else argument for argument in inner.args]
        layer.__dict__["forward"] = update_wrapper(partial(inner.func, *arguments), type(layer).forward)
        layer.__dict__[BEFORE] = MethodType(type(layer).forward, layer)
        layer.__dict__[HOOK] = copy.copy(hook_of(module))
    elif copied is not None:
        layer.__dict__["forward"] = inner
    take_over = getattr(around, "take_over", None)
    if take_over is not None:
        take_over(layer)


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a layer's call, by position or by name (`layer(input=x)`); None without any."""
    return args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()), None)


def hook_input(layer: nn.Module, hook: Callable[[nn.Module, Any], Any]) -> RemovableHandle:
    """Run `hook(layer, x)` before each forward, x as of `input_of`; what it returns, if not None, replaces x."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new = hook(module, input_of(args, kwargs))
        if new is None:
            return None
        if args:
            return (new, *args[1:]), kwargs
        return args, kwargs | {"input" if "input" in kwargs else next(iter(kwargs)): new}

    return layer.register_forward_pre_hook(before, with_kwargs=True)
