"""The `quark` format: the folder around the quark layout. It takes every spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quark.__version__ import __version__
from quark.core.blocks.block_types import BlockType
from quark.core.names.patterns import first_match
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.formats.format import Folder, FolderFormat, Stored
from quark.torch.formats.quark.layout import QuarkLayout
from quark.torch.formats.quark.server_rules import with_server_rules


class QuarkFormat(FolderFormat):
    """Folders with `quant_method` "quark": what transformers' quark integration, vLLM and SGLang read."""

    name = "quark"
    layout = QuarkLayout
    options = True
    cache = ("fp8_e4m3", "int8")
    cache_heads = True
    own_loader = True

    def refusal(self, spec: LayerSpec) -> str | None:
        if spec.weight is not None and isinstance(spec.weight.dtype, BlockType):
            return f"the block types of GGUF; here {spec.weight}"
        return None

    def check(self, layers: Mapping[str, nn.Module], folder: Folder) -> None:
        """Everything that can be quantized can be stored, but the block types of GGUF."""
        for name, spec in folder.specs.items():
            if reason := self.refusal(spec):
                raise NotSupportedError(f"{name}: the quark format cannot hold {reason}. {self.possible()}")

    def describe(self, folder: Folder) -> dict[str, Any]:
        """The config with excludes resolved, and what the user wrote beside it."""
        config, stored = folder.config, folder.written
        # Readers look for the patterns of the cache among the layers, too.
        own = config.layer_type_quant_config.get(nn.Linear, config.global_quant_config)
        rules = stored["layer_quant_config"]
        caches = {
            pattern: replace(own, output_tensors=cache.output_tensors).to_dict()
            for pattern, cache in config.kv_cache_quant_config.items()
        }
        for pattern, cache_layer in caches.items():
            rules.setdefault(pattern, cache_layer)
        rules = with_server_rules(rules, folder)
        # vLLM refuses rules whose name a pattern of the cache matches and that do not say the same of it.
        stored["layer_quant_config"] = {
            name: {**rule, "output_tensors": cache["output_tensors"]}
            if (cache := first_match(name, caches)) is not None
            else rule
            for name, rule in rules.items()
        }
        patterns = stored["exclude"]
        return {
            "quant_method": "quark",
            "version": __version__,
            **stored,
            "exclude": folder.ignored,
            "exclude_patterns": patterns,
            "export": folder.export_block(),
        }

    def read(self, stored: dict[str, Any], quantized: set[str], model: nn.Module) -> Stored:
        export = stored.get("export") or {}
        return Stored(
            QConfig.from_dict(stored),
            export.get("pack_method", "reorder"),
            export.get("weight_format") or "real_quantized",
        )
