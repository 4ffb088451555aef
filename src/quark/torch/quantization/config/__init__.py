"""Address; see config.config, config.type and config.template."""

from quark.torch.config.config import (
    Config,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantizationConfig,
    QuantizationSpec,
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
