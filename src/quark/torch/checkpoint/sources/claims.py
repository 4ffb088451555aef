"""Compares what a config.json says of quantization with the names and types of the tensors in its folder.

Without this a folder of float weights under the config of a quantizer would be read as a quantized model without
quantized layers, and codes under a config of floats as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.errors import FormatError
from quark.torch.checkpoint.sources.encodings import ENCODINGS
from quark.torch.checkpoint.sources.fields import check_fields
from quark.torch.checkpoint.sources.methods import COMPRESSED, MODELOPT, method_of, section_of
from quark.torch.formats.gptq.auto_round import AUTO_ROUND

_Metas = Mapping[str, torch.Tensor]
"""Name of a stored tensor -> its dtype and shape, on the meta device."""


def _is_byte(metas: _Metas, name: str) -> bool:
    return name in metas and metas[name].dtype.itemsize == 1 and metas[name].dtype != torch.bool


def _has_scale(metas: _Metas, name: str) -> bool:
    parent, scale = name.rpartition(".")[0], name.removesuffix("_inv")
    return scale.endswith("weight_scale") and (
        _is_byte(metas, f"{parent}.weight") or f"{parent}.weight_packed" in metas
    )


_MARKS: dict[str, Callable[[_Metas, str], bool]] = {
    "bitsandbytes": lambda metas, name: ".quant_state.bitsandbytes__" in name or name.endswith(".SCB"),
    "torchao": lambda metas, name: name.endswith(("_qdata", ":qdata")),
    "mlx": lambda metas, name: (
        name.endswith(".scales")
        and metas.get(f"{name.removesuffix('scales')}weight", metas[name]).dtype == torch.uint32
    ),
    "gptq or awq": lambda metas, name: name.endswith((".qweight", ".B")) and not metas[name].dtype.is_floating_point,
    "mxfp4": lambda metas, name: name.endswith("_blocks") and _is_byte(metas, f"{name.removesuffix('blocks')}scales"),
    "scales beside codes": _has_scale,
}
"""Who stores codes -> whether a tensor is one that only they store."""
NEEDED: dict[str, tuple[str, ...]] = {
    **{program: (program,) for program in ENCODINGS},
    **dict.fromkeys(("gptq", "awq"), ("gptq or awq",)),
    **dict.fromkeys(AUTO_ROUND, ("gptq or awq", "scales beside codes")),
    "mxfp4": ("mxfp4",),
    "compressed-tensors": ("scales beside codes",),
}
"""`quant_method` -> the marks of which its folders have one."""
BYTES = ("fp8", MODELOPT)
"""Values of `quant_method` of folders that hold their codes in bytes, whatever scales them is called."""


def check_claim(folder: Path, config: Mapping[str, Any], metas: _Metas) -> None:
    """Compare what a config says of quantization with what the weight files hold.

    Args:
        folder: For the message.
        config: From `read_config`.
        metas: Of the tensors in the weight files; of none nothing is said.

    Raises:
        FormatError: A field of the config has another type, or the config names a quantizer whose codes are not there,
            or does not name that of the codes.
    """
    method, section = method_of(dict(config)), section_of(dict(config))
    check_fields(method, section, folder)
    shown = {mark: name for name in metas for mark, is_mark in _MARKS.items() if is_mark(metas, name)}
    named = "names no quantizer" if method is None else f"says that it is quantized by {method!r:.40}"
    if unclaimed := next((mark for mark in shown if method is None or (mark in ENCODINGS and mark != method)), None):
        raise FormatError(
            f"{folder} holds codes ({shown[unclaimed]}, as in folders of {unclaimed}), and its config.json {named}. "
            "Possible: the config.json that was written with these weights."
        )
    if metas and not _is_shown(str(method), metas, shown) and _claims_weights(section):
        raise FormatError(
            f"{folder}: its config.json {named}, and none of its {len(metas)} tensors holds such codes. Possible: the "
            "weights that were written with this config.json, or no quantization_config in it, if these are float."
        )


def _is_shown(method: str, metas: _Metas, shown: Collection[str]) -> bool:
    """True for a folder that holds the codes of a quantizer, or for a quantizer whose codes are not known here."""
    if method in BYTES:
        return any(_is_byte(metas, name) for name in metas)
    return method not in NEEDED or not {*NEEDED[method]}.isdisjoint(shown)


def _claims_weights(section: Mapping[str, Any]) -> bool:
    """True for a section that speaks of weights in codes.

    In compressed-tensors it may quantize caches or inputs alone, or store weights in a way that is refused by its name.
    """
    if section.get("quant_method") != "compressed-tensors":
        return True
    if section.get("format") not in COMPRESSED[1:] or section.get("sparsity_config"):
        return False
    groups = (section.get("config_groups") or {}).values()
    return any(group.get("weights") for group in groups if isinstance(group, dict))
