"""The `awq` format: 4-bit groups as AWQ's GEMM kernels (vLLM, SGLang, transformers) read them.

    qweight  int32 (I, O/8)     codes 0..15, 8 in a word in AWQ's order (0, 2, 4, 6, 1, 3, 5, 7)
    qzeros   int32 (I/g, O/8)   zero points, likewise
    scales   (I/g, O)           in the dtype of the model
    W[o, i] = (qweight[i, o] - qzeros[i // g, o]) * scales[i // g, o]

The codes of a signed type are stored 8 higher, with zero points 8: the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerGroup
from quark.core.scales import QParams
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import FormatError, ShapeError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.format import (
    Folder,
    FolderFormat,
    Stored,
    check_scale_dtype,
    one_spec,
    only_weight,
    require,
)
from quark.torch.formats.layout import Tensors
from quark.torch.formats.quark.layout import QuarkLayout


class AwqLayout(QuarkLayout):
    """The quark layout of uint4 groups is that of AWQ; int4 becomes uint4."""

    def __init__(
        self, spec: TensorSpec, model_dtype: torch.dtype, pack_method: str = "reorder", real: bool = True
    ) -> None:
        self.shift = 8.0 if spec.dtype.signed else 0.0
        super().__init__(replace(spec, dtype=DTYPES["uint4"], symmetric=False), model_dtype, "reorder")

    def store(self, x: torch.Tensor, params: QParams | None, frozen: bool = False) -> Tensors:
        assert params is not None and params.zero_point is not None
        return super().store(x, replace(params, zero_point=params.zero_point + self.shift), frozen)


class AwqFormat(FolderFormat):
    """Folders with `quant_method` "awq"."""

    name = "awq"
    layout = AwqLayout
    marker = (".qweight",)
    leaves: ClassVar[Mapping[str, str]] = {"weight": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}

    def refusal(self, spec: LayerSpec) -> str | None:
        weight = only_weight(spec)
        if weight is None or weight.dtype.name not in ("int4", "uint4") or weight.float_zero_point:
            return f"anything but weights in int4 or uint4 groups; here {spec}"
        split = weight.granularity
        if not isinstance(split, PerGroup) or split.axis not in (-1, 1) or split.size < 1:
            return f"{weight.dtype} weights per {split}"
        return None

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        super().check(layers, folder)
        one_spec(self.name, folder.specs.values())
        for name, spec in folder.specs.items():
            weight: torch.Tensor = getattr(layers[name], "float_weight", layers[name].weight)  # type: ignore[arg-type]
            if weight.shape[0] % 8:
                raise ShapeError(
                    f"{name}: the awq format packs 8 output channels in a word; {weight.shape[0]} leave a rest."
                )
            assert spec.weight is not None
            scales = AwqLayout(spec.weight, weight.dtype).scale_dtype()
            check_scale_dtype(self.name, name, scales, weight.dtype)

    def describe(self, folder: Folder) -> dict[str, Any]:
        weight = one_spec(self.name, folder.specs.values()).weight
        assert weight is not None and isinstance(weight.granularity, PerGroup)
        names, forms = folder.ignored_layers, folder.names.values()
        # Readers look for parts of names: what other classes call a layer is left out where a quantized one has that.
        tails = {name.split(".", count)[-1] for name in names for count in range(1, name.count(".") + 1)}
        quantized = [form for known in forms for form in known]
        ignored = [name for name in names if name not in tails or not any(name in layer for layer in quantized)]
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": weight.granularity.size,
            "modules_to_not_convert": ignored or None,
            "version": "gemm",
            # Always true: the kernels subtract qzeros, which the symmetric codes have too.
            "zero_point": True,
            "pack_method": "reorder",
            # vLLM reads the codes of a head where this says so.
            **({"lm_head": True} if any(name.rpartition(".")[2] == "lm_head" for name in folder.specs) else {}),
            "export": folder.export_block(),
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        bits, version = stored.get("bits"), str(stored.get("version", "gemm")).lower()
        size = require(stored, "group_size", self.name)
        if (bits, version) != (4, "gemm") or not isinstance(size, int) or size < 1:
            raise FormatError(
                f"This awq checkpoint has bits={bits}, version={version!r}, group_size={size}; "
                "can be imported: bits=4, version='gemm', groups of some size."
            )
        if stored.get("zero_point") is False:
            raise FormatError("This awq checkpoint has zero_point=False, but its tensors have zero points.")
        weight = TensorSpec(DTYPES["uint4"], PerGroup(-1, size), symmetric=False, scale_type=ScaleType.float)
        return Stored(QConfig(global_quant_config=config_of_layer(LayerSpec(weight=weight))))
