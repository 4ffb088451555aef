"""Experts in the `compressed-tensors` format: its readers put those of a block together, and know one scheme for all.

vLLM 0.33.0 (compressed_tensors_moe.py, get_moe_method) asks for the scheme of expert 0, which must be one for its
projections. transformers 5.23.0 (integrations/compressed_tensors.py, get_experts_scheme) decodes the experts of all
blocks by one group: the first with a target that begins with "re:" and holds "experts", else the first group.
"""

from __future__ import annotations

import re

from quark.base.libraries.transformers import DECODES_EXPERTS, decodes_experts, transformers_version
from quark.core.granularity import PerChannel, PerTensor
from quark.core.names.patterns import matches
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch.formats.format import Folder

EXPERT = re.compile(r"(?P<block>experts?)\.\d+\.(?P<leaf>.+)$")
"""The end of the name of a layer of an expert."""


def check_experts(folder: Folder) -> None:
    """Refuse experts that every reader would refuse or decode wrongly.

    Raises:
        NotSupportedError: The layers of the experts of one block differ.
    """
    for block, layers in folder.experts.items():
        kinds = {folder.specs.get(layer, LayerSpec()): layer for layer in reversed(layers)}
        if len(kinds) > 1:
            raise NotSupportedError(
                f"{block}: readers of the compressed-tensors format know one scheme for all experts of a block; "
                f"{' and '.join(sorted(kinds.values())[:2])} differ. Possible: one scheme for them, all in float "
                f"(--exclude '{block}*'), or the quark format."
            )


def undecoded_experts(folder: Folder) -> str | None:
    """Return a sentence about experts that transformers does not decode; None where it decodes all."""
    specs = {folder.specs[layer] for layers in folder.experts.values() for layer in layers if layer in folder.specs}
    if specs and not decodes_experts():
        return (
            f"transformers {transformers_version()}, which is installed here, does not decode all experts from "
            "compressed-tensors folders: it fails, or computes with wrong weights. vLLM and quark read them. For "
            f"transformers: {DECODES_EXPERTS} or newer, or the quark format."
        )
    fault = "of several schemes" if len(specs) > 1 else next(filter(None, map(_undecoded, specs)), None)
    if fault is None:
        return None
    return (
        f"transformers (5.23.0) does not decode experts {fault} from compressed-tensors folders: it fails, or computes "
        "with wrong weights. vLLM and quark read them. For transformers: the quark format, or another scheme."
    )


def _undecoded(spec: LayerSpec) -> str | None:
    """Return the part of a scheme that CompressedTensorsDequantize does not know in experts; None: it knows all."""
    weight = spec.weight
    assert weight is not None
    if not weight.dtype.is_float:
        if spec.input is not None:
            return "in integers with quantized inputs"
        return None if weight.symmetric and weight.dtype.signed else "in integers with zero points"
    if weight.scale_spec is not None:
        return "with a scale of scales"
    if weight.dtype.bits == 8 and not isinstance(weight.granularity, (PerTensor, PerChannel)):
        return "in 8-bit floats with scales of groups or tiles"
    return None


def group_targets(names: list[str], folder: Folder) -> list[str]:
    """The targets of a group with these layers: their names, and where all experts are among them a pattern for those.

    Args:
        names: In the model.
        folder: What is quantized.
    """
    experts = {layer for layers in folder.experts.values() for layer in layers if layer in folder.specs}
    forms = folder.forms(names)
    if not experts or not experts <= set(names):
        return forms
    inside = {*folder.forms(experts)}
    pattern = _pattern(inside)
    if pattern is None or {name for name in folder.forms(folder.specs) if matches(name, pattern)} != inside:
        return forms
    return [pattern, *(form for form in forms if form not in inside)]


def _pattern(names: set[str]) -> str | None:
    """A regular expression for layers of experts, whatever is before them."""
    found = [EXPERT.search(name) for name in sorted(names)]
    if not all(found):
        return None
    leaves = "|".join(dict.fromkeys(re.escape(each["leaf"]) for each in found if each))
    blocks = "|".join(dict.fromkeys(each["block"] for each in found if each))
    return rf"re:.*\.({blocks})\.\d+\.({leaves})$"


def ignored_experts(folder: Folder) -> list[str]:
    """Return the entries of `ignore` for experts in float, each by itself for readers, and here in one tensor."""
    if any(layer in folder.specs for layers in folder.experts.values() for layer in layers):
        return list(folder.float_experts)
    pattern = _pattern(set(folder.float_experts)) if folder.float_experts else None
    return list(folder.float_experts) if pattern is None else [pattern]
