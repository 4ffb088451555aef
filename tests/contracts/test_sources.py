"""Every kind of quantized source, of every family: its library reads the same values, and all doors write the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.model.names import source_names
from tests.models.doors import HYBRID, float_folder, same_through_every_door
from tests.models.families import MOE
from tests.models.sources import KINDS, mxfp4_experts, quantized_folder
from tests.models.versions import needs_transformers

FP4 = needs_transformers("5.10.1", "reads FP4 of DeepSeek in a dtype that is asked for")
EVERYDAY = ("fp4", "deepseek_v3")
SOURCES = [
    pytest.param(
        kind,
        model_type,
        marks=[*([FP4] if kind == "fp4" else []), *([] if (kind, model_type) == EVERYDAY else [pytest.mark.slow])],
    )
    for kind in KINDS
    for model_type in dict.fromkeys(("llama", *MOE, *HYBRID))
]


@pytest.mark.parametrize(("kind", "model_type"), SOURCES)
def test_quantized_sources(kind: str, model_type: str, tmp_path: Path) -> None:
    source, values = quantized_folder(kind, model_type, tmp_path / "source")
    model = load_float_model(OpenedFolder(source), dequantize=True)
    own = model.state_dict()
    found = {name: own[target] for target, name in source_names(model, values).items() if target in own}
    assert len(found) > 3
    for name, tensor in found.items():
        # Half a unit of bfloat16, twice: the library of compressed-tensors rounds FP4 to it by itself.
        torch.testing.assert_close(tensor.float(), values[name].float(), rtol=2**-7, atol=0)
    same_through_every_door(source, tmp_path)


@pytest.mark.slow
def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    source = float_folder("gpt_oss", tmp_path / "source")
    values = mxfp4_experts(source)
    own = load_float_model(OpenedFolder(source), dequantize=True).state_dict()
    for name, value in values.items():
        assert torch.equal(own[name], value), name
    same_through_every_door(source, tmp_path)
