"""Tables whose class scales the rows that it looks up (Gemma): what is stored is a table as any other."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    QuantizeOnLoad,
    export_gguf,
    export_safetensors,
    gguf_config,
    import_model_from_gguf,
)
from quark.torch.layers import layer_class
from quark.torch.layers.embedding import QuantEmbedding, lookup_factor
from tests.models.families import family
from tests.models.model_folders import LANGUAGE_MODEL

IDS = torch.arange(2, 40)[None]


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


class Direct(nn.Embedding):
    """Reads its weight itself, past what would be quantized."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight) * 2


def quantized(model: Any, config: Any) -> Any:
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(copy.deepcopy(model)))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
        return found


def test_the_factor_of_a_table_is_found() -> None:
    assert lookup_factor(nn.Embedding(4, 3)) == 1.0
    assert lookup_factor(family("gemma3_text").get_input_embeddings()) == 8.0
    with torch.device("meta"):
        assert layer_class(family("gemma2").get_input_embeddings()) is not None
    for table in (Shifted(4, 3), Direct(4, 3)):
        assert lookup_factor(table) is None and layer_class(table) is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_a_gguf_file_holds_the_table_in_blocks(kind: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 2048, "tie_word_embeddings": True}
    layers = {"num_hidden_layers": 6} if kind == "gemma3_text" else {}
    model = family(kind, **sizes, **layers)
    after = quantized(model, gguf_config(model, "q8_0"))
    path = export_gguf(after, tmp_path, kind, LANGUAGE_MODEL)
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    table = stored["token_embd.weight"]
    assert table.tensor_type.name == "Q8_0"
    values = torch.from_numpy(gguf.quants.dequantize(table.data, table.tensor_type))
    assert torch.equal(values, after.get_input_embeddings().quantized_weight())
    back = import_model_from_gguf(copy.deepcopy(model), path)
    assert torch.equal(logits(back), logits(after))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert torch.equal(theirs.get_input_embeddings().weight, values)


def test_a_folder_holds_it_and_it_copies_and_pickles(tmp_path: Path) -> None:
    model = family("gemma3_text")
    config = LLMTemplate.get("auto").get_config("int8_wo", layer_config={"*embed_tokens": "int8_wo"})
    after = quantized(model, config)
    table = after.get_input_embeddings()
    assert isinstance(table, QuantEmbedding) and isinstance(table, type(model.get_input_embeddings()))
    weight = nn.Parameter(table.quantized_weight().clone())
    alone = copy.deepcopy(model.get_input_embeddings())
    alone.weight = weight
    assert torch.equal(table(IDS), alone(IDS)) and not torch.equal(weight, model.get_input_embeddings().weight)
    export_safetensors(after, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for each in (after, loaded):
        wanted = logits(each)
        assert torch.equal(wanted, logits(after))
        assert torch.equal(logits(pickle.loads(pickle.dumps(each))), wanted)
        assert torch.equal(logits(copy.deepcopy(each)), wanted)
    model.save_pretrained(tmp_path / "float")
    loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float",
        quantization_config=QuantizeOnLoad("int8_wo", layers={"*embed_tokens": "int8_wo"}),
        dtype=torch.float32,
    )
    assert torch.equal(logits(loading), logits(after))
