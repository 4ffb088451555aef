"""The kernels without a GPU: in triton's interpreter, which runs them on tensors of the CPU, and compiled ahead."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

import quark.core

SHARED, GROUPS, COLUMNS = (
    "quark.core.kernels.elements_triton",
    "quark.core.kernels.groups_triton",
    "quark.core.solvers.columns.columns_triton",
)
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
"""Backend, architecture and width of a warp."""


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """A module of kernels, interpreted; within, triton's own functions are, too, if they were imported compiled."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    made = _made_for_interpreter()
    own = {each: InterpretedFunction(getattr(tl, each).fn) for each in ("sum", "max")}
    with mock.patch.multiple(tl, **own), np.errstate(all="ignore"):  # the interpreter computes in numpy
        yield made[name]


@cache
def _made_for_interpreter() -> dict[str, ModuleType]:
    """Name -> the module once more; what is imported by that name stays as it is."""
    made: dict[str, ModuleType] = {}
    root = Path(next(iter(quark.core.__path__)))
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), mock.patch.dict(sys.modules):
        for name in (SHARED, GROUPS, COLUMNS):
            path = root.joinpath(*name.split(".")[2:]).with_suffix(".py")
            found = importlib.util.spec_from_file_location(name, path)
            assert found is not None and found.loader is not None
            sys.modules[name] = made[name] = importlib.util.module_from_spec(found)
            found.loader.exec_module(made[name])
    return made


def compiled(
    kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any], target: Any
) -> tuple[bytes, str]:
    """Machine code and assembly of a kernel for a GPU that need not be there.

    Args:
        kernel: Of triton.
        pointers: Argument -> the type that it points to, "*fp32"; what is neither here nor constant is an i32.
        constants: What is known when it is compiled.
        options: Of a launch.
        target: Backend, architecture and width of a warp.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = triton.compiler.ASTSource(kernel, types, {(names.index(n),): value for n, value in constants.items()})
    asm = triton.compile(source, target=GPUTarget(*target), options=dict(options)).asm
    return (asm["cubin"], asm["ptx"]) if target[0] == "cuda" else (asm["hsaco"], asm["amdgcn"])


def check_compiles(made: Callable[[Any], list[tuple[bytes, str]]], target: Any) -> None:
    """Compile kernels to machine code, by the options of a launch: divisions are those of IEEE 754, nothing is fused.

    Args:
        made: Compiles them for a target; called in a process of its own, as the interpreter leaves changes in triton.
        target: One of `TARGETS`.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        for machine_code, assembly in fresh.submit(made, target).result():
            assert machine_code and (target[0] == "hip" or is_exact(assembly))


def is_exact(assembly: str) -> bool:
    """Whether all divisions of a PTX are those of IEEE 754, nothing is fused, and small numbers are kept."""
    divisions = set(re.findall(r"\bdiv\.[\w.]*f32", assembly))
    return divisions <= {"div.rn.f32"} and not re.search(r"\bfma\.|\bmad\.[\w.]*f32|\.ftz|rcp\.", assembly)
