"""Address; see config.config, config.type and config.template."""

from quark.torch.config.config import (
    Config,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
)
from quark.torch.config.enums import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantFlow,
    QuantizationMode,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
)
from quark.torch.config.tensor_config import QTensorConfig, QuantizationSpec

__all__ = [
    "Config",
    "DeviceType",
    "Dtype",
    "QConfig",
    "QLayerConfig",
    "QSchemeType",
    "QTensorConfig",
    "QuantFlow",
    "QuantizationConfig",
    "QuantizationMode",
    "QuantizationSpec",
    "RoundType",
    "ScaleType",
    "TQTThresholdInitMeth",
    "ZeroPointType",
]
