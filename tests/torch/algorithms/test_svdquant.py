"""SVDQuant: the branch, what it gains, where it is stored, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quark.core.schemes import SCHEMES
from quark.core.spec import TensorSpec
from quark.errors import ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_safetensors
from quark.torch.algorithms import algorithms_of
from quark.torch.algorithms.rounding import svdquant
from quark.torch.checkpoint.dequantize import dequantize
from quark.torch.checkpoint.importer import import_model_from_safetensors
from quark.torch.checkpoint.save_params import load_params, save_params
from quark.torch.config.algo_configs import AWQConfig, GPTQConfig, SVDQuantConfig
from quark.torch.config.config import QConfig
from quark.torch.flows.predicted_size import plan_layers, quantized_bytes
from quark.torch.kernels.accelerate import accelerate
from quark.torch.layers.low_rank import branch_of, branches
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama, token_batches
from tests.pretended_gpu import PretendedGpu, on_host

DATA = token_batches(4)
SMALL = SVDQuantConfig(svd_rank=8, min_layer_size=128)
"""k and v of the tiny model have 64 outputs and so no branch."""


def config(scheme: str, *algorithms: Any) -> QConfig:
    return replace(LLMTemplate.get("llama").get_config(scheme), algo_config=list(algorithms) or None)


def quantized(scheme: str, *algorithms: Any, model: Any = None) -> Any:
    return ModelQuantizer(config(scheme, *algorithms)).quantize_model(model or tiny_llama(), DATA)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(DATA[0]).logits
    return out


def error(model: Any) -> float:
    return float((logits(model) - logits(tiny_llama())).square().mean())


def layer_error(model: Any) -> float:
    """Square error of the outputs of the first layer that has a branch, on the float model's inputs."""
    reference = tiny_llama().model
    with torch.no_grad():
        x = reference.layers[0].input_layernorm(reference.embed_tokens(DATA[0]))
        expected = reference.layers[0].self_attn.q_proj(x)
        return float((model.model.layers[0].self_attn.q_proj(x) - expected).square().mean())


def test_branches_are_compared_on_some_rows_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svdquant, "_COMPARED", 8)
    random = torch.Generator().manual_seed(0)
    l1, l2 = torch.randn(2, 64, generator=random), 9 * torch.randn(32, 2, generator=random)
    weight, tokens = l2 @ l1 + torch.randn(32, 64, generator=random), torch.randn(16, 64, generator=random)
    layer: Any = SimpleNamespace(weight=weight)
    problem = svdquant._Problem("layer", layer, weight, cast(TensorSpec, SCHEMES["int4_wo_32"].weight))
    nowhere_compared = l2.clone()
    nowhere_compared[1::4] = 0
    tried = [(l1, torch.zeros_like(l2)), (l1, nowhere_compared), (l1, l2), (l1, 0.5 * l2)]
    chosen = problem.best_of(tried, svdquant._Inputs(tokens, None, torch.eye(64)))
    assert torch.equal(chosen[0], l1)
    assert torch.equal(chosen[1], nowhere_compared)  # of the 32 rows, each fourth is looked at


def test_without_search_and_refinement_the_branch_is_that_of_the_paper() -> None:
    """alpha = 0 makes s = 1 / max|W|, whatever is read; singular values by numpy."""
    fixed = replace(SMALL, search_alpha=False, smooth_alpha=0.0, refine_passes=0)
    model, weight = quantized("int4_wo_32", fixed), tiny_llama().model.layers[0].mlp.up_proj.weight.detach().numpy()
    layer = model.model.layers[0].mlp.up_proj
    scale = 1 / abs(weight).max(0)
    left, values, right = np.linalg.svd(weight * scale, full_matrices=False)
    best = (left[:, :8] * values[:8]) @ right[:8]
    branch = branch_of(layer)
    assert branch is not None
    assert branch.l1.weight.shape == (8, 128) and branch.l2.weight.shape == (256, 8)
    missed = np.linalg.norm(weight * scale - branch.product().numpy() * scale)
    assert missed <= 1.01 * np.linalg.norm(weight * scale - best)


def test_branch_and_rest_are_the_weight() -> None:
    model = quantized("int4_wo_32", SMALL)
    assert {name.split(".", 3)[3] for name, _ in branches(model)} == {
        "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    }  # fmt: skip
    with quantizers_off(quantized_layers(model).values()):
        torch.testing.assert_close(logits(model), logits(tiny_llama()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_refinement_and_gptq_make_it_better_and_live_inputs_count() -> None:
    refined = error(quantized("int4_wo_32", SMALL))
    once, again = (layer_error(quantized("int4_wo_32", replace(SMALL, refine_passes=n))) for n in (0, 4))
    assert again < once < layer_error(quantized("int4_wo_32"))
    behind = error(quantized("int4_wo_32", SMALL, GPTQConfig()))
    assert behind < refined
    assert error(quantized("mxfp4", SMALL)) < error(quantized("mxfp4"))


@pytest.mark.slow
def test_use_gptq_solves_what_is_left_on_the_grid_of_the_scheme() -> None:
    solving = replace(SMALL, use_gptq=True, gptq_actorder=True)
    assert error(quantized("int4_wo_32", solving)) < error(quantized("int4_wo_32", SMALL))
    for field, value in (("gptq_n_bits", 3), ("gptq_symmetric", False), ("gptq_group_size", 64)):
        with pytest.raises(ConfigError, match=f"{field}={value} .*gptq_n_bits=4, gptq_symmetric=True|{field}={value},"):
            quantized("int4_wo_32", replace(solving, **{field: value}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reloaded_models_compute_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized("int4_wo_32", SMALL, model=tiny_llama(dtype=dtype))
    before, named = logits(model), [name for name, _ in branches(model)]
    export_safetensors(model, tmp_path / "quark")
    save_params(model, "model", export_dir=tmp_path)
    written = json.loads((tmp_path / "quark" / "config.json").read_text())
    assert written["quantization_config"]["algo_config"][0]["correction_layers"] == named
    tensors = load_file(tmp_path / "quark" / "model.safetensors")
    assert tensors[f"{named[0]}.correction.l1.weight"].dtype == dtype
    assert sum(".correction." in name for name in tensors) == 2 * len(named)

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quark", dtype=dtype)
    assert torch.equal(logits(reloaded), before)
    export_safetensors(reloaded, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "quark" / "model.safetensors"
    ).read_bytes()
    ours = import_model_from_safetensors(tiny_llama(dtype=dtype), tmp_path / "quark")
    assert torch.equal(logits(ours), before)
    loaded = load_params(tiny_llama(dtype=dtype), tmp_path / "model.json", tmp_path / "model.safetensors")
    assert torch.equal(logits(loaded), before)


@pytest.mark.slow
def test_kernels_and_float_layers_keep_the_branch() -> None:
    model = ModelQuantizer.freeze(quantized("int8_wo", SMALL))
    expected = logits(model)
    torch.testing.assert_close(logits(accelerate(model)), expected, rtol=1e-4, atol=1e-4)
    plain = dequantize(quantized("int4_wo_32", SMALL))
    assert not list(branches(plain)) and not quantized_layers(plain)
    torch.testing.assert_close(logits(plain), logits(quantized("int4_wo_32", SMALL)), rtol=1e-4, atol=1e-5)


def test_a_device_is_waited_for_once_for_layers_that_read_one_input() -> None:
    """By the library that finds singular values: for all layers and alphas at first, then in each pass."""
    few = replace(SMALL, svd_rank=4, min_layer_size=64, alpha_candidates=[0.25, 0.75], refine_passes=2)
    model = tiny_llama(num_hidden_layers=1)
    quantizer = ModelQuantizer(config("uint4_wo_32", few))
    with PretendedGpu() as gpu:
        quantizer.quantize_model(model.to("cuda"), DATA)
        waits = {line: n for line, n in gpu.meter.waited_at.items() if not line.startswith("torch/model/batches.py")}
        on_device = {name: on_host(x) for name, x in model.state_dict().items()}
    inside = [n for line, n in waits.items() if line.endswith("_linalg_svd")]
    groups, passes = 4, 1 + few.refine_passes
    assert inside == [groups * passes] and sum(waits.values()) - inside[0] <= 6
    on_cpu = quantized("uint4_wo_32", few, model=tiny_llama(num_hidden_layers=1)).state_dict()
    assert all(torch.equal(on_device[name], x) for name, x in on_cpu.items())


def test_formats_without_a_place_for_it_say_so(tmp_path: Path) -> None:
    model = quantized("uint4_wo_32", SMALL)
    message = r"no place for low-rank branches \(model.layers.0.self_attn.q_proj"
    for form in ("awq", "compressed-tensors"):
        with pytest.raises(NotSupportedError, match=message):
            export_safetensors(model, tmp_path / form, custom_mode=form)
    with pytest.raises(NotSupportedError, match=message):
        export_gguf(model, tmp_path, "model", LANGUAGE_MODEL)
    assert not list(tmp_path.iterdir())


def test_the_predicted_size_counts_branches(tmp_path: Path) -> None:
    """Bytes of the plan are those of the file, whose branches have the dtype of the model."""
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        export_safetensors(quantized("int4_wo_32", SMALL, model=tiny_llama(dtype=dtype)), folder, "quark")
        held = load_file(folder / "model.safetensors")
        meta = tiny_llama(dtype=dtype).to("meta")
        asked = config("int4_wo_32", SMALL)
        made = plan_layers(meta, asked)
        assert quantized_bytes(meta, made, asked) == sum(tensor.nbytes for tensor in held.values())
        assert any("correction" in name for name in held)


def test_a_failure_gives_the_float_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk is gone")

    model = tiny_llama()
    monkeypatch.setattr("quark.torch.quantizer.calibrate_activations", fail)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        quantized("int4_wo_32", SMALL, model=model)
    assert not list(branches(model)) and not quantized_layers(model)
    torch.testing.assert_close(logits(model), logits(tiny_llama()), rtol=1e-4, atol=1e-5)


def test_a_block_that_it_makes_worse_has_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    from quark.torch.algorithms.rounding import svdquant

    real = svdquant._Split.of
    monkeypatch.setattr(svdquant._Split, "of", lambda weight, *rest: real(10 * weight, *rest))
    ruined = quantized("int4_wo_32", replace(SMALL, keep_better=True))
    assert not list(branches(ruined))
    assert torch.equal(logits(ruined), logits(quantized("int4_wo_32")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"svd_rank": 0}, "svd_rank: 0 is below 1"),
        ({"smooth_alpha": 1.5}, "alpha=1.5 is not between 0 and 1"),
        ({"alpha_candidates": []}, "alpha_candidates is empty"),
        ({"refine_passes": -1}, "refine_passes: -1 is below 0"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SVDQuantConfig(**options)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_layer_size=256. Possible: a smaller"):
        quantized("int4_wo_32", SVDQuantConfig())
    with pytest.raises(ConfigError, match="correction_layers: 'lm_head' is none of the layers it can take"):
        quantized("int4_wo_32", replace(SMALL, correction_layers=["lm_head"]))
    with pytest.raises(ConfigError, match="AWQConfig goes before SVDQuantConfig"):
        algorithms_of([SVDQuantConfig(), AWQConfig()])
    with pytest.raises(ConfigError, match="solved before SVDQuant"):
        quantized("int4_wo_32", GPTQConfig(), SMALL)


def test_the_documented_exclude_of_the_branch_is_accepted_where_there_are_branches() -> None:
    with_pattern = replace(config("int4_wo_64", SMALL), exclude=["lm_head", "*correction*"])
    model = ModelQuantizer(with_pattern).quantize_model(tiny_llama(), DATA)
    assert error(model) == error(quantized("int4_wo_64", SMALL))
    with pytest.raises(ConfigError, match="correction"):
        ModelQuantizer(replace(with_pattern, algo_config=None)).quantize_as_planned(tiny_llama(), DATA)
