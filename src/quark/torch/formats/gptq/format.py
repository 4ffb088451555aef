"""The `gptq` format: the folders of AutoGPTQ and gptqmodel, which transformers (with gptqmodel) and vLLM read.

`checkpoint_format` is "gptq" (version 1: zero points are stored minus one) or "gptq_v2". Symmetric types are written in
version 1, which all programs read, others in version 2, which has a place for the zero point 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from quark.base.bounded_regex import full_match
from quark.base.libraries.transformers import is_conv1d
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerChannel, PerGroup
from quark.core.spec import FLOAT_SCALES, LayerSpec, ScaleType, TensorSpec
from quark.errors import ConfigError, FormatError, NotSupportedError, ShapeError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.format import (
    Folder,
    FolderFormat,
    Named,
    Stored,
    check_scale_dtype,
    one_spec,
    only_weight,
    require,
)
from quark.torch.formats.gptq.layout import GptqLayout, Variant
from quark.torch.formats.layout import WORD, Layout
from quark.torch.model.names import published_names

TYPES = ("int2", "int3", "int4", "int8", "uint2", "uint4", "uint8")
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""checkpoint_format -> version of the zero points."""
_OVERRIDDEN = frozenset({"bits", "group_size", "sym"})
"""Keys that one layer may have otherwise than the others."""
_BORROWER = "gptqmodel"
"""The program whose zero points of 0 borrow from the next field, as `meta` names it."""


class GptqFormat(FolderFormat):
    """Folders with `quant_method` "gptq"."""

    name = "gptq"
    layout = GptqLayout
    marker = (".qweight",)
    leaves: ClassVar[Mapping[str, str]] = {
        "weight": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros", "weight_g_idx": "g_idx",
    }  # fmt: skip

    def refusal(self, spec: LayerSpec) -> str | None:
        weight = only_weight(spec)
        plain = weight and weight.dtype.name in TYPES and not (weight.float_zero_point or weight.code_spec)
        if weight is None or not plain or weight.scale_type not in FLOAT_SCALES or weight.scale_spec:
            return f"anything but integer weights of 2, 3, 4 or 8 bits; here {spec}"
        split = weight.granularity
        by_rows = isinstance(split, PerChannel) and split.axis in (0, -2)
        if not by_rows and not (isinstance(split, PerGroup) and split.axis in (-1, 1)):
            return f"{weight.dtype} weights per {split}"
        return None

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        super().check(layers, folder)
        one_spec(self.name, folder.specs.values())
        for name, spec in folder.specs.items():
            weight: torch.Tensor = getattr(layers[name], "float_weight", layers[name].weight)  # type: ignore[arg-type]
            assert spec.weight is not None
            bits, split = spec.weight.dtype.bits, spec.weight.granularity
            ragged = [side for side in weight.shape if side * bits % WORD]
            if ragged:
                raise ShapeError(
                    f"{name}: the gptq format packs {bits}-bit codes into words of {WORD} bits; {ragged[0]} leave a "
                    "rest. Possible: to leave the layer in float (exclude)."
                )
            if isinstance(split, PerGroup) and split.size > 0 and weight.shape[1] % split.size:
                raise ShapeError(f"{name}: the gptq format needs whole groups; {split.size} of {weight.shape[1]} here.")
            scales = GptqLayout(spec.weight, weight.dtype).scale_dtype()
            check_scale_dtype(self.name, name, scales, weight.dtype)

    def describe(self, folder: Folder) -> dict[str, Any]:
        weight = one_spec(self.name, folder.specs.values()).weight
        assert weight is not None
        split = weight.granularity
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if weight.symmetric else "gptq_v2",
            "bits": weight.dtype.bits,
            "group_size": split.size if isinstance(split, PerGroup) else -1,
            "sym": weight.symmetric,
            "desc_act": False,
            "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in folder.specs),
            # What stays in float: a key with "-:" is a regular expression of names.
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in folder.ignored_layers} or None,
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        _refuse_forms(stored)
        publish = published_names(model)
        names = {name if name in quantized else publish(name): name for name, _ in _linear(model)}
        modules = dict(_linear(model))
        layers = {name: _read_layer(name, stored, modules.get(names.get(name, ""))) for name in sorted(quantized)}
        distinct = list(dict.fromkeys(layers.values()))
        if len(distinct) == 1:
            config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=distinct[0])))
        else:
            each = {name: config_of_layer(LayerSpec(weight=spec)) for name, spec in layers.items()}
            own = {names[name]: layer for name, layer in each.items() if name in names}
            config = QConfig(global_quant_config=config_of_layer(LayerSpec()), layer_quant_config={**each, **own})
        bare = {name for name, module in names.items() if getattr(modules[module], "bias", None) is None}
        return Stored(config, form=GptqFolder(stored, layers, frozenset(bare & quantized)))


class GptqFolder(GptqFormat):
    """The format as one folder has it.

    Args:
        stored: Its quantization_config.
        layers: What is quantized: name in the files -> spec of the weight.
        bare: Names of those without a bias.
    """

    def __init__(self, stored: dict[str, Any], layers: Mapping[str, TensorSpec], bare: frozenset[str]) -> None:
        writers = (stored.get("meta") or {}).get("quantizer") or []
        borrows = any(str(writer).startswith(_BORROWER) for writer in [writers, *writers])
        version = _VERSIONS[str(stored.get("checkpoint_format") or stored.get("format") or "gptq").lower()]
        self.variant = Variant(version, bool(stored.get("desc_act")), borrows)
        self.layers = layers
        self.bare = bare

    def make_layout(
        self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype, pack_method: str, real: bool
    ) -> Layout:
        return GptqLayout(spec, dtype, variant=self.variant)

    def received(self, stored: str, tensor: torch.Tensor) -> Named | None:
        parent, _, leaf = stored.rpartition(".")
        if parent not in self.layers:
            return stored, tensor
        if leaf == "g_idx" and not self.variant.ordered:
            self._refuse_order(stored, tensor, self.layers[parent])
            return None
        if leaf == "bias" and parent in self.bare and not bool(tensor.any()):
            return None  # AutoGPTQ gave every layer one
        # Programs write float16, whatever the model is in.
        exact = tensor.float() if leaf in ("scales", "bias") and tensor.dtype == torch.float16 else tensor
        return super().received(stored, exact)

    def _refuse_order(self, name: str, order: torch.Tensor, spec: TensorSpec) -> None:
        """Refuse groups that are no runs of inputs, where the config says that they are."""
        size = spec.granularity.size if isinstance(spec.granularity, PerGroup) else max(1, order.numel())
        if not torch.equal(order.long(), torch.arange(order.numel(), device=order.device) // size):
            raise FormatError(
                f"{name} cannot be read: its groups are no runs of {size} inputs, and desc_act is false, with which "
                "programs do not look at it."
            )


def _linear(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) or is_conv1d(module)
    )


def _refuse_forms(stored: dict[str, Any]) -> None:
    """Raise NotSupportedError for folders of other forms than the two versions."""
    form = str(stored.get("checkpoint_format") or stored.get("format") or "gptq").lower()
    words = str(stored.get("pack_dtype") or "int32").removeprefix("torch.")
    other = next((key for key in ("adapter", "rotation", "is_marlin_format") if stored.get(key)), None)
    if form not in _VERSIONS or words != "int32" or other:
        what = f"{other}={stored[other]!r:.60}" if other else f"checkpoint_format={form!r}, pack_dtype={words!r}"
        raise NotSupportedError(
            f"This gptq checkpoint has {what}; can be imported: checkpoint_format {', '.join(_VERSIONS)}, in int32 "
            "words, without adapters and rotations."
        )


def _read_layer(name: str, stored: dict[str, Any], module: nn.Module | None) -> TensorSpec:
    """How the weight of a layer is quantized."""
    entries = {**stored, **_override(name, stored.get("dynamic") or {})}
    bits, size, symmetric = require(entries, "bits", "gptq"), require(entries, "group_size", "gptq"), entries.get("sym")
    symmetric = True if symmetric is None else symmetric
    good = isinstance(size, int) and (size == -1 or size > 0) and isinstance(symmetric, bool)
    if f"int{bits}" not in TYPES or not good:
        raise NotSupportedError(
            f"{name}: bits={bits!r}, group_size={size!r}, sym={symmetric!r} cannot be imported from a gptq checkpoint; "
            "possible: 2, 3, 4 or 8 bits, groups of some size or -1."
        )
    inputs = getattr(module, "in_features", 0)
    if size > 0 and inputs % size:
        raise NotSupportedError(f"{name}: groups of {size} do not divide its {inputs} inputs; whole groups are read.")
    split: Granularity = PerChannel(0) if size == -1 else PerGroup(-1, size)
    # Those of files are float16, in models of any dtype.
    half = isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dtype == torch.float16
    scale_type = ScaleType.float if half else ScaleType.float32
    return TensorSpec(DTYPES[f"int{bits}"], split, symmetric=symmetric, scale_type=scale_type)


def _override(name: str, dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the first key of `dynamic` that matches a layer, as gptqmodel and vLLM match them."""
    for key, entries in dynamic.items():
        try:
            found = full_match(f"(?:{key.removeprefix('-:').removeprefix('+:')}).*", name)
        except ConfigError as error:
            raise FormatError(f"dynamic: {error}") from None
        if found and key.startswith("-:"):
            raise FormatError(f"{name} is quantized in the files, but {key!r:.80} of dynamic excludes it.")
        if found:
            other = sorted(entries.keys() - _OVERRIDDEN)
            differing = [each for each in other if each in ("desc_act", "format", "pack_dtype") and entries[each]]
            if differing:
                raise NotSupportedError(
                    f"{name}: dynamic has {differing[0]}={entries[differing[0]]!r:.40} for it; possible: "
                    f"{', '.join(sorted(_OVERRIDDEN))}."
                )
            return {each: entries[each] for each in _OVERRIDDEN & entries.keys()}
    return {}
