"""Formats of checkpoint folders. A new one is a file here and a line below."""

from __future__ import annotations

from quark.core.names.registry import Registry
from quark.torch.formats.awq import AwqFormat
from quark.torch.formats.compressed_tensors.format import CompressedTensorsFormat
from quark.torch.formats.format import Folder, FolderFormat, Format, Stored
from quark.torch.formats.fp8 import Fp8Format
from quark.torch.formats.gptq.format import GptqFormat
from quark.torch.formats.layout import Layout
from quark.torch.formats.quark.format import QuarkFormat

FORMATS: Registry[FolderFormat] = Registry("format")
for _format in (QuarkFormat(), AwqFormat(), GptqFormat(), Fp8Format(), CompressedTensorsFormat()):
    FORMATS.register(_format.name, _format)

__all__ = ["FORMATS", "Folder", "FolderFormat", "Format", "Layout", "Stored"]
