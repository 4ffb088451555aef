"""Address: the documented path of the exporters and importers, and of the function that transformers calls."""

from quark.torch.checkpoint.importer import ModelImporter as ModelImporter
from quark.torch.checkpoint.importer import import_model_from_safetensors as import_model_from_safetensors
from quark.torch.checkpoint.save_params import save_params as save_params
from quark.torch.checkpoint.transformers_hooks import _map_to_quark as _map_to_quark
from quark.torch.config.not_supported import _move_quantizer_to_dict as _move_quantizer_to_dict
from quark.torch.writers.onnx.export import export_onnx as export_onnx
from quark.torch.writers.safetensors import ModelExporter as ModelExporter
from quark.torch.writers.safetensors import export_gguf as export_gguf
from quark.torch.writers.safetensors import export_safetensors as export_safetensors
