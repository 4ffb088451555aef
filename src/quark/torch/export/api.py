"""Address: the documented path of the exporters, and of the function that transformers calls."""

from quark.torch.exporter import ModelExporter
from quark.torch.hf import _map_to_quark
from quark.torch.importer import ModelImporter

__all__ = ["ModelExporter", "ModelImporter", "_map_to_quark"]
