"""Experts in compressed-tensors folders, as transformers decodes them and as vLLM asks for their schemes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.names.patterns import matches_any
from quark.errors import NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from tests.models.families import family

IDS = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(0))
FORM = "compressed-tensors"
LEAVES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def frozen(name: str, scheme: str, rules: dict[str, str] | None = None, exclude: tuple[str, ...] = ()) -> Any:
    template = LLMTemplate.get(name)
    excluded = [*template.exclude_layers_name, *exclude]
    quantizer = ModelQuantizer(template.get_config(scheme, layer_config=rules or {}, exclude_layers=excluded))
    return quantizer.freeze(quantizer.quantize_model(family(name), [IDS]))


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(
    ("scheme", "rules"),
    [
        ("int8_wo", {"*experts*": "int4_wo_32"}),
        ("int4_wo_32", {"*experts*": "int8_wo", "*q_proj": "int2_wo_64"}),
        ("int4_wo_32", {"*self_attn*": "int8_wo"}),
    ],
)
def test_experts_of_a_scheme_of_their_own_are_decoded_by_it(
    name: str, scheme: str, rules: dict[str, str], tmp_path: Path
) -> None:
    model = frozen(name, scheme, rules)
    folder = export_safetensors(model, tmp_path / "out", FORM)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)
    again = import_model_from_safetensors(family(name, seed=1), folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{"*down_proj": "int8_wo"}, {"*experts.1.*": "int8_wo"}])
def test_experts_of_a_block_that_differ_are_refused(rules: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"0\.mlp\.experts: readers .* one scheme for all experts"):
        export_safetensors(frozen("qwen3_moe", "int4_wo_32", rules), tmp_path / "out", FORM)
    with pytest.raises(NotSupportedError, match="one scheme for all experts"):
        excluded = ("*experts.0.*",) if "*experts.1.*" in rules else ("*down_proj",)
        export_safetensors(frozen("qwen3_moe", "int4_wo_32", exclude=excluded), tmp_path / "out", FORM)


@pytest.mark.slow
@pytest.mark.parametrize("exclude", ["*layers.0.mlp.experts*", "*experts*"])
def test_experts_in_float_are_ignored_by_the_names_that_vllm_asks_for(exclude: str, tmp_path: Path) -> None:
    """Those of expert 0: vLLM 0.33.0, compressed_tensors_moe.py, get_moe_method."""
    model = frozen("mixtral", "int4_wo_32", exclude=(exclude,))
    folder = export_safetensors(model, tmp_path / "out", FORM)
    ignored = config_of(folder)["ignore"]
    for layer in (0, 1):
        names = [f"model.layers.{layer}.block_sparse_moe.experts.0.{leaf}" for leaf in LEAVES["mixtral"]]
        found = [name in ignored or matches_any(name, [i for i in ignored if i.startswith("re:")]) for name in names]
        assert found == [layer == 0 or exclude == "*experts*"] * 3
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "warned"), [("uint4_wo_32", True), ("mxfp8_e4m3", True), ("int4_wo_32", False)])
def test_what_transformers_does_not_decode_is_said(
    scheme: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = frozen("qwen3_moe", scheme)
    with caplog.at_level(logging.WARNING, "quark"):
        folder = export_safetensors(model, tmp_path / "out", FORM)
    assert ("does not decode experts" in caplog.text) == warned
    caplog.clear()
    with caplog.at_level(logging.WARNING, "quark"):
        export_safetensors(model, tmp_path / "vllm", FORM, reader="vllm")
    assert caplog.text == ""
    if warned:
        with pytest.raises(RuntimeError, match="conversion"):
            type(model).from_pretrained(folder)


@pytest.mark.slow
def test_layers_have_the_names_that_the_model_without_a_head_has(tmp_path: Path) -> None:
    from transformers import AutoModel

    model = frozen("llama", "int4_wo_32", {"*q_proj": "int8_wo"}, ("*k_proj",))
    loaded, info = AutoModel.from_pretrained(
        export_safetensors(model, tmp_path / "out", FORM), output_loading_info=True
    )
    assert not any(names for key, names in info.items() if key != "unexpected_keys")
    assert info["unexpected_keys"] == {"lm_head.weight"}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
