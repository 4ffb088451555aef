"""The PyTorch flow."""

# ruff: noqa: E402 - without torch, the imports below would fail less helpfully
from quark import errors

errors.require_packages("The PyTorch flow", "torch", "torch", "greenlet")

from quark.torch.calibration.distributed import processes
from quark.torch.checkpoint.importer import ModelImporter, import_model_from_safetensors
from quark.torch.checkpoint.save_params import load_params, save_params
from quark.torch.config.enums import QuantFlow
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.config.not_supported import ModelPruner
from quark.torch.kernels import RuntimeOptions, accelerate, disable_native_inference, enable_native_inference
from quark.torch.quantizer import ModelQuantizer
from quark.torch.writers.gguf.mix_config import gguf_config
from quark.torch.writers.gguf.reader import import_model_from_gguf
from quark.torch.writers.onnx.export import export_onnx
from quark.torch.writers.safetensors import ModelExporter, export_gguf, export_safetensors

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelImporter",
    "ModelPruner",
    "ModelQuantizer",
    "QuantFlow",
    "RuntimeOptions",
    "accelerate",
    "disable_native_inference",
    "enable_native_inference",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "gguf_config",
    "import_model_from_gguf",
    "import_model_from_safetensors",
    "load_params",
    "processes",
    "save_params",
]
