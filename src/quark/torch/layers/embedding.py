"""QuantEmbedding, and that of a table whose class changes what was looked up.

class ScaledWordEmbedding(nn.Embedding):                        Gemma
def forward(self, ids):
return super().forward(ids) * self.embed_scale          `super()` looks up quantized rows
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional as F

from quark.core.quantize import fake_quantize
from quark.core.scales import QParams
from quark.core.spec import by_row
from quark.torch.layers.base import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode, second_level_of


class QuantEmbedding(QuantLayer, nn.Embedding):
    """Quantized nn.Embedding; weight (num_embeddings, embedding_dim). The input is indices and stays as it is.

    Rows are quantized after they are looked up where each has scales of its own: a table has a hundred thousand rows.
    """

    float_class = nn.Embedding
    made_of: ClassVar[tuple[type, type] | None] = None
    """Of a class that `embedding_class` made: what it was made of, as such a class has no module to be found in."""
    scales_of: Callable[[torch.Tensor], QParams] | None = None
    """Finds the scales of rows, for as long as those of the table are not there."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        apart = self._quantizes_rows(input)
        weight = self.weight if apart else self.quantized_weight()
        y = F.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return self.quantized("output", self._quantized_rows(y, input.reshape(-1)) if apart else y)

    def _quantizes_rows(self, input: torch.Tensor) -> bool:
        quantizer = self.quantizer("weight")
        if type(quantizer) is not FakeQuantize or quantizer.mode is not Mode.quantize or torch.compiler.is_exporting():
            return False
        spec, trains = quantizer.spec, self.weight.requires_grad or quantizer.trained is not None
        # An export puts a forward of its own into the module, which marks the tensor.
        if "forward" in quantizer.__dict__ or self.max_norm is not None or (trains and torch.is_grad_enabled()):
            return False
        few = self.scales_of is not None or input.numel() < len(self.weight)
        return few and by_row(spec) and not spec.dynamic and spec.code_spec is None

    def _quantized_rows(self, y: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        quantizer, rows = cast(FakeQuantize, self.quantizer("weight")), y.detach().reshape(len(which), -1).contiguous()
        if self.scales_of is not None:
            params: QParams | None = self.scales_of(rows)
        else:
            params = cast(QParams, quantizer.params_for(rows, second_level_of(self.extras("weight")))).rows(which)
        return cast(torch.Tensor, fake_quantize(rows, params, quantizer.spec)).reshape(y.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, and copy, by what the class was made of."""
        if type(self).made_of is None:
            return super().__reduce_ex__(protocol)
        return _empty, self.made_of, self.__dict__


class _KnownRows(nn.Embedding):
    """A table that looks up rows of its own, (2, 1, 3)."""

    rows = torch.linspace(1, 7, 6, dtype=torch.float64, device="cpu").view(2, 1, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.rows


@cache
def embedding_class(table: Any, base: Any) -> type[QuantEmbedding]:
    """The quantized class of a class of embeddings, which keeps its forward.

    Args:
        table: The float class.
        base: What looks up quantized rows.
    """
    if table.forward is nn.Embedding.forward:
        return cast(type[QuantEmbedding], base)
    made = type(f"{base.__name__}Of{table.__name__}", (table, base), {"float_class": table, "made_of": (table, base)})
    return cast(type[QuantEmbedding], made)


def _empty(table: Any, base: Any) -> QuantEmbedding:
    """A layer of the class, which a pickle or a copy fills."""
    kind = embedding_class(table, base)
    return kind.__new__(kind)


def lookup_factor(module: nn.Embedding) -> float | None:
    """The constant that a table multiplies each row with that it looks up; None where it does anything else.

    Its own forward is tried on a lookup of known values. The factor of a buffer on the meta device counts as 1.
    """
    kind: Any = module.float_class if isinstance(module, QuantLayer) else type(module)
    if kind.forward is nn.Embedding.forward:
        return 1.0
    small, weight = copy.copy(module.__dict__), module._parameters.get("weight")
    if (
        weight is None
        or {*module._parameters} != {"weight"}
        or not all(name.endswith("_quantizer") for name in module._modules)
    ):
        return None
    small["_parameters"] = {"weight": torch.ones(2, 3, dtype=weight.dtype)}
    given = {name: x for name, x in module._buffers.items() if x is not None}
    small["_buffers"] = {name: torch.ones_like(x, device="cpu") if x.is_meta else x.cpu() for name, x in given.items()}
    made: Any = type("Probe", (kind, _KnownRows), {})
    probe = made.__new__(made)
    probe.__dict__.update(small)
    try:
        with torch.no_grad():
            factors = kind.forward(probe, torch.zeros(2, 1, dtype=torch.long)) / _KnownRows.rows
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return None  # it takes something else
    factor = float(factors.flatten()[0])
    same = factors.shape == _KnownRows.rows.shape and bool(torch.allclose(factors, factors[0, 0, 0], rtol=1e-9))
    return factor if same else None
