"""Two files that belong together, or are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quark.errors import FormatError
from quark.torch import LLMTemplate, ModelQuantizer, load_params, save_params
from tests.models.torch_zoo import mlp


def saved(folder: Path, seed: int) -> tuple[Path, Path]:
    config = LLMTemplate.get("auto").get_config("int8_wo", exclude_layers=[])
    json_path = save_params(
        ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(mlp(seed=seed))), "m", export_dir=folder
    )
    return json_path, folder / "m.safetensors"


def test_tensors_of_another_save_are_refused(tmp_path: Path) -> None:
    """As a kill between the two renames of a second save leaves them."""
    first, second = saved(tmp_path / "a", 0), saved(tmp_path / "b", 1)
    load_params(mlp(), first[0], first[1])
    with pytest.raises(FormatError, match=r"m\.safetensors is not what .*m\.json was saved with"):
        load_params(mlp(), first[0], second[1])


class ReadsItself(nn.Module):
    """Reads the weight of a layer that it never calls; which, is seen where there is data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x), self.second.weight)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_layer_that_data_kept_in_float_stays_so_when_loaded(compressed: bool, tmp_path: Path) -> None:
    x = torch.ones(1, 8)
    config = LLMTemplate.get("auto").get_config("int8_wo", exclude_layers=[])
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(ReadsItself(), [x]))
    path = save_params(model, "m", export_dir=tmp_path, compressed=compressed)
    assert torch.equal(load_params(ReadsItself(), path, tmp_path / "m.safetensors")(x), model(x))


@pytest.mark.parametrize("scheme", ["int8_wo", "int4_wo_32", "fp8"])
def test_an_encoder_of_torch_goes_through_its_quantizers(scheme: str, tmp_path: Path) -> None:
    """In inference torch.nn.TransformerEncoderLayer has one function read the weights of its layers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    start, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    config = LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])
    with torch.no_grad():
        quantized = ModelQuantizer(config).quantize_model(model, [x])
        wanted = quantized(x)
        frozen = ModelQuantizer.freeze(quantized)
        path = save_params(frozen, "m", export_dir=tmp_path, compressed=True)
        assert torch.equal(frozen(x), wanted) and not torch.equal(wanted, start(x))
        assert torch.equal(load_params(start, path, tmp_path / "m.safetensors")(x), wanted)


def test_values_that_are_one_in_memory_are_loaded_as_many(tmp_path: Path) -> None:
    def model(buffer: torch.Tensor) -> nn.Module:
        made = mlp()
        made.register_buffer("shift", buffer)
        return made

    config = LLMTemplate.get("auto").get_config("int8_wo", exclude_layers=[])
    path = save_params(ModelQuantizer(config).quantize_model(model(torch.arange(8.0))), "m", export_dir=tmp_path)
    loaded = load_params(model(torch.zeros(1).expand(8)), path, tmp_path / "m.safetensors")
    assert torch.equal(loaded.get_buffer("shift"), torch.arange(8.0))


def test_files_of_former_versions_are_read(tmp_path: Path) -> None:
    json_path, tensors = saved(tmp_path, 0)
    description = json.loads(json_path.read_text())
    del description["sha256"]
    json_path.write_text(json.dumps(description))
    load_params(mlp(), json_path, tensors)
