"""What transformers' quark integration calls before it loads a checkpoint."""

from __future__ import annotations

from torch import nn

from quark.errors import NotSupportedError
from quark.torch.config import QConfig
from quark.torch.loading import REAL_QUANTIZED, map_to_stored


def _map_to_quark(
    model: nn.Module, quantization_config: QConfig, pack_method: str = "reorder", custom_mode: str = "quark"
) -> nn.Module:
    """Replace layers of a (meta) model by the modules that hold the checkpoint's tensors.

    The name is the one that transformers imports.
    """
    if custom_mode != "quark":
        raise NotSupportedError(f"custom_mode={custom_mode!r} checkpoints are loaded by transformers' own quantizers.")
    map_to_stored(model, quantization_config, pack_method, quantization_config.weight_format or REAL_QUANTIZED)
    return model
