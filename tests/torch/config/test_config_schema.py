"""What a config.json says of quantization has types, which are checked before anything is read by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.errors import FormatError
from quark.torch.model.model_folder import read_config

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}, "format": None}
DEEP: Any = {}
for _ in range(60):
    DEEP = {"deep": DEEP}
ODD: dict[str, dict[str, Any]] = {
    "a size that is none": {"weight_block_size": "axb"},
    "a size of three": {"weight_block_size": [1, 2, 3]},
    "a size of 0": {"weight_block_size": [0, 128]},
    "a size in letters": {"config_groups": {"g": {"weights": {"block_structure": "128"}}}},
    "groups in a list": {"config_groups": [1]},
    "a group that is a number": {"config_groups": {"g": 1}},
    "weights that are a text": {"config_groups": {"g": {**GROUP, "weights": "int4"}}},
    "bits that are true": {"config_groups": {"g": {"weights": {"num_bits": True}}}},
    "targets that are a text": {"config_groups": {"g": {**GROUP, "targets": "Linear"}}},
    "a broken pattern": {"config_groups": {"g": {**GROUP, "targets": ["re:("]}}},
    "a broken pattern to ignore": {"ignore": ["re:[z-a]"]},
    "a number to ignore": {"ignore": [5]},
    "transforms in a list": {"transform_config": [1]},
    "transforms of numbers": {"transform_config": {"config_groups": {"R4": {"apply": [5]}}}},
    "a head of 2 ** 40": {"transform_config": {"config_groups": {"R4": {"head_dim": 2**40}}}},
    "objects in objects": DEEP,
}  # fmt: skip


def folder(path: Path, quantization: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return path


@pytest.mark.parametrize("name", ODD)
def test_entries_of_other_types_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json: quantization_config"):
        read_config(folder(tmp_path, {"quant_method": "compressed-tensors", **ODD[name]}))


def test_what_programs_write_is_taken(tmp_path: Path) -> None:
    for given in (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {**GROUP, "targets": [r"re:.*\.mlp\..*"]}}},
        {"quant_method": "awq", "bits": 4, "group_size": -1, "modules_to_not_convert": None},
    ):
        assert read_config(folder(tmp_path, given))["quantization_config"] == given
