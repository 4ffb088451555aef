"""Operators beyond ONNX: not in this version."""

from __future__ import annotations

from quark.errors import NotSupportedError


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """The library of extended operators for `SessionOptions.register_custom_ops_library`; not in this version."""
    raise NotSupportedError(
        f"get_library_path({device!r}): extended operators are not part of this version, so its files need no library: "
        "they run in stock ONNX Runtime."
    )
