"""QuantEmbedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quark.torch.layers.base import QuantLayer


class QuantEmbedding(QuantLayer, nn.Embedding):
    """Quantized nn.Embedding; weight (num_embeddings, embedding_dim). The input is indices and stays as it is."""

    float_class = nn.Embedding

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.quantized("weight", self.weight)
        y = F.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
        return self.quantized("output", y)
