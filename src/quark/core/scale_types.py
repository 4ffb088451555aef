"""What a scale is stored as, and how the exponent of an E8M0 scale is chosen."""

from __future__ import annotations

from enum import Enum


class ScaleType(Enum):
    """Type that a scale is rounded to before it is used."""

    float = "float"
    """The dtype of the model (float32 for a per-tensor integer scale and for live activations)."""
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    pof2 = "power_of_2"
    float8_e4m3 = "float8_e4m3"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"


class ScaleRule(Enum):
    """How the exponent of an E8M0 scale is taken from the largest magnitude of a block."""

    even = "even"
    """Round amax to the element's mantissa first (ties up), then floor(log2)."""
    floor = "floor"
    """floor(log2 amax): the rule of OCP MX v1.0, section 6.3."""
    ceil = "ceil"
    """ceil(log2 amax): nothing saturates by more than the element's last binade."""


SCALE_DTYPES = {
    ScaleType.float16: "float16",
    ScaleType.bfloat16: "bfloat16",
    ScaleType.float8_e4m3: "fp8_e4m3",
    ScaleType.float8_e5m3: "fp8_e5m3",
}
"""The element type that a scale of a narrow type is rounded to."""
