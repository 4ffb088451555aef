"""Codes in a state dict, which are no weights of a float layer, as little as their scales are.

Networks of diffusers are made from others so, as `ControlNetModel.from_unet` is: each part takes the state dict of the
other's. torch asks what a state dict notes on a layer before it looks at shapes and names, and is told the way there.
Where the notes are lost, codes that are copied into a float tensor of the shape that they stand for become its values:
they themselves would be weights a hundred times too large, without an error.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quark.errors import NotSupportedError


class NotesOnCodes(dict[str, Any]):
    """Notes of a state dict on a layer that holds codes, as its version. No layer without codes is loaded with them."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a note. Raises NotSupportedError where torch begins to load a float layer."""
        if key == "assign_to_params_buffers":
            raise NotSupportedError(
                "A float layer is loaded from the state of a quantized one, which holds codes and scales. Possible: "
                "the state, or the network, of quark.torch.dequantize(copy.deepcopy(model)), whose weights are float."
            )
        return super().get(key, default)

    def __deepcopy__(self, memo: Any) -> NotesOnCodes:
        """Notes on the codes that are copied with them."""
        return NotesOnCodes(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As plain notes, of plain codes, of a type that torch reads again."""
        return OrderedDict, (), None, None, iter(self.items())


class CopiedCodes(torch.Tensor):
    """Codes as they are stored, in their memory. Whatever else is done to them is done to plain codes."""

    decoder: nn.Module
    extras: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, codes: torch.Tensor, decoder: nn.Module, extras: Mapping[str, torch.Tensor]) -> CopiedCodes:
        """Codes that know what decodes them.

        Args:
            codes: As a layer stores them.
            decoder: Its quantizer, which has the shape of the float tensor; a copy with the tensors of now is kept.
            extras: What else of the layer that needs.
        """
        with torch._C.DisableTorchFunctionSubclass():
            made = codes.detach().as_subclass(cls)
        made.decoder, made.extras = copy.copy(decoder), dict(extras)
        made.decoder._buffers = dict(decoder._buffers)
        return made

    @property
    def coded(self) -> torch.Tensor:
        """The codes as a plain tensor."""
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Decode what is copied into a float tensor. `nn.Parameter` asks that detached codes are such codes."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.detach:
                return cls.of(args[0], args[0].decoder, args[0].extras)
            if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], cls):
                into, codes = args[:2]
                floats = into.is_floating_point() and into.dtype.itemsize > 1 and into.dtype != codes.dtype
                if floats and tuple(into.shape) == tuple(codes.decoder.shape):
                    args = (into, codes.decoder(codes.coded, codes.extras), *args[2:])
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> CopiedCodes:
        """In memory of its own."""
        return CopiedCodes.of(self.coded.clone(), copy.deepcopy(self.decoder, memo), copy.deepcopy(self.extras, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As plain codes."""
        return self.coded.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
