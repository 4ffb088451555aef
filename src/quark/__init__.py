"""quark: quantization of PyTorch and ONNX models. `quark.quantize`, or `quark.torch` and `quark.onnx` for all of it."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read here, so that no later import of the module takes the name from the string.
from quark.__version__ import __version__ as __version__
from quark.base.same_import_name import say_other
from quark.base.telemetry import switch_off
from quark.compat import documented_paths, of_diffusers, profiled_steps

if TYPE_CHECKING:  # read when one is called
    from quark.one_call import compare as compare
    from quark.one_call import convert as convert
    from quark.one_call import evaluate as evaluate
    from quark.one_call import quantize as quantize

switch_off()
say_other(Path(__file__).parent)

documented_paths.install(__path__)
of_diffusers.install()
profiled_steps.install()
del documented_paths, of_diffusers, profiled_steps, Path


CALLS = ("quantize", "evaluate", "compare", "convert")
"""The commands as functions: see `quark.one_call`."""


def __getattr__(name: str) -> Any:
    """A call, which is read when it is asked for."""
    if name in CALLS:
        return getattr(import_module("quark.one_call"), name)
    possible = f"{', '.join(CALLS)}, or import quark.{name}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Possible: {possible}.")


def __dir__() -> list[str]:
    """Return every name that can be asked for."""
    return sorted([*(name for name in globals() if name.startswith("__")), *CALLS])
