"""QuantEmbeddingBag."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer


class QuantEmbeddingBag(QuantLayer, nn.EmbeddingBag):
    """Quantized nn.EmbeddingBag; weight (num_embeddings, embedding_dim)."""

    float_class = nn.EmbeddingBag

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = F.embedding_bag(
            input,
            self.quantized_weight(),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
        return self.quantized("output", y)
