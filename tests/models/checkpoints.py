"""What the tests of checkpoint formats share: a frozen model, its logits, and what its file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quark.core.spec import LayerSpec
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import tiny_llama, token_batches


def frozen(scheme: str | LayerSpec, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A frozen tiny Llama, its layers quantized by a scheme or spec, its head in float."""
    if isinstance(scheme, str):
        config = LLMTemplate.get("llama").get_config(scheme)
    else:
        config = QConfig(global_quant_config=config_of_layer(scheme), exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(tiny_llama(dtype=dtype, **options), token_batches()))


def logits(model: Any) -> torch.Tensor:
    """Of one batch of token ids."""
    with torch.no_grad():
        out: torch.Tensor = model(token_batches(1)[0]).logits
    return out


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The quantized weights of a frozen model by the names of their layers."""
    return {name: layer.weight.detach() for name, layer in quantized_layers(model).items()}


def stored(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the quantization_config of a folder."""
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config["quantization_config"]


def change_config(folder: Path, **entries: Any) -> None:
    """Overwrite entries of the quantization_config of a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= entries
    path.write_text(json.dumps(config))
