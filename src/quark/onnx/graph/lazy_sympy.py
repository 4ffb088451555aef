"""Lets onnx_ir load without sympy, a quarter of what `quark.onnx` takes to load, until a symbolic size is computed.

onnx_ir needs sympy for sums and products of symbolic sizes, which few models have. Both modules that take sympy's
names are made by `importlib.util.LazyLoader`: they are read when the first of their attributes is asked for. Only
onnx_ir's own import is answered so; any other `import sympy` finds what it always does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

IMPORTER = "onnx_ir._core"
LAZY = ("sympy", "onnx_ir._symbolic_shapes")


class LazySympy:
    """A finder of modules: the two, while onnx_ir's core is being read."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module with a lazy loader; None for all others."""
        importer = sys.modules.get(IMPORTER)
        # Its classes are there once it is read: then nothing is lazy any more.
        if name not in LAZY or importer is None or hasattr(importer, "Model"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = LazyLoader(spec.loader)
        return spec


def let_sympy_wait() -> None:
    """Install the finder, unless onnx_ir or sympy is loaded already."""
    if LazySympy not in sys.meta_path and "onnx_ir" not in sys.modules and "sympy" not in sys.modules:
        sys.meta_path.insert(0, LazySympy)
