"""Rotation in `quantize_model`, and checkpoints with online rotations: written, read by transformers and by quark."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quark.errors import CalibrationError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.importer import import_model_from_safetensors
from quark.torch.checkpoint.save_params import load_params, save_params
from quark.torch.config.algo_configs import RotationConfig, SmoothQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.layers.online_rotation import RotatedAttention, input_rotations, record_rotations
from tests.models.architectures import build, token_ids
from tests.models.torch_zoo import tiny_llama, token_batches

ODD: dict[str, Any] = {"hidden_size": 184, "head_dim": 46, "intermediate_size": 92}
"""Sizes for which there is no Hadamard matrix here."""


def config(scheme: str, exclude: list[str] | None = None, **options: Any) -> QConfig:
    template = LLMTemplate.get("llama")
    made: QConfig = template.get_config(scheme, exclude_layers=exclude)
    return QConfig(
        made.global_quant_config,
        exclude=made.exclude if exclude is None else exclude,
        algo_config=[RotationConfig(**options)],
        log_severity_level=3,
    )


def quantized(scheme: str, model: Any, exclude: list[str] | None = None, **options: Any) -> Any:
    return ModelQuantizer(config(scheme, exclude, **options)).quantize_model(model, token_batches())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(token_batches()[0]).logits
    return out


CASES = [
    ("mxfp4", {}, {"rotation_size": 32, "r4": True, "online_r1_rotation": True}, torch.bfloat16),
    ("int8", {"tie_word_embeddings": True}, {"r2": True, "r3": True, "r4": True}, torch.float32),
    ("int8", ODD, {"r1": False, "r2": True, "r4": True, "random_r2": True}, torch.bfloat16),
    ("int8", {}, {"online_r1_rotation": True, "random_r1": True}, torch.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "sizes", "options", "dtype"), CASES, ids=["blocks", "all", "odd", "random"])
def test_reloaded_models_compute_the_same(
    tmp_path: Path, scheme: str, sizes: dict[str, Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized(scheme, tiny_llama(dtype=dtype, **sizes), **options)
    before, rotations = logits(model), dict(input_rotations(model))
    export_safetensors(model, tmp_path / "quark")
    save_params(model, "model", export_dir=tmp_path)

    written = json.loads((tmp_path / "quark" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    online = written["quantization_config"]["algo_config"][0]["online_config"]
    assert online["online_rotation_layers"] == list(rotations)
    tensors = load_file(tmp_path / "quark" / "model.safetensors")
    assert {name for name in tensors if "rotation" in name} == {f"{name}.input_rotation" for name in rotations}
    for name, rotation in rotations.items():
        stored = tensors[f"{name}.input_rotation"]
        assert stored.dtype == (torch.int8 if rotation.is_hadamard else torch.float64)
        scaled = stored.double() / stored.double()[0].norm()
        torch.testing.assert_close(scaled, torch.from_numpy(rotation.matrix()))

    def fresh() -> Any:
        return tiny_llama(seed=9, dtype=dtype, **(sizes | {"tie_word_embeddings": False}))

    readers = {
        "transformers": lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "quark"),
        "quark": lambda: import_model_from_safetensors(fresh(), tmp_path / "quark"),
        "params": lambda: load_params(fresh(), tmp_path / "model.json", tmp_path / "model.safetensors"),
    }
    for reader, read in readers.items():
        loaded = read()
        rotated = [m for m in loaded.modules() if isinstance(m.__dict__.get("forward"), RotatedAttention)]
        assert len(rotated) == (2 if options.get("r3") else 0), reader
        assert torch.equal(logits(loaded), before), reader


@pytest.mark.slow
@pytest.mark.parametrize("flip", [[[1], [-1], [1], [-1]], [[1, -1, 1, 1]]], ids=["rows", "columns"])
def test_a_stored_matrix_is_what_rotates(flip: list[list[int]], tmp_path: Path) -> None:
    """The file decides, not what this version would make: another matrix in it gives other outputs."""
    from safetensors.torch import save_file

    model = quantized("int8", tiny_llama(), r1=False, r4=True, rotation_size=4)
    export_safetensors(model, tmp_path / "quark")
    file = tmp_path / "quark" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("input_rotation")]:
        tensors[name] = tensors[name] * torch.tensor(flip, dtype=torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    assert float((logits(import_model_from_safetensors(tiny_llama(), file.parent)) - logits(model)).abs().max()) > 1e-2


def test_layers_that_stay_in_float_are_not_rotated_online() -> None:
    model = quantized("mxfp4", tiny_llama(), exclude=["lm_head", "*layers.0.mlp.down_proj"], r1=False, r4=True)
    assert [name for name, _ in input_rotations(model)] == ["model.layers.1.mlp.down_proj"]


@pytest.mark.slow
def test_a_failure_after_the_rotation_leaves_a_float_model_that_computes_the_same() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    with torch.no_grad():
        model.model.norm.weight *= torch.linspace(0.5, 2, 128)
    before = logits(model)
    with pytest.raises(CalibrationError, match="calibration data"):
        ModelQuantizer(config("int8", [], r2=True, r4=True)).quantize_model(model, None)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert not list(input_rotations(model))
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_activations_are_observed_after_the_rotation() -> None:
    """The static range of a rotated input is that of x Q: an outlier in one channel of x is spread."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7] *= 100
        model.model.layers[0].mlp.down_proj.weight[:, 7] /= 100
    plain = ModelQuantizer(LLMTemplate.get("llama").get_config("int8"))
    scales = [
        float(made.model.layers[0].mlp.down_proj.input_quantizer.scale)
        for made in (
            plain.quantize_model(copy.deepcopy(model), token_batches()),
            quantized("int8", copy.deepcopy(model), r1=False, r4=True),
        )
    ]
    assert scales[1] < scales[0] / 5


@pytest.mark.slow
def test_an_untied_head_is_loaded_into_a_tied_model(tmp_path: Path) -> None:
    def gained() -> Any:
        model = tiny_llama(tie_word_embeddings=True)
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2, torch.Generator().manual_seed(3))
        return model

    model = quantized("int8_wo", gained(), r2=True)
    export_safetensors(model, tmp_path / "out")
    loaded: Any = import_model_from_safetensors(gained(), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.tie_word_embeddings is False


def test_a_folder_says_which_rotations_a_name_came_to(tmp_path: Path) -> None:
    """The stream of Gemma 2 cannot be rotated; the others are, R3 and R4 online, and a reader finds these again."""
    named = LLMTemplate.get("auto").get_config("int4_wo_per_channel", "quarot")
    quantizer = ModelQuantizer(named)
    model = quantizer.freeze(quantizer.quantize_model(build("gemma2")))
    export_safetensors(model, tmp_path)
    (written,) = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["algo_config"]
    assert [written[name] for name in ("r1", "r2", "r3", "r4")] == [False, True, True, True]
    loaded = import_model_from_safetensors(build("gemma2"), tmp_path)
    assert any(isinstance(m.__dict__.get("forward"), RotatedAttention) for m in loaded.modules())
    with torch.no_grad():
        assert torch.equal(loaded(token_ids())[0], model(token_ids())[0])


def test_the_rotation_stands_first_with_its_list_of_layers(tmp_path: Path) -> None:
    """vLLM takes the first algorithm for the rotation, and reads the list of one that it finds there."""
    for options in ({"r4": True, "rotation_size": 32}, {"r2": True}):
        rotation = RotationConfig(r1=False, **options)
        config = replace(LLMTemplate.get("llama").get_config("mxfp4"), algo_config=[SmoothQuantConfig(), rotation])
        model = ModelQuantizer(config).quantize_model(tiny_llama(), token_batches(2))
        stored = record_rotations(config.to_dict(), model)["algo_config"]
        assert [each["name"] for each in stored] == ["rotation", "smooth"]
        assert stored[0]["online_config"]["online_rotation_layers"] == [name for name, _ in input_rotations(model)]
