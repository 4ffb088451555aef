"""The PyTorch flow: every documented name can be imported from here.

`import quark.torch` loads nothing: a name is taken from its home when it is asked for. So configs and names of
algorithms are there without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark.errors import did_you_mean, require_packages

require_packages("The PyTorch flow", "torch", "torch", "greenlet")

if TYPE_CHECKING:  # for type checkers: the homes below
    from quark.compat.torch_names.export_config import *
    from quark.compat.torch_names.model_exporter import ModelExporter as ModelExporter
    from quark.compat.torch_names.model_exporter import ModelImporter as ModelImporter
    from quark.compat.torch_names.native_inference import RuntimeOptions as RuntimeOptions
    from quark.compat.torch_names.native_inference import disable_native_inference as disable_native_inference
    from quark.compat.torch_names.native_inference import enable_native_inference as enable_native_inference
    from quark.compat.torch_names.not_supported import ModelPruner as ModelPruner
    from quark.compat.torch_names.not_supported import export_llama_cpp_gguf as export_llama_cpp_gguf
    from quark.compat.torch_names.not_supported import list_llama_cpp_export_formats as list_llama_cpp_export_formats
    from quark.compat.torch_names.shorthand_specs import *
    from quark.torch.calibration.distributed import processes as processes
    from quark.torch.calibration.synthetic_data import synthetic_batches as synthetic_batches
    from quark.torch.checkpoint.dequantize import dequantize as dequantize
    from quark.torch.checkpoint.importer import import_model_from_safetensors as import_model_from_safetensors
    from quark.torch.checkpoint.save_params import load_params as load_params
    from quark.torch.checkpoint.save_params import save_params as save_params
    from quark.torch.config.algo_configs import *
    from quark.torch.config.config import *
    from quark.torch.config.llm_template import *
    from quark.torch.config.named_algorithms import *
    from quark.torch.config.tensor.enums import *
    from quark.torch.config.tensor.observer_classes import *
    from quark.torch.config.tensor.tensor_config import *
    from quark.torch.flows.compared.channel_outliers import channel_outliers as channel_outliers
    from quark.torch.flows.compared.denoiser_costs import compare_denoisers as compare_denoisers
    from quark.torch.flows.compared.layer_errors import layer_errors as layer_errors
    from quark.torch.flows.on_load.config import QuantizeOnLoad as QuantizeOnLoad
    from quark.torch.kernels import accelerate as accelerate
    from quark.torch.model.calibration_data.recorded_steps import record_steps as record_steps
    from quark.torch.model.calibration_data.stored_batches import stored_batches as stored_batches
    from quark.torch.quantizer import ModelQuantizer as ModelQuantizer
    from quark.torch.writers.gguf.import_file import import_model_from_gguf as import_model_from_gguf
    from quark.torch.writers.gguf.mix_config import gguf_config as gguf_config
    from quark.torch.writers.onnx.export import export_onnx as export_onnx
    from quark.torch.writers.safetensors import export_gguf as export_gguf
    from quark.torch.writers.safetensors import export_safetensors as export_safetensors

HOMES: dict[str, tuple[str, ...]] = {
    "quark.torch.calibration.distributed": ("processes",),
    "quark.torch.calibration.synthetic_data": ("synthetic_batches",),
    "quark.compat.torch_names.model_exporter": ("ModelExporter", "ModelImporter"),
    "quark.torch.checkpoint.dequantize": ("dequantize",),
    "quark.torch.checkpoint.importer": ("import_model_from_safetensors",),
    "quark.torch.checkpoint.save_params": ("load_params", "save_params"),
    "quark.torch.config.llm_template": ("LLMTemplate",),
    "quark.compat.torch_names.not_supported": (
        "ModelPruner", "export_llama_cpp_gguf", "list_llama_cpp_export_formats",
    ),
    "quark.torch.flows.compared.channel_outliers": ("channel_outliers",),
    "quark.torch.flows.compared.denoiser_costs": ("compare_denoisers",),
    "quark.torch.flows.compared.layer_errors": ("layer_errors",),
    "quark.torch.flows.on_load.config": ("QuantizeOnLoad",),
    "quark.compat.torch_names.native_inference": (
        "RuntimeOptions", "disable_native_inference", "enable_native_inference",
    ),
    "quark.torch.kernels": ("accelerate",),
    "quark.torch.model.calibration_data.recorded_steps": ("record_steps",),
    "quark.torch.model.calibration_data.stored_batches": ("stored_batches",),
    "quark.torch.quantizer": ("ModelQuantizer",),
    "quark.torch.writers.gguf.mix_config": ("gguf_config",),
    "quark.torch.writers.gguf.import_file": ("import_model_from_gguf",),
    "quark.torch.writers.onnx.export": ("export_onnx",),
    "quark.torch.writers.safetensors": ("export_gguf", "export_safetensors"),
}  # fmt: skip
"""Module -> the names of the flow that it defines."""
CONFIGS = (
    "quark.torch.config.algo_configs",
    "quark.torch.config.named_algorithms",
    "quark.torch.config.tensor.enums",
    "quark.torch.config.tensor.tensor_config",
    "quark.torch.config.config",
    "quark.compat.torch_names.shorthand_specs",
    "quark.torch.config.tensor.observer_classes",
    "quark.compat.torch_names.export_config",
)
"""Modules of which all names are of the flow; `__all__` of each says which. Cheap ones first."""


def __getattr__(name: str) -> Any:
    """A name of one of the homes."""
    if name == "__all__":
        return __dir__()
    if not name.startswith("_"):
        for home, names in HOMES.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(home), name))
        for home in CONFIGS:
            module = import_module(home)
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __dir__())}")


def __dir__() -> list[str]:
    """The names of all homes."""
    listed = {name for names in HOMES.values() for name in names}
    return sorted(listed | {name for home in CONFIGS for name in import_module(home).__all__})
