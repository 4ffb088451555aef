"""Kernel: one way to keep the weight of a linear layer as codes, and the functions that multiply with it.

    y[m, n] = sum over k of x[m, k] * (q[n, k] - zero[n, g(k)]) * scale[n, g(k)],    g(k) = k // group

A new kernel is a file here and a line in `quark.torch.kernels.KERNELS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from quark.base.memory_and_disk import is_out_of_memory
from quark.core.quantize import compute_qparams, quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.torch.layers.fake_quant import FakeQuantize

T = TypeVar("T")

AGREEMENT = 2.0**-7
"""A kernel is wrong on this device if it differs from the formula by more than this share of sum |x| |w|: two roundings
to bfloat16, each 2^-9 of what is rounded, twice over. Saturated integer sums differ by far more."""

Packed = Mapping[str, Any]
"""The form in which a kernel keeps a weight: tensors by name, and `Prepacked` weights of oneDNN."""


@dataclass(frozen=True)
class CodedWeight:
    """The weight of a linear layer as codes.

    Attributes:
        codes: Values of the codes, float32 (out_features, in_features).
        scale: float32 (out_features, groups); one group for a scale per channel or tensor.
        zero: Zero point of each group, float32 (out_features, groups), or None where it is 0.
        spec: The spec that the codes are of.
        input_quantizer: What quantizes the layer's input, or None.
        dtype: dtype of the float layer.
        any_rounding: The caller allows bfloat16 inputs and scales in a layer of another dtype.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    spec: TensorSpec
    input_quantizer: torch.nn.Module | None
    dtype: torch.dtype
    any_rounding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def fits_bfloat16(self) -> bool:
        """True where a kernel with bfloat16 inputs and scales loses nothing that the float layer keeps."""
        return self.any_rounding or (
            self.dtype == torch.bfloat16 and torch.equal(self.scale, self.scale.bfloat16().float())
        )

    def decoded(self) -> torch.Tensor:
        """The weight, float32."""
        n, k = self.shape
        groups = self.codes.view(n, -1, self.group)
        zero = 0.0 if self.zero is None else self.zero[:, :, None]
        return ((groups - zero) * self.scale[:, :, None]).view(n, k)


Multiply = Callable[[torch.Tensor, Packed], torch.Tensor]
"""x (rows, in_features), what was packed -> y (rows, out_features) in the dtype of x."""


class Kernel(ABC):
    """One way to keep a weight, and the functions that multiply with it.

    Attributes:
        name: Of the kernel, in logs and `PackedLinear.kernel`.
        takes_codes: The kernel quantizes the input itself; else the layer's input quantizer runs before it.
    """

    name: ClassVar[str]
    takes_codes: ClassVar[bool] = False

    @abstractmethod
    def fits(self, weight: CodedWeight) -> bool:
        """Return True where the kernel computes this layer on the device of its codes."""

    @abstractmethod
    def pack(self, weight: CodedWeight) -> dict[str, Any]:
        """Return the tensors and constants that are kept of the weight."""

    @abstractmethod
    def codes(self, packed: Packed, shape: tuple[int, int]) -> torch.Tensor:
        """Inverse of `pack`: the codes, float32 of `shape`."""

    @abstractmethod
    def ways(self, input_quantizer: torch.nn.Module | None) -> dict[str, Multiply]:
        """Functions that compute the layer, by name; which of them is fastest depends on the number of rows."""


def input_codes(x: torch.Tensor, quantizer: FakeQuantize) -> tuple[torch.Tensor, QParams]:
    """Codes of a layer's input as `quantizer` makes them, as floats, and their scales."""
    params = quantizer.params_for(x) or compute_qparams(x, quantizer.spec)
    return quantize(x, params, quantizer.spec), params


def attempted(attempt: Callable[[], T]) -> T | Exception:
    """The result of what a device may not be able to do, or the error in which it ended: a driver fails in its own way.

    Memory that was full says nothing of what the device can do, and is raised.
    """
    try:
        return attempt()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error


class KernelOptions(Protocol):
    """An option that says which kernels a model may use: RuntimeOptions."""

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels. Raises for options that cannot be obeyed."""
