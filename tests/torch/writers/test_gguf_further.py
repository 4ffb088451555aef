"""Layers that predict further tokens in GGUF files: read back by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.core.schemes import SCHEMES
from quark.errors import NotSupportedError
from quark.torch import ModelQuantizer, export_gguf, import_model_from_gguf
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from tests.models.gguf_rows import build
from tests.models.sources import with_further_tokens
from tests.models.torch_zoo import LANGUAGE_MODEL

FURTHER = {"glm4_moe": "model.layers.2.", "exaone_moe": "mtp.layers.0."}
"""Family -> what published folders call the layer."""
JOINS = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}


def folder_with_further(kind: str, folder: Path) -> Path:
    """A model of two layers and one further one, a copy of its last layer with what joins it."""
    build(kind, torch.bfloat16).save_pretrained(folder)
    layer = FURTHER[kind]
    with_further_tokens(folder, layer, "num_nextn_predict_layers")
    if layer.startswith("mtp."):
        tensors = load_file(folder / "model.safetensors")
        for ours, theirs in JOINS.items():
            tensors[f"{theirs}.weight"] = tensors.pop(f"{layer}{ours}.weight")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def written(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a file and its metadata."""
    reader = gguf.GGUFReader(export_gguf(model, folder, "model", LANGUAGE_MODEL))
    return {x.name: x for x in reader.tensors}, {name: field.contents() for name, field in reader.fields.items()}


def quantized(source: Path, **layers: Any) -> Any:
    spec = config_of_layer(SCHEMES["int4_wo_32"])
    config = QConfig(
        global_quant_config=spec, layer_quant_config={**layers}, exclude=["*lm_head", "*.gate", "*router*"]
    )
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(load_float_model(OpenedFolder(source))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FURTHER)
def test_a_further_layer_is_a_block_behind_the_last(kind: str, tmp_path: Path) -> None:
    source = folder_with_further(kind, tmp_path / "source")
    tensors, said = written(quantized(source), tmp_path / "out")
    arch = said["general.architecture"]
    layers = load_float_model(OpenedFolder(source)).config.num_hidden_layers
    assert (said[f"{arch}.block_count"], said[f"{arch}.nextn_predict_layers"]) == (layers + 1, 1)
    stored, layer = load_file(source / "model.safetensors"), FURTHER[kind]
    experts = (name for name in sorted(stored) if name.startswith(f"{layer}mlp.experts.") and "down_proj" in name)
    expected = {
        "attn_q": stored[f"{layer}self_attn.q_proj.weight"],
        "ffn_down_exps": torch.stack([stored[name] for name in experts]),
    }
    for ours, theirs in JOINS.items():
        expected[f"nextn.{ours}"] = stored[f"{theirs if layer.startswith('mtp') else layer + ours}.weight"]
    for name, value in expected.items():
        held = tensors[f"blk.{layers}.{name}.weight"]
        found = torch.from_numpy(gguf.quants.dequantize(held.data, held.tensor_type).copy()).reshape(value.shape)
        assert torch.equal(found, value.float()), name
    last = {name for name in tensors if name.startswith(f"blk.{layers - 1}.")}
    assert {name.replace(f"blk.{layers - 1}.", f"blk.{layers}.") for name in last} <= tensors.keys()
    # Reading the model passes over the block.
    import_model_from_gguf(load_float_model(OpenedFolder(source)), tmp_path / "out" / "model.gguf")


@pytest.mark.slow
def test_a_further_layer_is_quantized_on_request(tmp_path: Path) -> None:
    """As the layer that it is a copy of."""
    source = folder_with_further("glm4_moe", tmp_path / "source")
    spec = config_of_layer(SCHEMES["int4_wo_32"])
    tensors, _ = written(quantized(source, **{"model.layers.2.*": spec}), tmp_path / "out")
    of_last = {name: held for name, held in tensors.items() if name.startswith("blk.1.")}
    assert sum(held.tensor_type.name == "Q4_0" for held in of_last.values()) > 6
    for name, held in of_last.items():
        other = tensors[name.replace("blk.1.", "blk.2.")]
        assert other.tensor_type == held.tensor_type and (other.data == held.data).all(), name
    assert tensors["blk.2.nextn.eh_proj.weight"].tensor_type.name == "Q4_0"


@pytest.mark.slow
def test_an_architecture_without_names_for_it_leaves_it_out(tmp_path: Path) -> None:
    build("deepseek_v3", torch.bfloat16).save_pretrained(tmp_path / "source")
    layers = load_float_model(OpenedFolder(tmp_path / "source")).config.num_hidden_layers
    with_further_tokens(tmp_path / "source", f"model.layers.{layers}.", "num_nextn_predict_layers")
    tensors, said = written(quantized(tmp_path / "source"), tmp_path / "out")
    assert said["deepseek2.block_count"] == layers and "deepseek2.nextn_predict_layers" not in said
    assert not [name for name in tensors if name.startswith(f"blk.{layers}.")]
    with pytest.raises(NotSupportedError, match="'deepseek2' have no names for such layers"):
        rule = {f"model.layers.{layers}.*": config_of_layer(SCHEMES["int4_wo_32"])}
        written(quantized(tmp_path / "source", **rule), tmp_path / "other")
