"""The folders of auto-round, which hold the tensors of the gptq or the awq format under a config of their own.

`packing_format` says which: "auto_round:auto_gptq" is version 1 of gptq, "auto_round" alone and "auto_round:gptqmodel"
version 2, "auto_round:auto_awq" is awq. `extra_config` has what single layers have otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quark.errors import FormatError, NotSupportedError

AUTO_ROUND = ("auto-round", "intel/auto-round")
"""Values of `quant_method`."""
INTEGERS = ("int", "int_sym", "int_asym")
MORE = ("static_kv_dtype", "static_attention_dtype", "rotation_config", "super_bits")
"""Keys for what is quantized, or done, beside the weights."""
WIDE = 16
"""Bits of what is not quantized."""
KEYS = ("bits", "group_size", "sym")
PATTERN = re.compile(r"[\\^$|()\[\]?+*]")
"""A character that makes a key of `extra_config` a regular expression: names of layers have none of these."""


def as_known(stored: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of gptq or awq that says the same as one of auto-round; others as they are.

    Raises:
        NotSupportedError: The tensors are in another form, or more than weights is quantized.
    """
    if stored.get("quant_method") not in AUTO_ROUND:
        return stored
    form, extra = _form(stored), stored.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(entries, dict) for entries in extra.values()):
        raise FormatError(f"extra_config of this auto-round checkpoint is {extra!r:.60}, not settings of layers.")
    for entries in (stored, *extra.values()):
        _refuse_others(form, entries)
    own = {key: stored[key] for key in KEYS if key in stored}
    if "awq" in form:
        _refuse_unlike(extra, own)
        return {"quant_method": "awq", "version": "gemm", **own}
    version = "gptq" if "gptq" in form and "gptqmodel" not in form else "gptq_v2"
    return {"quant_method": "gptq", "checkpoint_format": version, "desc_act": False, **own, "dynamic": _dynamic(extra)}


def _form(stored: Mapping[str, Any]) -> str:
    """How the tensors are packed; old folders call it `backend`."""
    said = (str(stored.get(key) or "auto").lower() for key in ("packing_format", "backend"))
    return next((form for form in said if form != "auto"), "auto_round:auto_gptq")


def _refuse_others(form: str, entries: Mapping[str, Any]) -> None:
    """Refuse other packings and types, and more than quantized weights."""
    known = re.fullmatch(r"auto_?round(:(auto_)?(gptq|awq)|:gptqmodel)?(:?exllamav2|:tritonv2)?", form)
    kind, inputs = str(entries.get("data_type") or "int"), entries.get("act_bits") or WIDE
    more = next((key for key in MORE if entries.get(key)), None)
    if not known or kind not in INTEGERS or not isinstance(inputs, int) or inputs < WIDE or more:
        raise NotSupportedError(
            f"This auto-round checkpoint has packing_format={form!r}, data_type={kind!r}, act_bits={inputs!r:.20}"
            f"{f', {more}' if more else ''}; can be imported: integer weights alone, packed as auto_round, "
            "auto_round:auto_gptq, auto_round:gptqmodel or auto_round:auto_awq."
        )


def _refuse_unlike(extra: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> None:
    """Refuse layers in other groups or bits than the rest, which the awq format cannot say."""
    for name, entries in extra.items():
        unlike = [key for key in KEYS[:2] if entries.get(key, own.get(key)) != own.get(key)]
        if unlike and _bits(entries) < WIDE:
            raise NotSupportedError(
                f"extra_config has {unlike[0]}={entries[unlike[0]]!r} for {name}; of auto_round:auto_awq can be "
                "imported: one scheme for all layers."
            )


def _dynamic(extra: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The `dynamic` of gptq that says the same: names come before patterns, and a pattern may match anywhere."""
    names = {f"^{re.escape(key)}$": entries for key, entries in extra.items() if not PATTERN.search(key)}
    patterns = {f".*?(?:{key})": entries for key, entries in extra.items() if PATTERN.search(key)}
    return {f"{'+' if _bits(entries) < WIDE else '-'}:{key}": entries for key, entries in (names | patterns).items()}


def _bits(entries: Mapping[str, Any]) -> int:
    """Those of a layer's own; fewer than WIDE where nothing is said."""
    bits = entries.get("bits", 0)
    return bits if isinstance(bits, int) else 0
