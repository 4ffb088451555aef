"""Every scheme in every registered format: written and read back to the bit, or refused with what is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.errors import NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.checkpoint.loading import empty_params
from quark.torch.formats import FORMATS
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import tiny_llama, token_batches

RECIPROCAL = {("compressed-tensors", "nvfp4"), ("compressed-tensors", "fp4_block16_scale_e4m3")}
"""Formats that store 1 / scale: taking the reciprocal twice can move the last bit of a scale of scales, unless it is a
power of two."""


def frozen(scheme: str, dtype: torch.dtype, powers_of_two: bool = False) -> Any:
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    model = quantizer.quantize_model(tiny_llama(dtype=dtype), token_batches())
    for name, scale in model.named_buffers() if powers_of_two else ():
        if name.endswith(".scale_2"):
            scale.copy_(scale.log2().round().exp2())
    return quantizer.freeze(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(token_batches(1)[0]).logits
    return out


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "quark"])  # tests/torch/formats/test_formats.py
def test_a_scheme_is_read_back_or_refused(form: str, scheme: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    if FORMATS[form].refusal(SCHEMES[scheme]) is not None:
        with pytest.raises(NotSupportedError, match="It takes the schemes"):
            FORMATS[form].check_scheme(scheme)
        return
    FORMATS[form].check_scheme(scheme)
    model = frozen(scheme, dtype, powers_of_two=(form, scheme) in RECIPROCAL)
    export_safetensors(model, tmp_path / "out", form)
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=dtype), tmp_path / "out")
    assert quantized_layers(loaded).keys() == quantized_layers(model).keys()
    assert torch.equal(logits(loaded), logits(model))


STATIC = [name for name, spec in SCHEMES.items() if spec.input is not None and not spec.input.dynamic]
FROM_TO = [(form, scheme) for scheme in STATIC for form in FORMATS if FORMATS[form].refusal(SCHEMES[scheme]) is None]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("form", "scheme"),
    [pytest.param(*p, marks=() if p == ("compressed-tensors", "fp8") else pytest.mark.slow) for p in FROM_TO],
)
def test_one_scale_is_read_in_every_shape_and_written_in_that_of_the_format(
    form: str, scheme: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Programs write the one scale of a tensor as a scalar, a vector or a matrix of one value."""
    model = frozen(scheme, torch.float32, powers_of_two=True)
    file = export_safetensors(model, tmp_path / "source", form) / "model.safetensors"
    tensors = {n: x.reshape(shape) if x.numel() == 1 and "_scale" in n else x for n, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    for target in (name for name in FORMATS if FORMATS[name].refusal(SCHEMES[scheme]) is None):
        loaded = import_model_from_safetensors(tiny_llama(seed=9), tmp_path / "source")
        again = import_model_from_safetensors(tiny_llama(seed=8), export_safetensors(loaded, tmp_path / target, target))
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(("form", "scheme"), sorted(RECIPROCAL))
def test_a_reciprocal_moves_a_scale_by_its_last_bit(form: str, scheme: str, tmp_path: Path) -> None:
    """Each reciprocal is rounded once, by 2^-24 of its value at most."""
    model = frozen(scheme, torch.float32)
    export_safetensors(model, tmp_path / "out", form)
    loaded = quantized_layers(import_model_from_safetensors(tiny_llama(seed=9), tmp_path / "out"))
    for name, layer in quantized_layers(model).items():
        ours = {role: float(layer.quantizer(role).scale_2) for role in ("weight", "input")}
        theirs = {role: float(loaded[name].extras(role)["scale_2"]) for role in ("weight", "input")}
        theirs["weight"] = 1 / theirs["weight"]  # a weight is decoded from what the file holds
        assert theirs == pytest.approx(ours, rel=2**-23)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_refused_model_names_the_layer_and_leaves_nothing(form: str, tmp_path: Path) -> None:
    refused = [name for name, spec in SCHEMES.items() if FORMATS[form].refusal(spec)]
    for scheme in refused[:2]:
        with pytest.raises(NotSupportedError, match=r"layers\.0.*It takes the schemes"):
            export_safetensors(frozen(scheme, torch.float32), tmp_path / "out", form)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_format_takes_something_and_plans_without_values(form: str) -> None:
    taken = [spec for spec in SCHEMES.values() if FORMATS[form].refusal(spec) is None]
    assert taken or form == "fp8"
    for layer in taken:
        _shapes_are_planned(form, layer)


def _shapes_are_planned(form: str, layer: LayerSpec) -> None:
    from quark.core.quantize import compute_qparams

    spec, x = layer.weight, torch.randn(64, 256)
    assert spec is not None
    layout = FORMATS[form].make_layout(spec, layer, x.dtype, "reorder", True)
    params = None if spec.is_cast else compute_qparams(x, spec)
    stored = layout.store(x, params)
    planned = layout.store(x.to("meta"), empty_params(spec, tuple(x.shape)))
    assert {n: (t.dtype, t.shape) for n, t in planned.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
