"""Rules by name in quark folders, as vLLM and SGLang look them up: by published names, experts of a block at once."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.names.patterns import first_match
from quark.core.spec import LayerSpec
from quark.torch import LLMTemplate, ModelQuantizer, QConfig, export_safetensors, import_model_from_safetensors
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats import Folder
from quark.torch.formats.quark.format import with_server_rules
from tests.models.families import family

IDS = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(0))
ATTENTION = "model.layers.{}.self_attn.{}_proj"
BLOCKS = {"mixtral": "model.layers.{}.block_sparse_moe.experts", "qwen3_moe": "model.layers.{}.mlp.experts"}


def in_vllm(name: str, config: Any) -> Any:
    """vLLM 0.33.0, quark.py: get_layer_quant_config_from_name and _find_matched_config."""
    for pattern, found in config["layer_quant_config"].items():
        if fnmatch(name, pattern) if "*" in pattern else name in pattern:
            return found
    return config["global_quant_config"]


def in_sglang(name: str, config: Any) -> Any:
    """SGLang 0.5.23, quark.py: _find_matched_config."""
    for pattern, found in config["layer_quant_config"].items():
        if fnmatch(name, pattern):
            return found
    return config["global_quant_config"]


def bits(found: Any) -> str:
    weight = found["weight"]
    return str((weight[0] if isinstance(weight, list) else weight)["dtype"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rules", "experts", "attention"),
    [
        ("mixtral", {"*mlp.experts*": "int8_wo"}, ("int8", "int8"), ("int4", "int4")),
        ("mixtral", {"model.layers.1.mlp.experts.*": "int8_wo"}, ("int4", "int8"), ("int4", "int4")),
        ("qwen3_moe", {"model.layers.0.mlp.experts.*": "int8_wo"}, ("int8", "int4"), ("int4", "int4")),
        ("mixtral", {r"re:.*layers\.[01]\.self_attn.*": "int8_wo"}, ("int4", "int4"), ("int8", "int8")),
        ("qwen3_moe", {"model.layers.[1].self_attn.?_proj": "int8_wo"}, ("int4", "int4"), ("int4", "int8")),
    ],
)
def test_servers_find_the_rule_of_each_layer(
    name: str, rules: dict[str, str], experts: tuple[str, str], attention: tuple[str, str], tmp_path: Path
) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get(name).get_config("int4_wo_32", layer_config=rules))
    model = quantizer.freeze(quantizer.quantize_model(family(name), [IDS]))
    folder = export_safetensors(model, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for find in (in_vllm, in_sglang):
        for layer in (0, 1):
            assert bits(find(BLOCKS[name].format(layer), config)) == experts[layer]
            assert [bits(find(ATTENTION.format(layer, p), config)) for p in "qkvo"] == [attention[layer]] * 4
    with torch.no_grad():
        right = model(IDS).logits
        assert torch.equal(type(model).from_pretrained(folder).eval()(IDS).logits, right)
        assert torch.equal(import_model_from_safetensors(family(name, seed=1), folder)(IDS).logits, right)


def test_rules_that_servers_find_are_written_as_they_are_and_others_in_front() -> None:
    names = {f"m.{i}.mlp.experts.{j}.{leaf}": LayerSpec() for i in (0, 1) for j in (0, 1) for leaf in ("gate", "down")}
    known = {name: (name, name.replace("mlp", "moe")) for name in names}
    folder = Folder(names, [], QConfig(config_of_layer(LayerSpec())), {}, names=known)
    first, second = {"a": 1}, {"a": 1}
    assert with_server_rules({"*experts*": first}, folder) == {"*experts*": first}
    assert [*with_server_rules({"*mlp*": first}, folder)] == ["m.*.moe.experts", "*mlp*"]
    assert [*with_server_rules({"*1.mlp*": first}, folder)] == ["m.1.moe.experts", "*1.mlp*"]
    apart = with_server_rules({"*gate": first, "*mlp*": second}, folder)
    assert all(first_match(name, apart) is (first if "gate" in name else second) for name in names)
    assert all(first_match(form, apart) is first_match(name, apart) for name, (_, form) in known.items())


def test_rules_by_class_are_written_by_name_as_servers_know_no_class_of_torch(tmp_path: Path) -> None:
    def scheme(name: str) -> Any:
        return LLMTemplate.get("llama").get_config(name).global_quant_config

    config = LLMTemplate.get("llama").get_config("int4_wo_32", layer_config={"*v_proj": "int8_wo"})
    config = replace(config, layer_type_quant_config={torch.nn.Linear: scheme("int2_wo_64")})
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(family("llama"), [IDS]))
    folder = export_safetensors(model, tmp_path / "out")
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    for find in (in_vllm, in_sglang):
        found = [bits(find(ATTENTION.format(layer, p), stored)) for layer in (0, 1) for p in "qv"]
        assert found == ["int2", "int8"] * 2
    again = import_model_from_safetensors(family("llama", seed=1), folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_rules_of_layers_that_feed_the_cache_say_so_as_vllm_demands(tmp_path: Path) -> None:
    template = LLMTemplate.get("llama")
    config = template.get_config("int4_wo_32", kv_cache_scheme="fp8", layer_config={"re:.*0.self_attn.*": "int8_wo"})
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(family("llama"), [IDS]))
    folder = export_safetensors(model, tmp_path / "out")
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = stored["export"]["kv_cache_group"]
    caches = [r for n, r in stored["layer_quant_config"].items() if any(fnmatchcase(n, pattern) for pattern in group)]
    assert len(caches) > 2 and all(rule["output_tensors"] == caches[0]["output_tensors"] for rule in caches)
    assert caches[0]["output_tensors"] is not None
    assert [bits(in_vllm(ATTENTION.format(layer, "k"), stored)) for layer in (0, 1)] == ["int8", "int4"]
    again = import_model_from_safetensors(family("llama", seed=1), folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
