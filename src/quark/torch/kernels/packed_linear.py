"""PackedLinear: a quantized linear layer that multiplies with its codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quark.core.quantize import dequantize
from quark.errors import NotSupportedError
from quark.torch.kernels.kernel import CodedWeight, Kernel, Packed
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.linear import QuantLinear
from quark.torch.layers.low_rank import with_branch

ROWS = (1, 8, 64)
"""Numbers of rows (tokens) that are measured. A call takes the way that was fastest at the first that is not smaller
than its own number of rows, or at the last."""


_PREPARED = ("_multiply", "_packed")
"""Attributes that a layer finds out once from its others."""


class PackedLinear(nn.Module):
    """Stands where a QuantLinear was, and holds the codes of its weight in the layout of a kernel.

    Hooks, bias, and the quantizers of input and output stay as they were.

    Args:
        layer: What it replaces; not changed.
        kernel: Keeps the codes and multiplies.
        ways: The name of the kernel's way for each of ROWS.
        weight: The codes.
        packed: What `kernel` packs of them; None: packed here.
    """

    is_packed = True
    input_quantizer: nn.Module | None
    output_quantizer: nn.Module | None
    bias_quantizer: nn.Module | None
    weight_quantizer: nn.Module
    bias: nn.Parameter | None

    def __init__(
        self,
        layer: QuantLinear,
        kernel: Kernel,
        ways: tuple[str, ...],
        weight: CodedWeight,
        packed: Packed | None = None,
    ) -> None:
        super().__init__()
        # Hooks, flags, quantizers and stored tensors: as from_float takes them over.
        self.__dict__.update({key: copy.copy(value) for key, value in layer.__dict__.items()})
        del self._parameters["weight"]
        self.layer_class = type(layer)
        self.kernel, self.ways, self.shape = kernel, ways, weight.shape
        self.dtype = weight.dtype
        self.constants: dict[str, Any] = {}
        for name, value in (packed or kernel.pack(weight)).items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"packed_{name}", value)
            else:
                self.constants[name] = value

        self._prepare()

    def _prepare(self) -> None:
        """Look once at what each call needs: in small layers that takes longer than the product."""
        found = self.kernel.ways(self.input_quantizer)
        self._multiply = tuple(found[way] for way in self.ways)
        self._packed = self.packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        gradient = torch.is_grad_enabled()
        x = input.detach() if gradient else input
        quantizer = None if self.kernel.takes_codes else self._modules["input_quantizer"]
        rows = x if quantizer is None else quantizer(x)
        rows = rows if rows.ndim == 2 else rows.reshape(-1, self.shape[1])
        way = 0 if rows.shape[0] <= ROWS[0] else 1 if rows.shape[0] <= ROWS[1] else 2
        y = self._multiply[way](rows, self._packed) if rows.shape[0] else rows.new_zeros(0, self.shape[0])
        bias = self._parameters["bias"]
        if bias is not None:
            y = y + (bias if self.bias_quantizer is None else self.bias_quantizer(bias)).detach()
        y = y if input.ndim == 2 else y.reshape(*input.shape[:-1], self.shape[0])
        y = with_branch(self, x, y)
        if self._modules["output_quantizer"] is not None:
            y = self._modules["output_quantizer"](y)
        if gradient and input.requires_grad:
            result: torch.Tensor = _WithoutGradient.apply(input, y)  # type: ignore[no-untyped-call]
            return result
        return y

    def __getstate__(self) -> dict[str, Any]:
        """Without what `_prepare` finds: functions that belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key not in _PREPARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def _load_from_state_dict(self, *args: Any) -> None:
        tensors, prefix, *_, errors = args
        for name, own in self._buffers.items():
            given = tensors.get(prefix + name)
            if own is not None and isinstance(given, torch.Tensor) and given.dtype != own.dtype:
                # Another kind of device packs codes otherwise; torch would convert the values.
                errors.append(f"{prefix}{name} is {given.dtype}; this device packs {own.dtype}.")
        super()._load_from_state_dict(*args)
        self._prepare()

    @property
    def packed(self) -> dict[str, Any]:
        """The tensors and constants that the kernel keeps."""
        tensors = {n.removeprefix("packed_"): t for n, t in self._buffers.items() if n.startswith("packed_")}
        return {"rest": None, **tensors, **self.constants}

    @property
    def weight(self) -> torch.Tensor:
        """The decoded weight, (out_features, in_features) in the dtype of the layer; made anew at each access."""
        quantizer: Any = self.weight_quantizer
        if isinstance(quantizer, FakeQuantize):
            params = quantizer.params
        else:
            params = quantizer.params(QuantLinear.extras(self, "weight"))  # type: ignore[arg-type]
        codes = self.kernel.codes(self.packed, self.shape)
        assert params is not None
        decoded: torch.Tensor = dequantize(codes, params, quantizer.spec)
        return decoded.clamp(-65504, 65504).half() if self.dtype == torch.float16 else decoded.to(self.dtype)

    def unpacked(self) -> QuantLinear:
        """The layer that this one replaced, with a frozen weight."""
        layer = self.layer_class.__new__(self.layer_class)
        layer.__dict__.update({key: copy.copy(value) for key, value in self.__dict__.items()})
        for name in ("layer_class", "kernel", "ways", "shape", "dtype", "constants", *_PREPARED):
            del layer.__dict__[name]
        for name in [name for name in layer._buffers if name.startswith("packed_")]:
            del layer._buffers[name]
        layer._parameters["weight"] = nn.Parameter(self.weight, requires_grad=False)
        if isinstance(layer.weight_quantizer, FakeQuantize):
            layer.weight_quantizer.mode = Mode.frozen
        else:
            layer.add_module("weight_quantizer", None)  # what decoded the stored tensors
        return layer

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Refuse what changes device or dtype: the codes are packed for one device, the scales for one kernel."""
        device = next(t for n, t in self._buffers.items() if n.startswith("packed_") and t is not None).device
        probe = torch.zeros(1, dtype=self.dtype, device=device)
        moved = fn(probe)
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise NotSupportedError(
                f"An accelerated layer stays {self.dtype} on {device}; asked for: {moved.dtype} on {moved.device}. "
                "Possible: disable_native_inference(model), then move it, then accelerate(model)."
            )
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.shape[1]}, out_features={self.shape[0]}, kernel={self.kernel.name}, ways={self.ways}"


class _WithoutGradient(torch.autograd.Function):
    """Says that the layer has no gradient where one is asked for, instead of giving none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotSupportedError(
            "An accelerated layer has no gradient. Possible: disable_native_inference(model) before training."
        )
