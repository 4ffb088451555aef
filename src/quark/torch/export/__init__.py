"""Address: the documented path of the exporters."""

from quark.torch.export_config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig
from quark.torch.exporter import ModelExporter

__all__ = ["ExporterConfig", "JsonExporterConfig", "ModelExporter", "OnnxExporterConfig"]
