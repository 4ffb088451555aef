"""What runs in a process that has the package loaded; the one that prints and compares has not."""

from __future__ import annotations

from pathlib import Path

import quark
from benchmarks.fingerprint import (
    commands,
    onnx_algorithms,
    onnx_options,
    onnx_presets,
    onnx_tools,
    outputs,
    torch_algorithms,
    torch_configs,
    torch_files,
)

PARTS = (
    commands,
    onnx_algorithms,
    onnx_options,
    onnx_presets,
    onnx_tools,
    torch_algorithms,
    torch_configs,
    torch_files,
)
"""Their import fills the list."""


def source() -> str:
    """The folder of the package that is at work."""
    return str(Path(quark.__file__).parent)


def names() -> list[str]:
    """All outputs, sorted."""
    return sorted(outputs.OUTPUTS)


def fingerprint(name: str) -> str:
    """The fingerprint of one output."""
    return outputs.fingerprint(name)
