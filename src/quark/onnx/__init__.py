"""The ONNX flow."""

from typing import Any

from onnxruntime.quantization.calibrate import CalibraterBase, MinMaxCalibrater
from onnxruntime.quantization.quant_utils import write_calibration_table

from quark.onnx.calibration.data.path_reader import (
    PathDataReader,
)
from quark.onnx.calibration.data.random_reader import (
    RandomDataReader,
)
from quark.onnx.calibration.data.readers import (
    CachedDataReader,
    CalibrationDataReader,
)
from quark.onnx.config import presets
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
from quark.onnx.config.config import (
    Config,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
)
from quark.onnx.config.enums import (
    CalibMethod,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int16Method,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantFormat,
    QuantGranularity,
    QuantizationMode,
    QuantType,
    ScaleType,
    VitisQuantFormat,
    VitisQuantType,
)
from quark.onnx.config.not_supported import (
    AutoSearch,
    AutoSearchPro,
    SearchSpace,
    create_calibrator_float_scale,
    create_calibrator_power_of_two,
    dump_model,
    generate_all_configs,
    get_auto_search_config,
)
from quark.onnx.config.presets import (
    get_default_config,
)
from quark.onnx.config.tensor_specs import (
    BFP16,
    BFloat16,
    BFloat16Spec,
    BFP16Spec,
    DataType,
    Float16,
    Float16Spec,
    Int4,
    Int4Spec,
    Int8,
    Int8Spec,
    Int16,
    Int16Spec,
    Int32,
    Int32Spec,
    MX4Spec,
    MX6Spec,
    MX9Spec,
    MXFP4E2M1Spec,
    MXFP6E2M3Spec,
    MXFP6E3M2Spec,
    MXFP8E4M3Spec,
    MXFP8E5M2Spec,
    MXInt8Spec,
    QTensorConfig,
    UInt4,
    UInt4Spec,
    UInt8,
    UInt8Spec,
    UInt16,
    UInt16Spec,
    UInt32,
    UInt32Spec,
    XInt8Spec,
)
from quark.onnx.custom_ops import (
    get_library_path,
)
from quark.onnx.evaluation.ort_fusion import (
    Fusion,
    inspect_fusion,
)
from quark.onnx.quantizer import (
    ModelQuantizer,
    quantize_dynamic,
    quantize_static,
)
from quark.onnx_ops import DOMAIN as _COP_DOMAIN
from quark.onnx_ops import VERSION as _COP_VERSION

__all__ = [
    "BFP16",
    "_COP_DOMAIN",
    "_COP_VERSION",
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoMixprecisionConfig",
    "AutoSearch",
    "AutoSearchPro",
    "BFP16Spec",
    "BFloat16",
    "BFloat16Spec",
    "BiasCorrectionConfig",
    "CLEConfig",
    "CachedDataReader",
    "CalibMethod",
    "CalibraterBase",
    "CalibrationDataReader",
    "CalibrationMethod",
    "Config",
    "DataType",
    "ExtendedCalibrationMethod",
    "ExtendedQuantFormat",
    "ExtendedQuantType",
    "Float16",
    "Float16Spec",
    "Fusion",
    "GPTQConfig",
    "Int4",
    "Int4Spec",
    "Int8",
    "Int8Spec",
    "Int16",
    "Int16Method",
    "Int16Spec",
    "Int32",
    "Int32Spec",
    "LayerWiseMethod",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP4E2M1Spec",
    "MXFP6E2M3Spec",
    "MXFP6E3M2Spec",
    "MXFP8E4M3Spec",
    "MXFP8E5M2Spec",
    "MXInt8Spec",
    "MinMaxCalibrater",
    "ModelQuantizer",
    "PathDataReader",
    "PowerOfTwoMethod",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantFormat",
    "QuantGranularity",
    "QuantType",
    "QuantizationConfig",
    "QuantizationMode",
    "QuarotConfig",
    "RandomDataReader",
    "ScaleType",
    "SearchSpace",
    "SmoothQuantConfig",
    "UInt4",
    "UInt4Spec",
    "UInt8",
    "UInt8Spec",
    "UInt16",
    "UInt16Spec",
    "UInt32",
    "UInt32Spec",
    "VitisQuantFormat",
    "VitisQuantType",
    "XInt8Spec",
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "dump_model",
    "generate_all_configs",
    "get_auto_search_config",
    "get_default_config",
    "get_library_path",
    "inspect_fusion",
    "quantize_dynamic",
    "quantize_static",
    "write_calibration_table",
]


def __getattr__(name: str) -> Any:
    """A new object for each `*_QCONFIG`."""
    if name.endswith("_QCONFIG"):
        return getattr(presets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
