"""sympy is not loaded with the ONNX flow, and is there when a symbolic size is computed."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


LOADED = "import sys; print('sympy.core' in sys.modules)\n"


@pytest.mark.slow
def test_sympy_waits_for_the_first_symbolic_size() -> None:
    code = f"""
from quark.onnx import ModelQuantizer
{LOADED}
import onnx_ir as ir
size = ir.Shape(["N", 3])[0]
{LOADED}
print(size * 2 + 1 == ir.SymbolicDim("2*N + 1"), (size + 1).simplify())
{LOADED}
import sympy
print(sympy.Symbol("x") + 1)
"""
    assert run(code).splitlines() == ["False", "False", "True N + 1", "True", "x + 1"]


@pytest.mark.slow
def test_other_programs_find_sympy_as_it_is() -> None:
    assert run(f"import quark.onnx, sympy\n{LOADED}") == "True"
    assert run("import quark.onnx, onnx_ir\nimport sympy\nprint(sympy.sqrt(4))") == "2"
    assert run(f"import sympy, quark.onnx, onnx_ir\n{LOADED}") == "True"
