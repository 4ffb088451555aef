"""get_library_path: the extended operators as a compiled library."""

from __future__ import annotations

from pathlib import Path

from quark.base.native import library
from quark.errors import ConfigError, NotSupportedError
from quark.onnx_ops.operators import DOMAIN as _COP_DOMAIN
from quark.onnx_ops.operators import VERSION as _COP_VERSION

__all__ = ["_COP_DOMAIN", "_COP_VERSION", "get_library_path"]

SOURCE = Path(__file__).with_name("custom_ops.cpp")
WITHOUT = (
    "The models need no library: each carries its operators as ONNX functions, which every ONNX Runtime with IR "
    "version 10 (1.18 and later) runs on any device."
)


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """The library of extended operators, for `SessionOptions.register_custom_ops_library`; built at first use.

    Args:
        device: "CPU", in any case.
        lib: "custom_ops", the only one.

    Returns:
        Its path.

    Raises:
        NotSupportedError: A GPU's library is asked for.
        MissingDependencyError: This machine has no C++ compiler.
        QuarkError: The compiler fails; shows its last lines.
    """
    kind = str(device).upper()
    if kind in ("CUDA", "ROCM", "GPU"):
        raise NotSupportedError(
            f"get_library_path({device!r}): there are no {kind} kernels. Possible: get_library_path('CPU'), whose "
            f"operators also run in a session with a GPU provider, on the CPU; or no library at all. {WITHOUT}"
        )
    if kind != "CPU" or lib != "custom_ops":
        raise ConfigError(f"get_library_path({device!r}, {lib!r}): possible: device 'CPU', lib 'custom_ops'.")
    return str(library(SOURCE, "the library of extended operators", WITHOUT))
