"""The types of what a config.json says of quantization: a text where a number is meant is no number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.errors import FormatError

_NAMES = (list, dict, str, None)
_GROUP = {"bits": (int,), "group_size": (int,)}
_WEIGHTS: dict[str, tuple[type | None, ...]] = {
    "num_bits": (int,), "type": (str,), "symmetric": (bool, None), "group_size": (int, None), "strategy": (str, None),
    "block_structure": (list, str, None), "dynamic": (bool, str), "actorder": (bool, str, None),
}  # fmt: skip
_FIELDS: dict[str, dict[str, tuple[type | None, ...]]] = {
    "awq": {**_GROUP, "zero_point": (bool,), "version": (str,), "modules_to_not_convert": _NAMES},
    "gptq": {**_GROUP, "sym": (bool, None), "desc_act": (bool, None), "dynamic": (dict, None), "lm_head": (bool, None),
             "checkpoint_format": (str, None)},
    "auto-round": {**_GROUP, "sym": (bool, None)},
    "fp8": {"weight_block_size": (list, None), "activation_scheme": (str, None), "fmt": (str, None),
            "ignored_layers": _NAMES, "modules_to_not_convert": _NAMES},
    "compressed-tensors": {"format": (str, None), "config_groups": (dict, None), "ignore": _NAMES},
    "mxfp4": {"modules_to_not_convert": _NAMES},
    "modelopt": {"quant_algo": (str, None), "kv_cache_quant_algo": (str, None), "exclude_modules": _NAMES,
                 "quantized_layers": (dict, None)},
}  # fmt: skip
"""`quant_method` -> field -> its types; None: it may be null. Fields of other names are not looked at."""
_GROUPED = ("group", "tensor_group")
_ROLES = ("weights", "input_activations", "output_activations")


def check_fields(method: str | None, section: Mapping[str, Any], where: object) -> None:
    """Compare the fields of a quantization section with their types.

    Args:
        method: From `method_of`.
        section: From `section_of`.
        where: The folder, for the message.

    Raises:
        FormatError: One has another type, or lacks what it needs.
    """
    for place, fields, known in _known(str(method), section):
        for name, kinds in known.items():
            # Not isinstance: true and false are no numbers.
            right = any(fields.get(name) is None if kind is None else type(fields.get(name)) is kind for kind in kinds)
            if name in fields and not right:
                possible = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
                raise FormatError(
                    f"{where}: {place}{name} in its config.json is {fields[name]!r:.40}, and {possible} is needed."
                )
        if known is _WEIGHTS and fields.get("strategy") in _GROUPED and not fields.get("group_size"):
            raise FormatError(
                f"{where}: {place}strategy in its config.json is {fields['strategy']!r}, and {place}group_size is "
                f"{fields.get('group_size')!r}. Possible: the number of values that share a scale."
            )


def _known(
    method: str, section: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, tuple[type | None, ...]]]]:
    """Parts of a section with the types of their fields, and where they stand."""
    yield "", section, _FIELDS.get(method, {})
    groups = section.get("config_groups") if method == "compressed-tensors" else None
    for name, group in groups.items() if isinstance(groups, dict) else ():
        for role in _ROLES if isinstance(group, dict) else ():
            if isinstance(group.get(role), dict):
                yield f"config_groups.{name}.{role}.", group[role], _WEIGHTS
