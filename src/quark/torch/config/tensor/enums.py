"""The documented enums of the PyTorch flow. ScaleType and RoundType are core's own."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import TYPE_CHECKING

import torch

from quark.core import dtypes
from quark.core.blocks import block_types
from quark.core.rounding import RoundType
from quark.core.spec import ScaleType
from quark.errors import ConfigError, NotSupportedError, did_you_mean

__all__ = [
    "DeviceType", "Dtype", "QSchemeType", "QuantFlow", "QuantizationMode", "RoundType", "ScaleType",
    "TQTThresholdInitMeth", "ZeroPointType",
]  # fmt: skip


_NAME_OF_ROW = {"fp4_e2m1": "fp4", "mxint8": "mx"}
"""The member of `Dtype` for a row of core/dtypes.py that is called otherwise there."""


class _Rows(EnumMeta):
    """Tells type checkers that the rows of core/dtypes.py are attributes of `Dtype`."""

    if TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Dtype: ...


class Dtype(Enum, metaclass=_Rows):
    """Element types: one for each row of core/dtypes.py but those of ONNX, and for each of core/blocks/block_types.py.

    `fp4` is E2M1 and `fp8_e5m3` is unsigned. `mx` is an OCP MX block whose element type is `mx_element_dtype`;
    `mx4 mx6 mx9` are micro-exponent formats; `bfp16` is a block of 8 with 8-bit mantissas.
    """

    _ignore_ = "_name"
    for _name in (*dtypes.DTYPES, *block_types.BLOCK_TYPES):
        if _name not in dtypes.ONNX_ONLY:
            vars()[_NAME_OF_ROW.get(_name, _name)] = _NAME_OF_ROW.get(_name, _name)

    @property
    def row(self) -> dtypes.Dtype:
        """The row of core/dtypes.py. `mx` has none of its own and raises NotSupportedError."""
        if self is Dtype.mx:
            raise NotSupportedError("Dtype.mx is a family: its width and storage are those of mx_element_dtype.")
        if self.value in block_types.BLOCK_TYPES:
            return block_types.BLOCK_TYPES[self.value]
        return dtypes.DTYPES["fp4_e2m1" if self is Dtype.fp4 else self.value]

    @staticmethod
    def from_row(row: dtypes.Dtype) -> Dtype:
        """The member of a row of core/dtypes.py; mxint8 is `mx`."""
        return Dtype(_NAME_OF_ROW.get(row.name, row.name))

    @staticmethod
    def from_str(name: str) -> Dtype:
        """The member of this name. Raises ConfigError with the nearest names."""
        try:
            return Dtype(name.lower())
        except (ValueError, AttributeError):
            raise ConfigError(f"Unknown Dtype {name!r}. {did_you_mean(str(name), [d.name for d in Dtype])}") from None

    @staticmethod
    def from_torch_dtype(dtype: torch.dtype) -> Dtype:
        """The element type with the values of a torch dtype. Raises ConfigError where there is none."""
        name = str(dtype).removeprefix("torch.")
        name = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(name, name)
        return Dtype.from_str(name)

    def to_bitwidth(self) -> int:
        """Bits of one code, without the shared exponent of a block format."""
        return self.row.bits

    def to_torch_packed_dtype(self) -> torch.dtype:
        """The torch dtype that stores the codes, packed where several fit into one element."""
        packed: torch.dtype = getattr(torch, self.row.torch)
        return packed


class QSchemeType(Enum):
    """Which values share a scale."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


class ZeroPointType(Enum):
    """`int32`: rounded. `float32`: unrounded, and the range is not widened to include 0."""

    int32 = "int32"
    float32 = "float32"


class DeviceType(Enum):
    """A tag written to the config; it changes nothing."""

    CPU = "cpu"
    IPU = "ipu"


class QuantizationMode(Enum):
    """Module replacement, or a traced graph."""

    eager_mode = 1
    fx_graph_mode = 2


class QuantFlow(Enum):
    """Whole model, file to file, or one decoder block at a time."""

    standard = 1
    file2file = 2
    per_block = 3


class TQTThresholdInitMeth(Enum):
    """How TQT finds its first threshold: |mean| + 3 sigma, or least KL divergence."""

    _3SD = "_3sd"
    _KL_J = "_kl_j"
