"""Address: the documented path of the exporters."""

from quark.torch.config.export_config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig
from quark.torch.writers.safetensors import ModelExporter

__all__ = ["ExporterConfig", "JsonExporterConfig", "ModelExporter", "OnnxExporterConfig"]
