"""Address: the documented path of the exporters, and of the function that transformers calls."""

from quark.torch.checkpoint.importer import ModelImporter as ModelImporter
from quark.torch.checkpoint.transformers_hooks import _map_to_quark as _map_to_quark
from quark.torch.writers.safetensors import ModelExporter as ModelExporter
