"""A folder that quark makes of a network of diffusers is loaded by diffusers itself, and computes the frozen model.

Loaded by `from_pretrained` of the class of diffusers; the tiny networks are of its own classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.schemes import SCHEMES
from quark.errors import ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.plan import divides
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
    model = load_float_model(tmp_path / "float")
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
    assert not torch.equal(plain, wanted) or scheme == "bfloat16"
