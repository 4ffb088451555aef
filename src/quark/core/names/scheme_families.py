"""Families of schemes: the words that people use for several of them, such as int4, W8A8 or 4bit.

A family is not a scheme, because its members differ in what they cost: in groups or not, with inputs or without. So a
word names what it may mean, the usual one first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

FAMILIES: dict[str, tuple[str, ...]] = {
    "int2": ("int2_wo_64", "q2_k"),
    "int3": ("int3_wo_128", "int3_wo_64", "q3_k_m"),
    "int4": ("int4_wo_128", "uint4_wo_128", "q4_k_m", "int4_wa_64", "MATMUL_NBITS"),
    "uint4": ("uint4_wo_128",),
    "int5": ("q5_k_m",),
    "int6": ("q6_k",),
    "int8": ("int8_wo", "int8", "int8_dynamic", "q8_0", "INT8_CPU", "INT8_OPENVINO", "A8W8", "XINT8"),
    "w8a8": ("int8", "int8_dynamic", "INT8_CPU", "A8W8"),
    "w4a16": ("int4_wo_128", "uint4_wo_128", "MATMUL_NBITS"),
    "w8a16": ("int8_wo", "INT8_CPU_WEIGHTS"),
    "w4a4": ("int4_wa_64", "mxfp4", "nvfp4"),
    "w4a8": ("int4_fp8_128", "int4_fp8", "mxfp4_fp8"),
    "w4afp8": ("int4_fp8_128",),
    "a8w8": ("A8W8", "int8"),
    "fp8": ("fp8", "ptpc_fp8", "fp8_block_128", "mxfp8_e4m3", "fp8_wo"),
    "fp4": ("nvfp4", "mxfp4", "nvfp4_weight_only", "mxfp4_weight_only"),
    "mxfp8": ("mxfp8_e4m3",),
    "mxfp6": ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp6_e2m3_weight_only"),
    "nf4": ("iq4_nl",),
    "fp16": ("float16", "FP16"),
    "bf16": ("bfloat16", "BF16"),
    "awq": ("uint4_wo_128", "int4_wo_128"),
    "gptq": ("int4_wo_128", "uint4_wo_128"),
    "gguf": ("q4_k_m", "q8_0"),
}
"""Family -> its members, the usual one first."""

_SAME = {"2bit": "int2", "3bit": "int3", "4bit": "int4", "5bit": "int5", "6bit": "int6", "8bit": "int8",
         "i4": "int4", "i8": "int8", "q4": "int4", "q8": "int8", "q5": "int5", "q6": "int6", "q3": "int3", "q2": "int2",
         "u4": "uint4", "float8": "fp8", "half": "fp16"}  # fmt: skip


def family_of(word: str) -> tuple[str, ...]:
    """Return the schemes that a word may mean: "W8A8", "4-bit", "Q4_K_M"; nothing where it is no family."""
    plain = re.sub(r"[-_ ]", "", word.lower()).removesuffix("s")
    return FAMILIES.get(_SAME.get(plain, plain), ())


def named_in(word: str, names: Sequence[str]) -> str | None:
    """The first of `names` that a word means: by another spelling, or as a member of a family; None where none is."""
    for name in names:
        if name.lower() == word.lower().replace("-", "_"):
            return name
    return next((name for name in names if name in family_of(word)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence that names the members of a family, or the nearest names; "" where neither is.

    >>> suggestion("W8A8", ["int8", "int8_dynamic", "fp8"])
    "'W8A8' is a family: 'int8' or 'int8_dynamic'."
    """
    listed = list(known)
    for name in listed:
        if name.lower() == word.lower().replace("-", "_"):
            return f"Did you mean {name!r}?"
    members = [name for name in family_of(word) if name in listed]
    if members:
        return f"{word!r} is a family: {' or '.join(map(repr, members[:3]))}."
    lower = {name.lower(): name for name in listed}
    near = difflib.get_close_matches(word.lower(), list(lower), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(repr(lower[name]) for name in near)}?" if near else ""
