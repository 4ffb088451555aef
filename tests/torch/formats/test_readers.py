"""What transformers' own loader finds of a folder, beside what `check_readers` says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import NotSupportedError, QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.config.config import QConfig
from quark.torch.flows.check_plan import check_plan
from quark.torch.flows.predicted_size import planned
from quark.torch.model.meta_model import empty_twin
from tests.models.families import MOE, family

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


def planned_refusal(model: Any, scheme: str, form: str, exclude: list[str] | None = None) -> str:
    """What is said of the plan alone; empty where it can be written."""
    meta, config = empty_twin(model).eval(), config_of(model, scheme, exclude)
    made, _ = planned(meta, config, form)
    try:
        check_plan(meta, config, made, form)
    except NotSupportedError as error:
        return str(error)
    return ""


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


def test_a_class_that_reads_a_weight_as_it_is_built_is_refused_where_there_is_none() -> None:
    assert "reads the weight" in planned_refusal(t5(), "int4_wo_32", "compressed-tensors")
    assert planned_refusal(t5(), "int8", "compressed-tensors") == ""


def test_what_algorithms_add_is_refused_on_the_plan() -> None:
    from quark.torch.config.algo_configs import SVDQuantConfig

    model = family("llama")
    meta = empty_twin(model).eval()
    config = LLMTemplate.get("llama").get_config("int4_wo_32", [SVDQuantConfig()])
    made, _ = planned(meta, config, "compressed-tensors")
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
