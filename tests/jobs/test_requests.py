"""Requests: wrong words are refused before any work, in the words of the caller; calls do what commands do."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quark
from quark.errors import ConfigError, NotSupportedError
from quark.goals import EFFORTS, GOALS
from quark.jobs import FolderJob, FolderRequest, choose, configure_folder, request_of, resolve, run_file
from quark.jobs.configure_folder import configure
from quark.jobs.folders.bit_budget import asked_budget
from quark.jobs.folders.calibration import Calibration
from quark.jobs.resolve import FileJob
from quark.jobs.run_file import QUICK, default_config, recovery_of
from tests.commands.program import quark as program
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT

DIGITS = LANGUAGE_MODEL.with_name("digits_cnn") / "model.onnx"

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"nonsense": 1}, "There is no option 'nonsense'"),
    "too small": ({"samples": 0}, "samples=0 is none: it takes int of 1 or more"),
    "no number": ({"length": "x"}, "length='x' is none: it takes int of 1 or more"),
    "no word": ({"device": 3}, "device=3 is none: it takes str"),
    "of the command": ({"calib": "x"}, "calib: so the command calls it. Possible: data= for calib"),
    "effort": ({"effort": "bst"}, "effort='bst' is unknown. Did you mean 'best'"),
    "of the other kind": ({"config": "A8W8"}, "config does not apply to .*: it is for an ONNX file"),
    "report": ({"report": "r.html"}, "report: of the command alone"),
    "recipe": ({"write_recipe": "r.yaml"}, "write_recipe: of the command alone"),
    "timeout": ({"process_timeout": 9.0}, "process_timeout: of the command alone"),
    "log": ({"log_file": "l.jsonl"}, "log_file: of the command alone"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_refused_before_any_work(name: str, tmp_path: Path) -> None:
    said, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        quark.quantize(LANGUAGE_MODEL, "int8_wo", output=tmp_path / "out", **said)
    assert not list(tmp_path.iterdir())


OTHERS: dict[str, tuple[Any, str]] = {
    "evaluate, unknown": (lambda to: quark.evaluate("f", "q", data="x", window=3), "no option 'window'.*'windows'"),
    "evaluate, no data": (lambda to: quark.evaluate("f", "q"), "Missing option data or text, which f needs"),
    "evaluate, other kind": (lambda to: quark.evaluate("f", "q", data="x", threads=2), "threads does not apply to f"),
    "evaluate, twice": (lambda to: quark.evaluate("f", "q", data="x", text="y"), "data and text are the same option"),
    "evaluate, report": (lambda to: quark.evaluate("f", "q", report="r"), "report: of the command alone"),
    "compare, no schemes": (lambda to: quark.compare("f", []), "schemes names none"),
    "compare, scheme": (lambda to: quark.compare("f", "int9_wo", calib="x"), "Unknown scheme 'int9_wo'"),
    "compare, no data": (lambda to: quark.compare("f", "int8_wo"), "Missing option calib or data, which f needs"),
    "compare, too few": (lambda to: quark.compare("f", "int8_wo", length=1), "length=1 is none: it takes int of 2"),
    "convert, format": (lambda to: quark.convert(LANGUAGE_MODEL, to, "gptqq"), "format='gptqq' is unknown"),
    "convert, onnx": (lambda to: quark.convert(LANGUAGE_MODEL, to, "onnx"), "format=onnx|format onnx"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_wrong_words_of_other_calls_are_refused_before_any_work(name: str, tmp_path: Path) -> None:
    call, message = OTHERS[name]
    with pytest.raises(ConfigError, match=message):
        call(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_configuration_of_no_known_program_is_made_where_none_is_named(tmp_path: Path) -> None:
    image = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
    made = quark.quantize(DIGITS, "VINT8", data={"image": image}, output=tmp_path / "call.onnx")
    np.savez(tmp_path / "image.npz", image=image)
    line = ("--config", "VINT8", "--calib", tmp_path / "image.npz", "-o", tmp_path / "line.onnx")
    assert program("quantize", DIGITS, *line).code == 0
    assert made.read_bytes() == (tmp_path / "line.onnx").read_bytes()
    with pytest.raises(NotSupportedError, match="VINT8 was not tried in OpenVINO. Possible: config VINT8 without"):
        quark.quantize(DIGITS, "VINT8", goal="openvino", output=tmp_path / "out.onnx")


@pytest.mark.slow
def test_calls_give_what_commands_print(tmp_path: Path) -> None:
    made, text = tmp_path / "int8", TEXT / "heldout.txt"
    quark.quantize(LANGUAGE_MODEL, "int8_wo", output=made)
    done = program("evaluate", LANGUAGE_MODEL, made, "--data", text, "--windows", 2, "--length", 32)
    found = quark.evaluate(LANGUAGE_MODEL, made, data=text, windows=2, length=32)
    assert f"{found.outputs['logits'].sqnr:.2f}" in done.out
    compared = quark.compare(LANGUAGE_MODEL, ["int8_wo"], data=text, windows=2, length=32)
    (row,) = compared.schemes
    assert (row.sqnr, row.perplexity) == (found.outputs["logits"].sqnr, found.comparison.perplexity[1])  # type: ignore[union-attr]
    other = quark.convert(made, tmp_path / "ct", "compressed-tensors")
    again = quark.evaluate(LANGUAGE_MODEL, other, data=text, windows=2, length=32)
    assert again.outputs["logits"].sqnr == row.sqnr


def test_one_text_is_one_of_several_and_places_are_paths() -> None:
    request = request_of(LANGUAGE_MODEL, {"exclude": "*.down_proj", "layer": ["*.a=int8"], "imatrix": "x.gguf"})
    assert request.exclude == ("*.down_proj",) and vars(request)["layer"] == ("*.a=int8",)
    assert vars(request)["imatrix"] == Path("x.gguf") and request.said == {"exclude", "layer", "imatrix"}


@pytest.mark.parametrize(
    "goal, form, candidates, fused_by",
    [
        (None, "quark", None, ()),  # vLLM refuses 3 bits there, SGLang all
        (None, "quark", ["uint4_wo_128", "int8_dynamic"], ("vLLM",)),  # which might load it
        (None, "compressed-tensors", ["int4_wo_128", "int8_dynamic"], ("vLLM", "SGLang")),
        ("vllm", "quark", ["uint4_wo_128", "int8_dynamic"], ("vLLM",)),
        ("sglang", "compressed-tensors", ["int4_wo_128", "int8_dynamic"], ("SGLang",)),
        ("transformers", "quark", ["uint4_wo_128", "int8_dynamic"], ()),
    ],
)
def test_layers_of_which_a_program_makes_one_get_one_scheme_of_a_budget(
    goal: str | None, form: str, candidates: list[str] | None, fused_by: tuple[str, ...]
) -> None:
    choice: Any = None if goal is None else SimpleNamespace(goal=GOALS[goal], mixed=tuple(candidates or ()))
    request = FolderRequest(model=LANGUAGE_MODEL, bits=5.0, candidates=tuple(candidates or ()) or None)
    budget = asked_budget(request, form, choice)
    assert budget is not None and budget.fused_by == fused_by


@pytest.mark.parametrize("size, scheme", [("4MB", "uint4_wo_128"), ("5.5MB", "uint4_wo_128"), ("70%", "int8_wo")])
def test_a_size_gets_the_largest_scheme_that_fits_where_a_program_takes_no_mix(size: str, scheme: str) -> None:
    job = resolve(request_of(LANGUAGE_MODEL, {"goal": "onnxruntime", "size": size, "output": "out"}))
    assert job.choice is not None and job.choice.scheme == scheme


@pytest.mark.parametrize("limit", [1000, 999])
def test_a_scheme_that_just_fits_into_a_size_fits(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scheme gives 1000 bytes."""
    monkeypatch.setattr("quark.jobs.folders.models.skeleton_of", lambda folder: None)
    monkeypatch.setattr("quark.torch.flows.predicted_size.plan_of", lambda *_: SimpleNamespace(after=1000))
    for name, value in {"config_of": None, "size_within": limit}.items():
        monkeypatch.setattr(choose, name, lambda *_, value=value: value)
    request, said = FolderRequest(model=LANGUAGE_MODEL), "its size"
    with nullcontext() if limit == 1000 else pytest.raises(ConfigError, match="its size is less than any scheme"):
        assert choose._widest(request, lambda: SimpleNamespace(), GOALS["vllm"], said)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("said", "form"),
    [({}, "quark"), ({"export_format": "awq"}, "awq"), ({"output": "a.gguf"}, "gguf"),
     ({"output": "a.gguf", "export_format": "awq"}, "awq")],
)  # fmt: skip
def test_a_form_is_the_one_that_is_asked_for_and_else_that_of_the_name(said: dict[str, Any], form: str) -> None:
    request = FolderRequest(model=LANGUAGE_MODEL, scheme="uint4_wo_128", **{"output": "out", **said})
    assert resolve(request).form == form


def test_a_size_says_what_is_possible_where_none_is_chosen_for() -> None:
    with pytest.raises(ConfigError, match="--size is not chosen for with --for comfyui. Possible: --bits or --scheme"):
        resolve(request_of(LANGUAGE_MODEL, {"goal": "comfyui", "size": "50%", "output": "out.gguf"}))


def test_data_bring_qronos_to_a_mix_of_block_types() -> None:
    said = {"scheme": "q4_k_m", "export_format": "gguf", "output": "out.gguf"}
    jobs = (resolve(request_of(LANGUAGE_MODEL, said | more)) for more in ({}, {"calib": TEXT / "calibration.txt"}))
    assert [configure(job).algorithms for job in jobs if isinstance(job, FolderJob)] == [[], ["qronos"]]


@pytest.mark.parametrize(
    ("learns", "reads", "measured", "why"),
    [(False, False, None, None), (True, False, None, "the algorithm 'some'"),
     (False, True, None, "the algorithm 'some'"),
     (False, False, True, "--bits 4"), (False, False, False, None)],
)  # fmt: skip
def test_data_are_needed_by_what_learns_reads_or_measures(
    learns: bool, reads: bool, measured: bool | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = SimpleNamespace(learns=learns, reads_inputs=reads, config=SimpleNamespace(name="some"))
    monkeypatch.setattr(configure_folder, "algorithms_in", lambda config: [algorithm])
    budget = None if measured is None else SimpleNamespace(is_measured=measured, named=lambda: "--bits 4")
    request = SimpleNamespace(layer=None, kv_cache=None, attention=None)
    job: Any = SimpleNamespace(request=request, budget=budget, scheme=None, config=None)
    assert configure_folder._reason_for_data(job) == why


@pytest.mark.parametrize(
    ("learns", "sums", "packing", "joined"),
    [(False, True, False, True), (True, True, False, False), (False, False, False, False), (False, True, None, False)],
)
def test_samples_are_joined_where_nothing_reads_them_one_by_one(
    learns: bool, sums: bool, packing: bool | None, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.torch.model.calibration_data.joined_texts", lambda *_: ["both"])
    algorithms: Any = [SimpleNamespace(learns=False, sums=True), SimpleNamespace(learns=learns, sums=sums)]
    found = Calibration(packing=packing).joined(None, ["one", "two"], algorithms)
    assert found == (["both"] if joined else ["one", "two"])


@pytest.mark.parametrize(("effort", "searched"), [(None, QUICK), ("fast", None), ("balanced", QUICK)])
def test_a_file_is_searched_unless_that_is_to_be_fast(
    effort: str | None, searched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    quantizer = SimpleNamespace(settings=SimpleNamespace(specs=SimpleNamespace(weights_apart=False)))
    monkeypatch.setattr(run_file, "_quantizer", lambda *_: quantizer)
    monkeypatch.setattr(run_file, "_calibration_data", lambda job: "samples")
    monkeypatch.setattr(run_file._Writing, "best_of", lambda self, *_: seen.append(self.recovery) or ("", "", None))
    monkeypatch.setattr(run_file, "file_bytes", lambda path: 0)
    request: Any = request_of(DIGITS, {"output": str(tmp_path / "out.onnx")})
    choice: Any = None if effort is None else SimpleNamespace(effort=effort)
    run_file.run_file(FileJob(request, choice, None, None))
    assert seen == [searched]


def test_a_file_without_samples_has_inputs_that_are_quantized_as_they_come() -> None:
    assert [default_config(has_data, run_file.CPU_TARGET) for has_data in (True, False)] == [
        run_file.CPU,
        run_file.CPU_DYNAMIC,
    ]
    assert run_file.CPU != run_file.CPU_DYNAMIC


def test_an_effort_says_how_long_an_onnx_file_is_searched() -> None:
    searches = {effort: recovery_of(effort, has_data=True) for effort in EFFORTS}
    assert searches["fast"] is None and searches["balanced"] is QUICK
    assert searches["best"] is not None and searches["best"].budget == "10m" and not searches["best"].quick
    assert not any(recovery_of(effort, has_data=False) for effort in EFFORTS)
