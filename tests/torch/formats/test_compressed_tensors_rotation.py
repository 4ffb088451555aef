"""Rotations of inputs in compressed-tensors folders, with the library of that name applying them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import FormatError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import RotationConfig
from tests.models.checkpoints import change_config, logits, stored
from tests.models.torch_zoo import tiny_llama, token_batches

FORM = "compressed-tensors"
R4 = {"r1": True, "r2": True, "r4": True}
BLOCKS = {"rotation_size": 32, "online_r1_rotation": True, "r4": True}


def rotated(scheme: str, model: Any = None, **options: Any) -> Any:
    template = LLMTemplate.get("llama").get_config(scheme)
    template.algo_config = [RotationConfig(**options)]
    quantizer = ModelQuantizer(template)
    return quantizer.freeze(quantizer.quantize_model(model or tiny_llama(), token_batches()))


def transforms(folder: Path) -> Any:
    return stored(folder)[1]["transform_config"]


def applied_by_the_library(folder: Path) -> Any:
    """The folder as transformers loads it, its `transform_config` applied by the library: what vLLM does by kernels."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    decoded = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=decoded)
    config = TransformConfig.model_validate(transforms(folder))
    apply_transform_config(model, config)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [R4, BLOCKS], ids=["whole", "blocks"])
def test_the_library_computes_the_same_logits(options: dict[str, Any], tmp_path: Path) -> None:
    model = rotated("int4_wo_32", **options)
    folder = export_safetensors(model, tmp_path, FORM)
    theirs = applied_by_the_library(folder)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-4)
    names = {name for name in theirs.state_dict() if "R4" in name}
    applied = transforms(folder)["config_groups"]["R4"]["apply"][0]
    there = {name for name, _ in theirs.named_modules()}  # other names are those of the class without a head
    assert names == {f"{name}.R4_input.weight" for name in applied["targets"] if name in there}


@pytest.mark.parametrize("scheme", ["mxfp4", "uint4_wo_32"])
@pytest.mark.parametrize("options", [R4, BLOCKS], ids=["whole", "blocks"])
def test_it_is_read_back_and_written_again(scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = rotated(scheme, **options)
    folder = export_safetensors(model, tmp_path / "first", FORM)
    loaded = import_model_from_safetensors(None, folder)
    torch.testing.assert_close(logits(loaded), logits(model))
    again = export_safetensors(loaded, tmp_path / "again", FORM)
    assert transforms(again) == transforms(folder)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_reloaded_model_is_written_where_its_rotation_has_a_place(tmp_path: Path) -> None:
    model = rotated("uint4_wo_32", **R4)
    loaded = import_model_from_safetensors(None, export_safetensors(model, tmp_path / "quark"))
    folder = export_safetensors(loaded, tmp_path / "converted", FORM)
    torch.testing.assert_close(logits(import_model_from_safetensors(None, folder)), logits(model))
    with pytest.raises(NotSupportedError, match=r"awq format has no place for the rotation of inputs \(model\.layers"):
        export_safetensors(loaded, tmp_path / "awq", "awq")


def test_matrices_that_the_library_has_not_are_refused(tmp_path: Path) -> None:
    odd = rotated("int4_wo_32", tiny_llama(intermediate_size=96), r4=True)
    with pytest.raises(NotSupportedError, match=r"down_proj: .*power of two, without signs.*rotation_size"):
        export_safetensors(odd, tmp_path / "odd", FORM)
    signs = rotated("int4_wo_32", online_r1_rotation=True, random_r1=True)
    with pytest.raises(NotSupportedError, match="without signs"):
        export_safetensors(signs, tmp_path / "signs", FORM)


@pytest.mark.parametrize(
    ("change", "message"), [(None, "R4_input|input_rotation"), (torch.ones, "rows are not orthogonal")]
)
def test_a_matrix_that_is_missing_or_none_is_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = export_safetensors(rotated("int4_wo_32", **BLOCKS), tmp_path, FORM)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.down_proj.R4_input.weight"
    matrix = tensors.pop(name)
    save_file(tensors if change is None else {**tensors, name: change(matrix.shape, dtype=matrix.dtype)},
              folder / "model.safetensors")  # fmt: skip
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(None, folder)


OUTPUTS = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "output"}]}
RANDOM = {"type": "random-hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}
FOLDED = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_output"}]}


@pytest.mark.parametrize(("name", "group"), [("u", OUTPUTS), ("R4", OUTPUTS), ("R4", RANDOM), ("v", RANDOM)])
def test_transforms_that_are_not_applied_are_refused_when_read(name: str, group: Any, tmp_path: Path) -> None:
    folder = export_safetensors(rotated("int4_wo_32", r1=True), tmp_path, FORM)
    change_config(folder, transform_config={"config_groups": {name: group}})
    with pytest.raises(FormatError, match=rf"transform_config: {name} .*cannot be imported"):
        import_model_from_safetensors(None, folder)


def test_what_was_folded_into_weights_needs_nothing(tmp_path: Path) -> None:
    model = rotated("int4_wo_32", r1=True)
    folder = export_safetensors(model, tmp_path, FORM)
    change_config(folder, transform_config={"config_groups": {"R1": FOLDED}})
    torch.testing.assert_close(logits(import_model_from_safetensors(None, folder)), logits(model))
