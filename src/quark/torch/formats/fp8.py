"""The `fp8` format: float8_e4m3 weights as vLLM, SGLang and transformers read them under `quant_method` "fp8".

    one scale a weight     weight f8 (O, I), weight_scale float32 ()            vLLM, SGLang
    one scale a tile       weight f8 (O, I), weight_scale_inv float32 (O/r, I/c)  these and transformers
    static inputs          input_scale float32 ()
    KV cache               self_attn.k_scale, self_attn.v_scale ()

In spite of its name, weight_scale_inv is what the codes are multiplied by. Tiles come with live scales of the inputs,
one for each c values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerBlock, PerGroup, PerTensor
from quark.core.spec import FLOAT_SCALES, LayerSpec, ScaleType, TensorSpec
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.format import (
    POST_ROPE,
    Folder,
    FolderFormat,
    Named,
    Stored,
    kv_name,
    kv_source,
    one_spec,
    require_whole_groups,
    with_cache,
)
from quark.torch.formats.quark.layout import QuarkLayout

E4M3 = DTYPES["fp8_e4m3"]
_TILE_SCALE = "weight_scale_inv"


class Fp8Layout(QuarkLayout):
    """The quark layout with float32 scales."""

    def scale_dtype(self) -> torch.dtype:
        """float32, whatever the spec says."""
        return torch.float32


class Fp8Format(FolderFormat):
    """Folders with `quant_method` "fp8"."""

    name = "fp8"
    layout = Fp8Layout
    cache = ("fp8_e4m3",)
    cache_apart = True
    marker = (".weight_scale", f".{_TILE_SCALE}")

    def refusal(self, spec: LayerSpec) -> str | None:
        weight, live = spec.weight, spec.input
        if weight is None or not _is_plain_fp8(weight) or not isinstance(weight.granularity, (PerTensor, PerBlock)):
            return f"other weights than float8_e4m3 with one scale or one for each tile; here {weight}"
        if spec.bias or spec.output:
            return "quantized biases or outputs"
        split = None if live is None else live.granularity
        if isinstance(split, PerGroup):  # whether their size has to divide a row or not
            split = replace(split, pad=True)
        if live is not None and not (_is_plain_fp8(live) and split == _input_split(weight)):
            return f"the input {live} beside the weight {weight}"
        if isinstance(weight.granularity, PerBlock) and not (live and live.dynamic):
            return "tiles whose inputs have no live scales"
        return None

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        super().check(layers, folder)
        one_spec(self.name, folder.specs.values())
        for name, spec in folder.specs.items():
            require_whole_groups(self.name, name, layers[name], spec)

    def unread(self, folder: Folder) -> str | None:
        """Their sources (transformers 5.23, vLLM 0.33, SGLang 0.5.23) raise an error for an `activation_scheme` other
        than static and dynamic.
        """
        if one_spec(self.name, folder.specs.values()).input is not None:
            return None
        return (
            "transformers, vLLM and SGLang refuse fp8 folders whose inputs are not quantized (activation_scheme null). "
            "Possible for them: the schemes fp8 and fp8_block_128, whose inputs are; for transformers, the quark format"
        )

    def describe(self, folder: Folder) -> dict[str, Any]:
        spec = one_spec(self.name, folder.specs.values())
        assert spec.weight is not None
        split = spec.weight.granularity
        tiles = {"weight_block_size": list(split.size), "fmt": "e4m3"} if isinstance(split, PerBlock) else {}
        return {
            "quant_method": "fp8",
            "activation_scheme": None if spec.input is None else "dynamic" if spec.input.dynamic else "static",
            **tiles,
            "ignored_layers": folder.ignored_layers,
            "kv_cache_scheme": "static" if folder.cache else None,
            "export": {**folder.export_block(), POST_ROPE: folder.config.kv_cache_post_rope},
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        tile = stored.get("weight_block_size")
        split = PerBlock((int(tile[0]), int(tile[1])), pad=True) if tile else PerTensor()
        weight = TensorSpec(E4M3, split, scale_type=ScaleType.float32)
        scheme = stored.get("activation_scheme")
        live = replace(weight, granularity=_input_split(weight), dynamic=scheme == "dynamic") if scheme else None
        config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=weight, input=live)))
        return Stored(with_cache(config, TensorSpec(E4M3) if stored.get("kv_cache_scheme") else None, stored, model))

    def stored_name(self, source: str, suffix: str, spec: LayerSpec | None) -> str:
        name = super().stored_name(source, suffix, spec)
        tiles = spec is not None and spec.weight is not None and isinstance(spec.weight.granularity, PerBlock)
        return f"{name}_inv" if tiles and name.endswith(".weight_scale") else kv_name(source, suffix) or name

    def received(self, stored: str, tensor: torch.Tensor) -> Named | None:
        # A scale may have come as one value in a vector.
        scalar = tensor.reshape(()) if stored.endswith("_scale") and tensor.numel() == 1 else tensor
        if stored.endswith(f".{_TILE_SCALE}"):
            return stored.removesuffix("_inv"), tensor
        return kv_source(stored) or stored, scalar


def _is_plain_fp8(spec: TensorSpec) -> bool:
    """float8_e4m3 under one level of float scales."""
    return spec.dtype == E4M3 and spec.scale_type in FLOAT_SCALES and not spec.scale_spec and not spec.code_spec


def _input_split(weight: TensorSpec) -> PerTensor | PerGroup:
    """How the inputs are split beside such a weight."""
    return (
        PerGroup(-1, weight.granularity.size[1], pad=True) if isinstance(weight.granularity, PerBlock) else PerTensor()
    )
