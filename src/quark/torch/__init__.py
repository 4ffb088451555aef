"""The PyTorch flow."""

from quark.torch.enums import QuantFlow
from quark.torch.exporter import ModelExporter, export_gguf, export_onnx, export_safetensors
from quark.torch.importer import ModelImporter, import_model_from_safetensors
from quark.torch.params import load_params, save_params
from quark.torch.quantizer import ModelQuantizer
from quark.torch.template import LLMTemplate

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelImporter",
    "ModelQuantizer",
    "QuantFlow",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "load_params",
    "save_params",
]
