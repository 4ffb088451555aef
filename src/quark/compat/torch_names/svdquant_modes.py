"""The documented modes of SVDQuant by name, each a scheme."""

from __future__ import annotations

from quark.errors import ConfigError, did_you_mean
from quark.torch.config.config import QLayerConfig
from quark.torch.config.llm_template import LLMTemplate

QUANT_MODE_TO_SCHEME = {"w4a16": "int4_wo_64", "w4a4": "int4_wa_64", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
"""Name in the documented examples of SVDQuant -> scheme."""


def build_quant_layer_config(mode: str) -> QLayerConfig:
    """The layer config of a mode of SVDQuant, for `QConfig(global_quant_config=...)`.

    Raises:
        ConfigError: An unknown mode; the nearest names are listed.
    """
    name = mode.lower()
    if name not in QUANT_MODE_TO_SCHEME:
        raise ConfigError(f"Unknown quant mode {mode!r}. {did_you_mean(name, QUANT_MODE_TO_SCHEME)}")
    return LLMTemplate.scheme(QUANT_MODE_TO_SCHEME[name])
