"""Tensors that a checkpoint holds and its class leaves out of the model (layers of further tokens, buffers)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quark.base.libraries.transformers import left_out
from quark.torch.model.names.in_model import loaded_as


def dropped_names(model: Any, stored: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint that the transformers class leaves out by design (mtp.*, for one), or computes itself.

    The second are the buffers of old checkpoints that transformers ignores whatever the class says.
    """
    patterns = left_out(model)
    buffers = [name for name, _ in model.named_buffers()]
    computed = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    patterns += [pattern for pattern, end in computed.items() if any(name.endswith(end) for name in buffers)]
    patterns += _of_further_tokens(model)
    found = [name for name in stored if any(re.search(p, name) for p in patterns)]
    if not found:
        return []
    # A part of a model may leave out what is another part's, by the name of that part in files: of Tipsv2 the text
    # model leaves out the vision model, and the other way round, and the patterns of both are those of the whole.
    own = model.state_dict()
    target = loaded_as(model, own)
    return [name for name in found if target(name) not in own]


_FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields of configs that count the layers that predict further tokens: of DeepSeek, GLM and Kimi, of MiniMax, of
Qwen 3.5, of MiMo. DeepSeek and those after it number these layers on after the last of the model."""


def _of_further_tokens(model: Any) -> list[str]:
    """Patterns of the tensors of layers that predict further tokens (MTP), which no class of transformers builds."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    counts = [getattr(part, field, None) for field in _FURTHER_TOKENS for part in (text, config)]
    more = max((count for count in counts if isinstance(count, int)), default=0)
    numbers = "|".join(str(layers + index) for index in range(more)) if isinstance(layers, int) else ""
    return [r"(^|\.)mtp(_\w+)?\.", *([rf"(^|\.)layers\.({numbers})\."] if numbers else [])]
