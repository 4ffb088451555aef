"""What transformers' own loader finds of a folder, beside what `check_readers` says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.architectures.__main__ import build
from quark.errors import ConfigError, FormatError, NotSupportedError, QuarkError
from quark.goals.expert_names import expert_names
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_safetensors, import_model_from_safetensors
from quark.torch.config.config import QConfig
from quark.torch.flows.check_plan import check_plan
from quark.torch.flows.predicted_size import plan_layers
from quark.torch.formats import readers
from quark.torch.model.meta_model import meta_copy
from tests.models.families import MOE, family
from tests.models.torch_zoo import LANGUAGE_MODEL
from tests.models.versions import needs_transformers

SCHEMES = {"compressed-tensors": "int4_wo_32", "awq": "uint4_wo_32", "gptq": "int4_wo_32", "fp8": "fp8"}
BUILDING = {"num_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_decoder_layers": 2}


def config_of(model: Any, scheme: str, exclude: list[str] | None = None) -> QConfig:
    template = LLMTemplate.get(model.config.model_type)
    return template.get_config(scheme, exclude_layers=[*template.exclude_layers_name, *(exclude or [])])


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **BUILDING)).eval()


def ids() -> list[torch.Tensor]:
    return [torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))]


def planned_refusal(
    model: Any, scheme: str, form: str, exclude: list[str] | None = None, reader: str = "transformers"
) -> str:
    """What is said of the plan alone; empty where it can be written."""
    meta, config = meta_copy(model).eval(), config_of(model, scheme, exclude)
    made = plan_layers(meta, config)
    try:
        check_plan(meta, config, made, form, reader)
    except NotSupportedError as error:
        return str(error)
    return ""


def granite() -> Any:
    return family("granitemoe", num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("form", SCHEMES)
def test_experts_that_no_loader_finds_are_refused_on_the_plan_and_on_writing(form: str, tmp_path: Path) -> None:
    model = family("gpt_oss")
    said = planned_refusal(model, SCHEMES[form], form)
    assert "would make up model.layers.0.mlp.experts.down_proj" in said
    quantized = ModelQuantizer(config_of(model, SCHEMES[form])).quantize_model(model, ids())
    with pytest.raises(NotSupportedError, match=re.escape(said)):
        export_safetensors(quantized, tmp_path / "out", form)
    assert not list(tmp_path.iterdir())
    advice = re.findall(r"--exclude '([^']+)'", said)
    assert advice and planned_refusal(model, SCHEMES[form], form, advice) == ""
    assert planned_refusal(model, SCHEMES[form], "quark") == ""


@pytest.mark.slow
def test_experts_that_vllm_alone_finds_are_written_for_it(tmp_path: Path) -> None:
    """vLLM 0.33.0: `ckpt_names` of FusedMoEFactory, and `.router.layer.weight` of its granitemoe.py."""
    model = granite()
    assert "--for vllm" in planned_refusal(model, "int4_wo_32", "compressed-tensors")
    assert planned_refusal(model, "int4_wo_32", "compressed-tensors", reader="vllm") == ""
    assert "make up" in planned_refusal(family("gpt_oss"), "int4_wo_32", "compressed-tensors", reader="vllm")
    quantizer = ModelQuantizer(config_of(model, "int4_wo_32"))
    frozen = quantizer.freeze(quantizer.quantize_model(model, ids()))
    folder = export_safetensors(frozen, tmp_path / "out", "compressed-tensors", reader="vllm")
    names = {name.rpartition(".")[0] for name in load_file(folder / "model.safetensors")}
    experts = [name for name in names if ".experts." in name]
    row = expert_names("granitemoe")
    assert len(experts) == 2 * 4 * 3 and row is not None and all(map(row.finds, experts))
    assert {f"model.layers.{i}.block_sparse_moe.router.layer" for i in range(2)} <= names
    again = import_model_from_safetensors(granite(), folder)
    with torch.no_grad():
        assert torch.equal(again(ids()[0]).logits, frozen(ids()[0]).logits)
    with pytest.raises(ConfigError, match="reader='tgi' is unknown"):
        export_safetensors(frozen, tmp_path / "other", "compressed-tensors", reader="tgi")


@needs_transformers("5.13", "holds the experts of Granite as those of other models")
def test_a_class_beside_that_of_the_model_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_check_names", lambda *_: None)
    said = planned_refusal(granite(), "int4_wo_32", "compressed-tensors")
    assert "GraniteMoeModel would make up layers.0.block_sparse_moe.experts.down_proj" in said
    assert planned_refusal(granite(), "int4_wo_32", "quark") == ""
    assert planned_refusal(family("llama"), "int4_wo_32", "compressed-tensors") == ""


@pytest.mark.slow
def test_a_float_tensor_that_is_called_like_a_scale_is_refused_by_a_class_of_other_names(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    from benchmarks.architectures.__main__ import build

    model, data = build("gemma3n_text", "Gemma3nForCausalLM")
    quantizer = ModelQuantizer(config_of(model, "int4_wo_32"))
    folder = export_safetensors(quantizer.freeze(quantizer.quantize_model(model, data)), tmp_path / "out")
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    with pytest.raises(FormatError, match=r"Gemma3nTextModel calls .*correct_output_scale.*Gemma3nForCausalLM"):
        AutoModel.from_pretrained(folder)


def test_a_class_that_reads_a_weight_as_it_is_built_is_refused_where_there_is_none() -> None:
    assert "reads the weight" in planned_refusal(t5(), "int4_wo_32", "compressed-tensors")
    assert planned_refusal(t5(), "int8", "compressed-tensors") == ""


@needs_transformers("5.13", "builds Luke without reading that weight, which is refused itself")
def test_codes_of_a_weight_that_the_class_shares_are_refused() -> None:
    from transformers import LukeConfig, LukeForMaskedLM

    sizes = {"vocab_size": 64, "entity_vocab_size": 32, "hidden_size": 32, "entity_emb_size": 32}
    model = LukeForMaskedLM(LukeConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64))
    for form, scheme in SCHEMES.items():
        assert "give entity_predictions.decoder.weight the values of" in planned_refusal(model, scheme, form)
        assert planned_refusal(model, scheme, form, ["entity_predictions.decoder"]) == ""
    assert planned_refusal(model, "int4_wo_32", "quark") == ""


@needs_transformers("5.21", "converts codes together with their scales")
def test_a_class_for_which_one_tensor_of_files_is_parted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qianfan OCR, whose tower has one matrix in files: transformers raises ValueError on loading its folders."""
    from transformers.core_model_loading import Chunk, WeightConverter

    tower = WeightConverter(["tower.qkv.weight"], ["tower.q.weight", "tower.k.weight"], operations=[Chunk(dim=0)])
    monkeypatch.setattr(readers, "conversions", lambda _: [tower])
    model = family("llama")
    assert "it parts tower.qkv.weight of files into" in planned_refusal(model, "int4_wo_32", "compressed-tensors")
    for form, reader in (("compressed-tensors", "vllm"), ("quark", "transformers"), ("gptq", "transformers")):
        assert planned_refusal(model, "int4_wo_32", form, reader=reader) == ""


def test_what_algorithms_add_is_refused_on_the_plan() -> None:
    from quark.torch.config.algo_configs import SVDQuantConfig

    model = family("llama")
    meta = meta_copy(model).eval()
    config = LLMTemplate.get("llama").get_config("int4_wo_32", [SVDQuantConfig()])
    made = plan_layers(meta, config)
    with pytest.raises(NotSupportedError, match="low-rank"):
        check_plan(meta, config, made, "compressed-tensors")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*MOE, "granitemoe", "t5", "falcon", "gpt2", "llama"])
def test_a_folder_that_is_written_is_loaded_whole(model_type: str, tmp_path: Path) -> None:
    """A folder that is not refused is found to the last tensor, and computes what the frozen model does."""
    model = t5() if model_type == "t5" else family(model_type)
    said = planned_refusal(model, "int4_wo_32", "compressed-tensors")
    quantizer = ModelQuantizer(config_of(model, "int4_wo_32"))
    frozen = quantizer.freeze(quantizer.quantize_model(model))
    try:
        folder = export_safetensors(frozen, tmp_path / "out", "compressed-tensors")
    except QuarkError as error:
        assert str(error) == said
        return
    assert said == ""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids()[0]).logits, frozen(ids()[0]).logits)


@pytest.mark.slow
def test_a_quantized_head_is_found_where_the_renaming_is_of_its_weight_alone(tmp_path: Path) -> None:
    """`head.weight` of DeepSeek V4 is `lm_head.weight`; a `head.weight_scale` would be nothing to its loader."""
    model = build("deepseek_v4", "DeepseekV4ForCausalLM")[0]
    config = LLMTemplate.get("deepseek_v4").get_config("int4_wo_32", layer_config={"lm_head": "int8_wo"})
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_model(model))
    for form in ("quark", "compressed-tensors"):
        _, said = type(model).from_pretrained(export_safetensors(made, tmp_path / form, form), output_loading_info=True)
        assert not any(said.values()), form


def shapes_refused(model: Any, path: Path, form: str) -> None:
    """Of a head that the config does not know: before a file is made, for a folder and for GGUF."""
    with pytest.raises(
        NotSupportedError, match=r"lm_head\.weight has shape \(70, 64\), and LlamaForCausalLM.*\(64, 64"
    ):
        if form == "gguf":
            export_gguf(model, path, "model", LANGUAGE_MODEL)
        else:
            export_safetensors(model, path / "out", form)
    assert not [*path.iterdir()]


@pytest.mark.parametrize("form", ["quark", "compressed-tensors", "gguf"])
@pytest.mark.parametrize("quantizes_head", [False, True])
def test_a_layer_of_another_shape_than_the_config_says(tmp_path: Path, form: str, quantizes_head: bool) -> None:
    model = family("llama")
    model.lm_head = torch.nn.Linear(64, 70, bias=False)
    template = LLMTemplate.get("llama")
    quantizer = ModelQuantizer(template.get_config("int4_wo_32", exclude_layers=[] if quantizes_head else ["lm_head"]))
    shapes_refused(quantizer.freeze(quantizer.quantize_model(model, ids())), tmp_path, form)


def test_a_vocabulary_that_was_resized_is_written(tmp_path: Path) -> None:
    model = family("llama")
    model.resize_token_embeddings(70, mean_resizing=False)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo"))
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model, ids())), tmp_path / "out")
    assert len(type(model).from_pretrained(tmp_path / "out").lm_head.weight) == 70
