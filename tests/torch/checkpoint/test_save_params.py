"""Two files that belong together, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_files_of_former_versions_are_read(tmp_path: Path) -> None:
    json_path, tensors = saved(tmp_path, 0)
    description = json.loads(json_path.read_text())
    del description["sha256"]
    json_path.write_text(json.dumps(description))
    load_params(mlp(), json_path, tensors)
