"""How many samples fit into one batch of a model whose blocks visit the GPU one at a time.

    batch = (free memory - what stays on the GPU - one block) / (bytes of a token x tokens of a sample)

A token's bytes are an upper bound of what one block holds at once: what each of its linear layers reads and writes,
and, as eager attention writes them out, the scores and probabilities of all heads over the sequence.
"""

from __future__ import annotations

import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch.model.blocks import WHOLE, find_blocks

__all__ = ["get_per_block_calib_batch_size"]

TOKENS = 393216
"""Tokens in a batch where no GPU can be asked: the documented number."""


def get_per_block_calib_batch_size(
    num_calib_data: int,
    seq_len: int,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    n_gpu_resident_blocks: int = 0,
) -> int:
    """The largest calibration batch that `QuantFlow.per_block` should be given, in samples.

    Args:
        num_calib_data: Samples there are, which the batch does not exceed.
        seq_len: Tokens in a sample.
        device: Where blocks go. With a GPU and a `model` of blocks its free memory decides, else a fixed number of
            tokens.
        model: The model that will be calibrated; where its weights lie now does not matter.
        n_gpu_resident_blocks: Blocks that stay on the GPU (`gpu_resident_blocks` of QConfig).

    Returns:
        From 1 to `num_calib_data`.
    """
    if min(num_calib_data, seq_len) < 1 or n_gpu_resident_blocks < 0:
        raise ConfigError(f"Numbers count from 1, got {num_calib_data=}, {seq_len=}, {n_gpu_resident_blocks=}.")
    tokens = TOKENS
    if device is not None and torch.device(device).type == "cuda" and model is not None:
        names = find_blocks(model)
        if names != [WHOLE]:
            blocks = [model.get_submodule(name) for name in names]
            free = torch.cuda.mem_get_info(torch.device(device))[0]
            free -= _bytes(model) - sum(map(_bytes, blocks))
            free -= (min(n_gpu_resident_blocks, len(blocks)) + 1) * max(map(_bytes, blocks))
            tokens = free // max(_token_bytes(model, block, seq_len) for block in blocks)
    return max(1, min(num_calib_data, tokens // seq_len))


def _bytes(module: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers()))


def _token_bytes(model: nn.Module, block: nn.Module, seq_len: int) -> int:
    size = max((p.element_size() for p in block.parameters()), default=4)
    # Of all layers of experts a token visits a few; counting each makes the bound safe, not tight.
    widths = sum(layer.in_features + layer.out_features for layer in block.modules() if isinstance(layer, nn.Linear))
    heads = int(getattr(getattr(model, "config", None), "num_attention_heads", 0) or 0)
    scores = heads * seq_len * (size + 4)  # the softmax is in float32
    return max(1, widths * size + scores)
