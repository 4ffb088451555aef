"""The ONNX flow.

`import quark.onnx` loads nothing: a name is taken from the first of its homes that has it, when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quark.__version__ import __version__ as __version__
from quark.errors import did_you_mean, require_packages

require_packages("The ONNX flow", "onnx", "onnx", "onnx_ir", "onnxruntime")

if TYPE_CHECKING:  # for type checkers: the homes below
    from quark.compat.auto_search import *
    from quark.compat.onnx_names.dump import *
    from quark.compat.onnx_names.not_supported import *
    from quark.compat.onnx_names.quantize_static import *
    from quark.compat.onnx_names.runtime_names import *
    from quark.onnx.calibration.data.path_reader import *
    from quark.onnx.calibration.data.random_reader import *
    from quark.onnx.calibration.data.readers import *
    from quark.onnx.config.algo_configs import *
    from quark.onnx.config.config import *
    from quark.onnx.config.enums import *
    from quark.onnx.config.presets import *
    from quark.onnx.config.tensor_specs import *
    from quark.onnx.evaluation.graph_parts import *
    from quark.onnx.evaluation.ort_fusion import *
    from quark.onnx.quantizer import *
    from quark.onnx_ops.encryption import *
    from quark.onnx_ops.library import *

HOMES = (
    "quark.onnx_ops.library",
    "quark.onnx_ops.encryption",
    "quark.onnx.config.enums",
    "quark.onnx.config.tensor_specs",
    "quark.onnx.config.algo_configs",
    "quark.onnx.config.config",
    "quark.onnx.config.presets",
    "quark.compat.onnx_names.not_supported",
    "quark.compat.onnx_names.runtime_names",
    "quark.onnx.calibration.data.readers",
    "quark.onnx.calibration.data.path_reader",
    "quark.onnx.calibration.data.random_reader",
    "quark.onnx.quantizer",
    "quark.compat.onnx_names.quantize_static",
    "quark.onnx.evaluation.ort_fusion",
    "quark.onnx.evaluation.graph_parts",
    "quark.compat.auto_search",
    "quark.compat.onnx_names.dump",
)
"""Where the names of the ONNX flow are defined, cheap ones first; `__all__` of each says which."""


def __getattr__(name: str) -> Any:
    """A name of one of the homes; a new object for each `*_QCONFIG`."""
    if name == "__all__":
        return __dir__()
    if name.endswith("_QCONFIG"):
        return getattr(import_module("quark.onnx.config.presets"), name)
    if not name.startswith("_") or name.startswith("_COP_"):
        for home in HOMES:
            module = import_module(home)
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __dir__())}")


def __dir__() -> list[str]:
    """The names of all homes."""
    return sorted({name for home in HOMES for name in import_module(home).__all__})
