"""A folder that quark makes of a network of diffusers is loaded by diffusers itself, and computes the frozen model.

Loaded by `from_pretrained` of the class of diffusers; the tiny networks are of its own classes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.schemes import SCHEMES
from quark.errors import ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.bit_budget.rules import convolutions
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.plan import divides, make_plan
from tests.models.denoisers import ROWS, denoiser, output, step

EVERY = [
    pytest.param(name, scheme, id=f"{name} {scheme}", marks=() if (name, scheme) in EVERYDAY else pytest.mark.slow)
    for EVERYDAY in [{("sd3", "int8"), ("wan", "ptpc_fp8"), ("aura", "mx6")}]
    for name in ROWS
    for scheme in SCHEMES
]


@pytest.mark.parametrize(("name", "scheme"), EVERY)
def test_diffusers_loads_a_folder_and_computes_the_frozen_model(name: str, scheme: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    denoiser(name, dtype).save_pretrained(tmp_path / "float")
    model = load_float_model(OpenedFolder(tmp_path / "float"))
    assert model.dtype == dtype, "the type that is stored, which diffusers would not take by itself"
    config = LLMTemplate.get("auto").get_config(scheme)
    if not divides(config, model):
        with pytest.raises(ShapeError, match="Possible"):
            ModelQuantizer(config).quantize_model(model)
        return
    quantizer = ModelQuantizer(config)
    frozen = quantizer.freeze(quantizer.quantize_model(model, [step(name, seed, dtype) for seed in (1, 2)]))
    export_safetensors(frozen, tmp_path / "out")
    loaded: Any = type(model).from_pretrained(tmp_path / "out")
    batch = step(name, 3, dtype)
    wanted, made = output(frozen, batch), output(loaded, batch)
    assert torch.equal(made, wanted)
    assert loaded.dtype == dtype
    plain = output(type(model).from_pretrained(tmp_path / "float", torch_dtype=dtype), batch)
    # Of bfloat16, float16 holds all numbers of this size.
    assert not torch.equal(plain, wanted) or scheme in ("bfloat16", "float16")


MEASURED = [pytest.param(name, marks=() if name == "flux" else pytest.mark.slow) for name in ROWS]


@pytest.mark.parametrize("name", MEASURED)
@torch.no_grad()
def test_a_budget_knows_what_the_layers_of_all_lists_of_blocks_lose(name: str, tmp_path: Path) -> None:
    """The loss of a candidate is half the squared error of the output, however many lists of blocks there are."""
    model, batches = denoiser(name), [step(name, seed) for seed in (1, 2)]
    model.save_pretrained(tmp_path / "float")
    config = LLMTemplate.get("auto").get_config("int8_wo")
    config = replace(config, exclude=[*config.exclude, *convolutions(model, config)])
    table = measure_sensitivity(tmp_path / "float", batches, ["int8_wo", "int4_wo_per_channel"], config)
    assert {layer for group in table.groups for layer in group.layers} == {*make_plan(config, model).layers}
    expected = [output(model, batch) for batch in batches]
    for candidate in table.candidates:
        chosen = table.uniform(candidate)
        assert chosen is not None
        quantizer = ModelQuantizer(table.config(chosen, config))
        quantized = quantizer.freeze(quantizer.quantize_model(denoiser(name), batches))
        errors = [
            (output(quantized, batch) - y).square().mean() / 2 for batch, y in zip(batches, expected, strict=True)
        ]
        # Of first order, and from two samples of noise: measured within a factor of 2, of Sana's linear attention 2.6.
        assert 1 / 3 < chosen.loss / float(torch.stack(errors).mean()) < 3
