"""Address of the configs and algorithms."""

from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.config.config import Config, QConfig, QLayerConfig, QuantizationConfig
from quark.onnx.config.presets import get_default_config, get_default_config_mapping

__all__ = [
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoMixprecisionConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "Config",
    "GPTQConfig",
    "QConfig",
    "QLayerConfig",
    "QuantizationConfig",
    "QuarotConfig",
    "SmoothQuantConfig",
    "get_default_config",
    "get_default_config_mapping",
]
