"""The types that the tensors of a weight in codes have, by who wrote them.

Any other type would be read as other numbers:

    fp8                  float8_e4m3 under floats or exponents; two FP4 in an int8 under exponents
    modelopt             float8_e4m3 under floats, or exponents; two FP4 in a byte under float8_e4m3
    compressed-tensors   int8 or float8_e4m3 under floats; words under floats; packed floats under float8_e4m3 where
                         there is a scale of the scales, under exponents where there is none
    mxfp4                bytes under exponents in bytes
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quark.errors import FormatError
from quark.torch.checkpoint.sources.encoded import FLOATS, dtype_name

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENTS = (torch.uint8,)
"""Of compressed-tensors and ModelOpt, which have no other name for them."""
_E8M0 = torch.float8_e8m0fnu
_INTEGERS = (torch.int8, torch.int32, torch.int64)
BESIDE: Mapping[str, tuple[torch.dtype, ...]] = {
    "weight_shape": (torch.int64, torch.int32),
    "weight_g_idx": (torch.int32, torch.int64),
    "weight_zero_point": (torch.int8, torch.int32),
    "weight_global_scale": FLOATS,
    "weight_scale_2": FLOATS,
    "input_zero_point": (*_INTEGERS, torch.uint8),
    **dict.fromkeys(
        ("input_scale", "input_global_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale"),
        FLOATS,
    ),
}
"""Leaf beside a weight -> its types."""
LIVE = ("input_scale", "input_global_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale")
"""Leaves that scale what runs through a layer: passed over, and damaged where one is negative or not finite."""


def require_type(name: str, found: torch.dtype, wanted: Collection[torch.dtype], role: str) -> None:
    """Raise FormatError, naming the tensor, for one of another type than its role has."""
    if found not in wanted:
        raise FormatError(
            f"{name} has the type {dtype_name(found)}, and not that of {role}. Possible: "
            f"{', '.join(map(dtype_name, wanted))}."
        )


@dataclass(frozen=True)
class Claimed:
    """The types of codes and scales that a config names; None where it names none, or both for different layers.

    Attributes:
        method: One name for all of ModelOpt's.
        fmt: Of FP8.
        integers: Codes of 8 bits are integers, or floats.
        exponents: Scales are powers of two, or floats.
    """

    method: str
    fmt: str | None = None
    integers: bool | None = None
    exponents: bool | None = None

    @classmethod
    def of(cls, quantization: Mapping[str, Any] | None, method: str) -> Claimed:
        """Of a `quantization_config`."""
        stored = quantization or {}
        if method == "compressed-tensors":
            return cls(method, None, *_of_groups(stored))
        algorithm = str(stored.get("quant_algo") or "").upper()
        known = method == "modelopt" and algorithm != "MIXED_PRECISION"
        return cls(method, stored.get("fmt"), exponents=algorithm == "MXFP8" if known else None)

    def codes(self) -> tuple[torch.dtype, ...]:
        """The types of codes under the name of the weight."""
        if self.method == "compressed-tensors":
            known = {True: (torch.int8,), False: (E4M3,), None: (E4M3, torch.int8)}
            return known[self.integers]
        second = {"fp8": torch.int8, "modelopt": torch.uint8}.get(self.method)
        first = E5M2 if self.fmt == "e5m2" else E4M3
        return (first,) if second is None else (first, second)

    def packed(self) -> tuple[torch.dtype, ...]:
        """The types of codes under the name `weight_packed`."""
        known = {True: (torch.int32,), False: (torch.uint8,), None: (torch.int32, torch.uint8)}
        return known[self.integers]

    def scales(self, codes: torch.dtype, packed: bool, twice: bool) -> tuple[torch.dtype, ...]:
        """The types of scales of codes.

        Args:
            codes: Their type.
            packed: They lie under the name `weight_packed`.
            twice: The scales have a scale.
        """
        if packed and codes != torch.int32:
            return (E4M3,) if twice else EXPONENTS
        if not packed and codes == torch.uint8:
            return (E4M3,)
        if self.method == "fp8":
            return (_E8M0,) if codes == torch.int8 else (*FLOATS, _E8M0)
        if codes != E4M3:
            return FLOATS
        known = {True: EXPONENTS, False: FLOATS, None: (*FLOATS, *EXPONENTS)}
        return known[self.exponents]


def _of_groups(stored: Mapping[str, Any]) -> tuple[bool | None, bool | None]:
    """Of the groups of compressed-tensors: codes are integers, and scales are exponents."""
    groups = [group for group in (stored.get("config_groups") or {}).values() if isinstance(group, dict)]
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    forms = {str(group.get("format") or stored.get("format")) for group in groups}
    integers = {(each.get("type") or "int") == "int" for each in weights}
    return _all_or_none(integers), _all_or_none({form.startswith("mx") for form in forms})


def _all_or_none(values: set[bool]) -> bool | None:
    """The one value of a set; None where there are both, or none."""
    return next(iter(values)) if len(values) == 1 else None
