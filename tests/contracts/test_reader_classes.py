"""Every mixture and every composite of transformers in every format: each class that loads the float folder finds the
quantized one to the last tensor, with the values of the frozen model, or the folder is refused before the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.architectures.__main__ import build, result
from transformers.models.auto import modeling_auto as auto

from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.passes.unfuse_experts import fused_blocks, other_experts

HEADS = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CLASSES = {name: head[name] for head in reversed(HEADS) for name in head}
AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
SCHEMES = {"quark": "int4_wo_32"}
EVERYDAY = "qwen3_5_moe"
"""A mixture within a composite, whose text model has a class and names of its own."""


def loaded(kind: Any, folder: Path) -> tuple[Any, dict[str, set[str]]] | None:
    """The model and what its loader says; None where the class does not load such a folder."""
    try:
        model, said = kind.from_pretrained(folder, output_loading_info=True)
    except (ValueError, RuntimeError, AttributeError):
        return None
    return model.eval(), {key: set(map(str, names)) for key, names in said.items()}


def whole(said: dict[str, set[str]]) -> bool:
    return not any(names for key, names in said.items() if key != "unexpected_keys")


def outputs(model: Any, batch: Any, base: bool) -> torch.Tensor:
    """Logits, or what the model without its head returns."""
    return result(model.model if base else model, batch)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == EVERYDAY else pytest.mark.slow) for n in CLASSES])
def test_each_class_that_loads_the_float_folder_loads_the_quantized_one(name: str, tmp_path: Path) -> None:
    import transformers

    try:
        model, data = build(name, CLASSES[name])
    except Exception as error:  # noqa: BLE001 - sizes that a family does not take
        pytest.skip(f"no tiny model: {error}")
    if model.config.get_text_config() is model.config and not (fused_blocks(model) or other_experts(model)):
        pytest.skip("neither a mixture nor a composite")
    model.save_pretrained(tmp_path / "float")
    kinds: dict[Any, set[str]] = {}
    for kind in (type(model), *(getattr(transformers, each) for each in AUTO)):
        found = loaded(kind, tmp_path / "float")
        if found is not None and whole(found[1]) and type(found[0]) not in {type(m) for m in kinds}:
            kinds[kind] = found[1]["unexpected_keys"]
    for form, scheme in SCHEMES.items():
        folder = tmp_path / form
        quantizer = ModelQuantizer(LLMTemplate.get(model.config.model_type).get_config(scheme))
        try:
            frozen = quantizer.freeze(quantizer.quantize_model(build(name, CLASSES[name])[0], data))
            export_safetensors(frozen, folder, form)
        except QuarkError:
            assert not folder.exists()
            continue
        for kind, left in kinds.items():
            _loads(kind, left, folder, frozen, data[0])


def _loads(kind: Any, left: set[str], folder: Path, frozen: Any, batch: Any) -> None:
    found = loaded(kind, folder)
    assert found is not None, (folder.name, kind)
    model, said = found
    assert whole(said), (folder.name, kind, said)
    parts = {name.rpartition(".")[0] for name in said["unexpected_keys"]}
    assert parts <= {name.rpartition(".")[0] for name in left}, (folder.name, kind, said)
    assert quantized_layers(model)
    base = not hasattr(model, "lm_head") and hasattr(frozen, "lm_head")
    expected, got = outputs(frozen, batch, base), outputs(model, batch, False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
