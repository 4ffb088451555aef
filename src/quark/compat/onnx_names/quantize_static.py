"""quantize_static and quantize_dynamic: fields of QuantizationConfig as arguments of one call."""

from __future__ import annotations

import os
from typing import Any

import onnx

from quark.onnx.config.config import Config, QuantizationConfig
from quark.onnx.quantizer import Model, ModelQuantizer

__all__ = ["quantize_dynamic", "quantize_static"]


def quantize_static(
    model_input: Model,
    model_output: str | os.PathLike[str] | None = None,
    calibration_data_reader: Any = None,
    calibration_data_path: str | None = None,
    **fields: Any,
) -> onnx.ModelProto | None:
    """Quantize with calibration data.

    Args:
        model_input, model_output, calibration_data_reader, calibration_data_path: As for
            `ModelQuantizer.quantize_model`.
        **fields: Fields of QuantizationConfig (calibrate_method, activation_type, per_channel, extra_options ...).

    Returns:
        The quantized model if `model_output` is None.
    """
    config = Config(QuantizationConfig(**fields))
    return ModelQuantizer(config).quantize_model(
        model_input, model_output, calibration_data_reader, calibration_data_path
    )


def quantize_dynamic(
    model_input: Model, model_output: str | os.PathLike[str] | None = None, **fields: Any
) -> onnx.ModelProto | None:
    """Quantize weights now and activations as they come; no data is needed.

    Args:
        model_input, model_output: As for `ModelQuantizer.quantize_model`.
        **fields: Fields of QuantizationConfig (weight_type, per_channel, nodes_to_exclude, extra_options ...).

    Returns:
        The quantized model if `model_output` is None.
    """
    config = Config(QuantizationConfig(use_dynamic_quant=True, **fields))
    return ModelQuantizer(config).quantize_model(model_input, model_output)
