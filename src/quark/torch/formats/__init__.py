"""Layouts of quantized tensors on disk. A new one is a file here and a line below."""

from __future__ import annotations

from quark.core.registry import Registry
from quark.torch.formats.layout import Layout
from quark.torch.formats.quark import QuarkLayout

FORMATS: Registry[type[Layout]] = Registry("format")
FORMATS.register("quark", QuarkLayout)

__all__ = ["FORMATS", "Layout"]
