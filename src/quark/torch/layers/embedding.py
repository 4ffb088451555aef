"""QuantEmbedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

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
        spec, trains = quantizer.spec, self.weight.requires_grad or quantizer.learned is not None
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
