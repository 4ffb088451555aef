"""Every element type in every exporter: read back to the bit, or refused with an error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.core.dtypes import DTYPES, ONNX_ONLY, Dtype
from quark.core.granularity import PerChannel, PerGroup, PerTensor
from quark.core.spec import LayerSpec, ScaleType, TensorSpec
from quark.errors import NotSupportedError
from quark.torch import (
    ModelQuantizer,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_gguf,
    import_model_from_safetensors,
)
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats import FORMATS
from quark.torch.formats.format import Format
from quark.torch.writers.gguf.format import GgufFormat
from tests.models.onnx_sessions import exact_session
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama, token_batches

INPUTS, OUTPUTS = 128, 40
TYPES = [name for name in DTYPES if name not in ONNX_ONLY]
BATCHES = token_batches()
ONE_SCHEME = ("awq", "gptq", "fp8")
"""Formats of which all layers are quantized alike."""


def weights(row: Dtype, scale_type: ScaleType = ScaleType.float) -> list[TensorSpec]:
    """Specs of a weight of this type: one scale, a scale for each channel, for each group of 32.

    A cast has no scale, and a block format has blocks and scales of its own.
    """
    if row.name in ("float16", "bfloat16"):
        return [TensorSpec(row, observer="placeholder")]
    if row.is_block:
        own = ScaleType.float8_e8m0fnu if row.name == "mxint8" else ScaleType.float32
        return [TensorSpec(row, PerGroup(-1, row.block, pad=True), scale_type=own, observer="block")]
    return [TensorSpec(row, split, scale_type=scale_type) for split in (PerTensor(), PerChannel(0), PerGroup(-1, 32))]


def quantized(model: Any, specs: Sequence[TensorSpec], layers: Sequence[str], data: list[torch.Tensor]) -> Any:
    """The model with the layers quantized, each by the next spec, and all others in float."""
    by_name = {name: config_of_layer(LayerSpec(weight=specs[index % len(specs)])) for index, name in enumerate(layers)}
    quantizer = ModelQuantizer(QConfig(config_of_layer(LayerSpec()), layer_quant_config=by_name))
    return quantizer.freeze(quantizer.quantize_model(model, data))


def llama(seed: int = 0) -> Any:
    return tiny_llama(seed, torch.bfloat16, vocab_size=2048)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(BATCHES[0]).logits
    return out


def written_and_read(specs: Sequence[TensorSpec], form: Format, folder: Path) -> tuple[Any, Any]:
    """A model with weights of these specs, and the same read from the file that holds it."""
    model = quantized(llama(), specs, ["*q_proj", "*k_proj", "*v_proj"], BATCHES)
    if isinstance(form, GgufFormat):
        return model, import_model_from_gguf(llama(seed=9), export_gguf(model, folder, "model", LANGUAGE_MODEL))
    export_safetensors(model, folder / "model", form.name)
    return model, import_model_from_safetensors(llama(seed=9), folder / "model")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", [*FORMATS.values(), GgufFormat()], ids=lambda form: form.name)
def test_a_file_gives_the_weights_back_or_the_type_is_refused_by_name(form: Format, dtype: str, tmp_path: Path) -> None:
    scale_type = ScaleType.float16 if isinstance(form, GgufFormat) else ScaleType.float  # those that the file holds
    specs = weights(DTYPES[dtype], scale_type)
    taken = [spec for spec in specs if form.refusal(LayerSpec(weight=spec)) is None]
    refused = [spec for spec in specs if spec not in taken]
    for index, written in enumerate([[spec] for spec in taken] if form.name in ONE_SCHEME else [taken] * bool(taken)):
        model, loaded = written_and_read(written, form, tmp_path / str(index))
        assert torch.equal(logits(loaded), logits(model))
    if refused:
        with pytest.raises(NotSupportedError, match=rf"q_proj: the {form.name} format cannot hold .*\b{dtype}\b"):
            written_and_read(refused, form, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_onnx_runtime_computes_the_same_or_the_type_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    specs, x = weights(DTYPES[dtype]), torch.randn(3, INPUTS)
    layers = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in specs)
    model = quantized(Beside(layers).eval(), specs, [f"layers.{index}" for index in range(len(specs))], [x])
    try:
        file = export_onnx(model, tmp_path / "out", x, uint4_int4_flag=True, input_names=["x"])
    except NotSupportedError as error:
        assert dtype in str(error)
        return
    for wanted, found in zip(model(x), exact_session(file).run(None, {"x": x.numpy()}), strict=True):
        values = wanted.detach().numpy()
        assert np.abs(found - values).max() < 2e-6 * np.abs(values).max()


class Beside(nn.Module):
    """Layers that all read the input (..., 128), so that nothing rounded before a layer blurs what it gives."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)
