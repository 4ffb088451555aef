"""The commands on models whose layers are taken apart, with a quantized cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands.program import quark
from tests.models.families import family
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama

CALIBRATION = ("--calib", TEXT / "calibration.txt", "--samples", "2")
LAYERS = {"mixtral": "layers.1.mlp.experts.2.w1", "gpt2": "h.1.attn.c_attn"}
CACHE = {"mixtral": "model.layers.1.self_attn.k_proj", "gpt2": "transformer.h.1.attn.c_attn"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_plan_quantize_and_evaluate(name: str, tmp_path: Path) -> None:
    model, out = tmp_path / name, tmp_path / "out"
    family(name, vocab_size=2048).save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / file, model / file)
    assert LAYERS[name].rsplit(".", 1)[-1] in quark("plan", model, "--scheme", "uint4_wo_32").out
    options = ("--kv-cache", "fp8", "--attention", "fp8")
    assert quark("quantize", model, "--scheme", "uint4_wo_32", *options, *CALIBRATION, "-o", out).code == 0
    stored = load_file(out / "model.safetensors")
    assert float(stored[f"{CACHE[name]}.output_scale"]) > 0
    assert sum(key.endswith("prob_output_scale") for key in stored) == 2
    done = quark("evaluate", model, out, "--text", TEXT / "heldout.txt", "--windows", "2", "--length", "32")
    assert done.code == 0 and "perplexity" in done.out and "nan" not in done.out
    wrong = quark("quantize", model, "--scheme", "uint4_wo_32", "--kv-cache", "fp4", "-o", tmp_path / "other")
    assert wrong.code == 1 and "Possible: 'fp8', 'int8'" in wrong.err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "scheme"), [
    ("--for vllm", "uint4_wo_64"),
    ("--for transformers --bits 4", "uint4_wo_64"),
    ("--for onnxruntime --size 22%", "uint4_wo_64"),
    ("--for transformers --bits 4 --exclude *_proj", None),  # what is excluded need not fit
])  # fmt: skip
def test_a_goal_takes_groups_that_divide_the_model(words: str, scheme: str | None, tmp_path: Path) -> None:
    """Widths such as the 576 of SmolLM and the 4544 of Falcon are no multiple of 128."""
    width = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 384}
    tiny_llama(**width).save_pretrained(tmp_path / "llama")
    plan = quark("plan", tmp_path / "llama", *words.split())
    if scheme is None:
        assert plan.code == 1 and "Nothing to quantize" in plan.err
        return
    assert plan.code == 0 and f" {scheme} " in plan.out, plan.err
    done = quark("quantize", tmp_path / "llama", *words.split(), "-o", tmp_path / "out")
    assert done.code == 0 and f"{scheme}:" in done.out
    assert "To nearest: calibrating (--effort balanced) is not possible" in done.log  # there is no tokenizer
    assert ("--size" in words) != (f"{scheme} instead of uint4_wo_128" in done.log)
    named = quark("quantize", tmp_path / "llama", "--for", "vllm", "--scheme", "uint4_wo_128", "-o", tmp_path / "no")
    assert named.code == 1 and "does not divide" in named.err
