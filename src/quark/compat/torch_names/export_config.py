"""The documented export configs."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from quark.base.checked import checked_dataclass
from quark.errors import NotSupportedError

__all__ = ["ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig", "QuantConfigParser"]


@checked_dataclass
class JsonExporterConfig:
    """How safetensors are written: the `export` block of a checkpoint's quantization_config.

    Attributes:
        weight_merge_groups: Groups of weights that share scales; None.
        kv_cache_group: Patterns of the layers whose outputs are the KV cache.
        min_kv_scale: Floor of the KV scales.
        weight_format: "real_quantized" or "fake_quantized".
        pack_method: "reorder" or "order".
    """

    weight_merge_groups: list[list[str]] | None = None
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"


@checked_dataclass
class OnnxExporterConfig:
    """Options of the ONNX export.

    Attributes:
        uint4_int4_flag: Store codes of 2 to 4 bits as INT4 and UINT4, not as INT8 and UINT8.
    """

    uint4_int4_flag: bool = False


@checked_dataclass
class ExporterConfig:
    """Options of ModelExporter."""

    json_export_config: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    onnx_export_config: OnnxExporterConfig = field(default_factory=OnnxExporterConfig)


class QuantConfigParser:
    """Turns the config of another quantizer's checkpoint into a QConfig (transformers asks for this class)."""

    @staticmethod
    def from_custom_config(config: dict[str, Any], is_bias_quantized: bool = False, **options: Any) -> Any:
        """AWQ and FP8 checkpoints; not in this version."""
        raise NotSupportedError(
            f"A checkpoint with quant_method {config.get('quant_method')!r} is read by transformers' own "
            f"{config.get('quant_method')} quantizer, not through quark."
        )
