"""The PyTorch flow."""

from quark.torch.enums import QuantFlow
from quark.torch.exporter import ModelExporter, export_gguf, export_safetensors
from quark.torch.gguf.reader import import_model_from_gguf
from quark.torch.importer import ModelImporter, import_model_from_safetensors
from quark.torch.later import ModelPruner, RuntimeOptions, disable_native_inference, enable_native_inference
from quark.torch.onnx_export import export_onnx
from quark.torch.params import load_params, save_params
from quark.torch.quantizer import ModelQuantizer
from quark.torch.template import LLMTemplate

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelImporter",
    "ModelPruner",
    "ModelQuantizer",
    "QuantFlow",
    "RuntimeOptions",
    "disable_native_inference",
    "enable_native_inference",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_gguf",
    "import_model_from_safetensors",
    "load_params",
    "save_params",
]
