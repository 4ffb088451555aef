"""Address: the documented path of the exporters, and of the function that transformers calls."""

from quark.torch.checkpoint.importer import ModelImporter
from quark.torch.checkpoint.transformers_hooks import _map_to_quark
from quark.torch.writers.safetensors import ModelExporter

__all__ = ["ModelExporter", "ModelImporter", "_map_to_quark"]
