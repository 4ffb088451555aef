"""QuantStub and DeQuantStub: mark the region of a model that graph mode quantizes. Both return their input.

    def forward(self, x):
        x = self.float_part(x)
        x = self.quantized_part(QuantStub(x))
        return self.head(DeQuantStub(x))

The operators `torch.ops.quark_quant.QuantStub` and `.DeQuantStub` exist from the moment this file is imported.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeQuantStub", "QuantStub"]

_LIBRARY = torch.library.Library("quark_quant", "DEF")  # type: ignore[no-untyped-call]


def _identity(input: torch.Tensor) -> torch.Tensor:
    # An operator may not return its input itself.
    return input.view_as(input)


for _name in ("QuantStub", "DeQuantStub"):
    _LIBRARY.define(f"{_name}(Tensor(a) input) -> Tensor(a)")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _identity, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # The gradient is that of the view, which is recorded when the kernel runs.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]

QuantStub: Any = torch.ops.quark_quant.QuantStub
DeQuantStub: Any = torch.ops.quark_quant.DeQuantStub
