"""What the best effort adds to its solver for a model and a machine, and what it says that it leaves out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

import quark
from quark.core.schemes import SCHEMES
from quark.gguf import MIXES
from quark.goals import GoalChoice, GoalRequest, choose
from quark.goals.efforts import BEST, FEWEST_TEXTS, MOST_SECONDS, ROTATION, TEXTS, steps_for
from quark.jobs.folders import best_effort
from quark.jobs.folders.best_effort import completed_choice, completed_for
from quark.jobs.request import FolderRequest
from quark.torch.algorithms import algorithms_of
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.named_algorithms import algo_config_by_name
from quark.torch.flows import effort_costs
from quark.torch.flows.effort_costs import duration, measured_speed, step_costs
from tests.models.families import MOE, family
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama, token_batches

CHOICE = choose(GoalRequest(goal="transformers", scheme="int3_wo_128", effort=BEST, has_data=True))
SAID = {"effort": BEST, "goal": "transformers", "scheme": "int3_wo_128"}


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The speed of this machine, which a test sets."""
    known = {"is": 1e12}
    monkeypatch.setattr(effort_costs, "measured_speed", lambda *_: known["is"])
    return known


def completed(model: Any = None, **options: Any) -> GoalChoice:
    return completed_for(CHOICE, model or tiny_llama(), 4096, 16, "cpu", **options)


def distillation_runs(choice: GoalChoice) -> bool:
    return "distillation" in choice.algorithms


def test_a_causal_model_writes_texts_and_is_distilled() -> None:
    choice = completed()
    assert choice.texts == TEXTS and choice.algorithms == (*CHOICE.algorithms, "distillation") and not choice.left_out
    assert ("texts", str(TEXTS), choice.reasons["texts"]) in choice.rows()


def test_what_takes_longer_than_the_limit_is_less_and_then_nothing(speed: dict[str, float]) -> None:
    """The estimate of what is left is within the limit, and that of twice the texts is not."""
    model, found = tiny_llama(), set()
    algorithms = algorithms_of([algo_config_by_name(name) for name in ("qronos", "distillation")])
    just = step_costs(model, algorithms, 4096, 16 * TEXTS, 1.0).total / MOST_SECONDS
    for speed["is"] in (just * share for share in (9, 1.5, 1, 0.75, 0.1)):
        choice = completed(model)
        found.add(choice.texts)
        if choice.texts:
            assert distillation_runs(choice)
            assert step_costs(model, algorithms, 4096, 16 * choice.texts, speed["is"]).total < MOST_SECONDS
        else:
            assert not distillation_runs(choice)
        if choice.texts < TEXTS:
            [(what, why)] = choice.left_out.items()
            assert "texts" in what and f"{duration(MOST_SECONDS)} at most" in why
            assert ("left out", what, why) in choice.rows()
    assert TEXTS in found and 0 in found and any(FEWEST_TEXTS <= count < TEXTS for count in found)


def test_without_the_memory_there_is_no_distillation_and_the_reason_has_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    linear = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    monkeypatch.setattr(effort_costs, "free_memory", lambda _: 30 * linear)
    choice = completed(model)
    assert choice.texts == TEXTS and not distillation_runs(choice)
    assert "GB of memory" in choice.left_out["distillation"] and "are free" in choice.left_out["distillation"]


@pytest.mark.parametrize(("share", "texts"), [(1.0, FEWEST_TEXTS), (1.01, 0)])
def test_the_fewest_texts_are_written_in_just_the_time_that_there_is(
    share: float, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(self: Any, count: int, distilled: bool) -> Any:
        return SimpleNamespace(total=share * MOST_SECONDS * count / FEWEST_TEXTS, memory=0)

    monkeypatch.setattr(best_effort._Costs, "of", costs)
    assert completed().texts == texts


@pytest.mark.parametrize(("needed", "distilled"), [(900, True), (901, False)])
def test_a_tenth_of_the_memory_stays_free(needed: int, distilled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort._Costs, "of", lambda *_: SimpleNamespace(total=0, memory=needed))
    monkeypatch.setattr(effort_costs, "free_memory", lambda _: 1000)
    assert distillation_runs(completed()) is distilled


def test_several_processes_leave_no_model_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.torch.calibration.distributed.world", lambda: 2)
    choice = completed_choice(CHOICE, FolderRequest(model=LANGUAGE_MODEL), OpenedFolder(LANGUAGE_MODEL))
    assert "several processes" in "".join(choice.left_out.values()) and not choice.texts


def test_an_encoder_writes_no_text() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    choice = completed(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)))
    assert choice.texts == 0 and choice.algorithms == CHOICE.algorithms
    assert [*choice.left_out.values()] == ["BertForMaskedLM writes no text"]


def test_a_streamed_model_is_not_distilled(tmp_path: Path) -> None:
    request = FolderRequest(model=tmp_path, stream=True)
    folder = OpenedFolder(LANGUAGE_MODEL)
    choice = completed_choice(CHOICE, request, folder)
    assert choice.algorithms == CHOICE.algorithms and "--stream" in "".join(choice.left_out.values())
    assert distillation_runs(completed_choice(CHOICE, replace(request, stream=False), folder))


def test_a_rotation_goes_before_the_solver_where_the_program_runs_it_and_the_model_is_in_memory() -> None:
    folder = OpenedFolder(LANGUAGE_MODEL)

    def found(goal: str, scheme: str, **options: Any) -> GoalChoice:
        choice = choose(GoalRequest(goal=goal, scheme=scheme, effort=BEST, has_data=True))
        return completed_choice(choice, FolderRequest(model=LANGUAGE_MODEL, **options), folder)

    whole = found("transformers", "mxfp4", stream=False)
    assert whole.algorithms[:2] == ("equalize", ROTATION) and whole.algorithms[2].startswith("qronos")
    streamed = found("transformers", "mxfp4", stream=True)
    assert ROTATION not in streamed.algorithms and "--stream" in streamed.left_out["rotation"]
    for goal, scheme in (("vllm", "mxfp4"), ("sglang", "mxfp4"), ("transformers", "nvfp4")):
        assert not any(word.startswith("rotation") for word in found(goal, scheme, stream=False).algorithms)


def test_a_number_of_texts_that_is_asked_for_is_taken(speed: dict[str, float]) -> None:
    speed["is"] = 1.0
    assert completed(asked=3).texts == 3


@pytest.mark.parametrize("scheme", [*SCHEMES, *MIXES])
def test_what_the_best_adds_follows_a_solver(scheme: str) -> None:
    steps = steps_for(scheme, BEST)
    assert not steps.distills or steps.algorithms, scheme


def test_the_folder_says_what_ran(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its recipe makes the same on a machine that would choose otherwise."""
    tiny_llama().save_pretrained(tmp_path / "model")
    texts = tmp_path / "ids.npz"
    import numpy as np

    np.savez(texts, input_ids=torch.cat(token_batches(4)).numpy())
    with caplog.at_level(logging.INFO, "quark"):
        out = quark.quantize(
            tmp_path / "model", data=texts, output=tmp_path / "out", goal="transformers", scheme="int3_wo_128",
            effort=BEST, synthetic=4,
        )  # fmt: skip
    assert "4 texts that the model writes" in caplog.text and "Estimated time: about" in caplog.text
    recipe = yaml.safe_load((out / "quark_recipe.yaml").read_text())
    assert recipe["data"]["synthetic"] == 4 and [*recipe["algorithms"]][-1] == "distillation"
    config = (out / "config.json").read_text()
    assert '"distillation"' in config and '"qronos"' in config
    assert any("weight_scale" in name for name in load_file(out / "model.safetensors"))


@pytest.mark.slow
def test_a_module_in_memory_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort, "TEXTS", 4)
    monkeypatch.setattr(best_effort, "FEWEST_TEXTS", 4)
    made = quark.quantize(tiny_llama(), "int3_wo_128", data=token_batches(4), effort=BEST)
    names = [each.algorithm for each in made.quant_errors]
    assert any(name.startswith("qronos") for name in names) and "distillation" in names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "qwen3", "mistral", "phi3", "opt", *MOE])
def test_every_family_is_quantized_by_the_best(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen, and not asked for, stops no job."""
    monkeypatch.setattr(best_effort, "TEXTS", 4)
    monkeypatch.setattr(best_effort, "FEWEST_TEXTS", 4)
    model = tiny_llama() if kind == "llama" else family(kind)
    made = quark.quantize(model, "uint4_wo_32", data=token_batches(4), effort=BEST)
    with torch.no_grad():
        assert made(token_batches(1)[0]).logits.isfinite().all()
    assert any(each.algorithm == "distillation" for each in made.quant_errors)


def test_a_measured_speed_is_of_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = tiny_llama()
    for each in (model, family("gpt2")):
        assert 1e6 < measured_speed(each, torch.device("cpu")) < 1e14
    assert measured_speed(model, torch.device("cpu")) == measured_speed(model.to("meta"), torch.device("cpu"))


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "1 s"), (75, "75 s"), (720, "12 min"), (12600, "3.5 h")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
