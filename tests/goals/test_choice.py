"""What is chosen for a goal: from facts alone, and refused before any work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quark.core.schemes import SCHEMES
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.gguf import MIXES
from quark.goals import EFFORTS, GOALS, GoalChoice, GoalRequest, choose
from quark.goals import goal as goal_module
from quark.goals.efforts import steps_for
from quark.goals.facts import FACTS, ONNX_FILE, Answer
from quark.jobs.words import (
    FILE_FORMS,
    FOLDER_FORMS,
    each_algorithm,
    onnx_algorithms,
    scheme_names,
    torch_algorithms,
)
from quark.onnx.config.preset_rows import ROWS
from quark.onnx.operators.targets import TARGETS
from quark.torch.algorithms import ALGORITHMS
from quark.torch.bit_budget.measure import RULES
from quark.torch.config.algo_configs import GPTQConfig
from quark.torch.config.llm_template import CACHE_SCHEMES, cache_spec
from quark.torch.config.named_algorithms import ALGO_CONFIGS, algo_config_by_name
from quark.torch.formats import FORMATS
from quark.torch.writers.gguf.format import GgufFormat

REFUSED_BY_VLLM = [
    "int8_wo", "int4_wo_per_channel", "int3_wo_128", "int2_wo_64", "int4_wa_64", "int4_fp8", "amdfp4", "mx4", "mx6",
    "mx9", "mxint8", "bfp16", "mxfp8_e5m2",
]  # fmt: skip


def chosen(goal: str, onnx: bool = False, **asked: Any) -> GoalChoice:
    return choose(GoalRequest(goal=goal, onnx=onnx, **asked))


def test_light_names_are_those_of_the_registries() -> None:
    """They are written again where torch is not loaded."""
    assert tuple(FORMATS) == FOLDER_FORMS and FILE_FORMS == ("gguf", "onnx", "comfyui")
    assert all({*kind.__mro__} & {*ALGORITHMS} for kind in ALGO_CONFIGS.values())


def test_every_fact_names_a_scheme_that_its_form_holds() -> None:
    programs = {goal.program for goal in GOALS.values()}
    for fact in FACTS:
        assert fact.program in programs, fact
        if fact.form == ONNX_FILE:
            assert fact.scheme in ROWS, fact
        elif fact.answer is not Answer.REFUSED and fact.scheme not in MIXES and fact.form in FORMATS:
            FORMATS[fact.form].check_scheme(fact.scheme)
        elif fact.form == "gguf" and fact.scheme not in MIXES:
            GgufFormat().check_scheme(fact.scheme)


@pytest.mark.parametrize("name", GOALS)
def test_every_row_of_a_goal_is_known_to_load(name: str) -> None:
    for onnx in (False, True):
        defaults = GOALS[name].defaults(onnx)
        if defaults is None:
            with pytest.raises(ConfigError, match="Possible for"):
                chosen(name, onnx)
            continue
        for bits, (form, scheme) in defaults.bits.items():
            choice = chosen(name, onnx, bits=bits, has_data=True)
            assert (choice.form, choice.scheme) == (form, scheme)
        assert chosen(name, onnx).command("a b").count("'a b'") == 1


@pytest.mark.parametrize("candidates", [(), ("q4_k", "q8_0"), ("uint4_wo_128", "int8_wo")], ids=",".join)
@pytest.mark.parametrize("name", GOALS)
def test_bits_between_those_of_the_schemes_are_a_mix_or_refused(name: str, candidates: tuple[str, ...]) -> None:
    if GOALS[name].folder is None:
        return
    try:
        choice = chosen(name, bits=4.5, candidates=candidates)
    except (ConfigError, NotSupportedError) as error:  # of the format, or of a candidate
        assert any(words in str(error) for words in ("Possible for", "It loads", "Unknown scheme"))
        return
    form, own = choice.defaults.mixed or ("", ())
    assert (choice.scheme, choice.form, choice.mixed) == ("mix", form, candidates or own)


@pytest.mark.parametrize("scheme", REFUSED_BY_VLLM)
def test_a_scheme_that_the_program_refuses_is_an_error_that_says_what_loads(scheme: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"vLLM 0\.32 refuses {scheme}\. It loads: .*uint4_wo_128"):
        chosen("vllm", scheme=scheme)


def test_of_two_forms_the_one_whose_outputs_were_compared_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        replace(FACTS[0], form=form, scheme="mxfp4", answer=answer)
        for form, answer in (("quark", Answer.LOADS), ("compressed-tensors", Answer.RIGHT))
    ]
    monkeypatch.setattr(goal_module, "facts_of", lambda _: rows)
    assert chosen("vllm", scheme="mxfp4").form == "compressed-tensors"


def test_without_data_an_onnx_file_has_ranges_of_its_inputs_as_they_come() -> None:
    assert chosen("onnxruntime", True).scheme == "INT8_CPU_DYNAMIC"
    assert chosen("onnxruntime", True, has_data=True).scheme == "INT8_CPU"


def test_families_are_the_scheme_of_the_goal() -> None:
    assert chosen("llama.cpp", scheme="int4").scheme == "q4_k_m"
    assert chosen("llama.cpp", scheme="Q5-K-M").scheme == "q5_k_m"
    assert chosen("vllm", scheme="W8A8").scheme == "int8_dynamic"
    assert chosen("onnxruntime", True, scheme="int8").scheme == "INT8_CPU"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "uint4_wo_12"}, ConfigError, "Did you mean 'uint4_wo_128'"),
        ({"scheme": "int3"}, NotSupportedError, "There is no int3 that vLLM loads|There is no int3 that"),
        ({"scheme": "mxfp8_e4m3"}, NotSupportedError, "Nobody has tried"),
        ({"bits": 5, "form": "awq"}, NotSupportedError, "is written as quark, not as awq"),
        ({"bits": 5, "candidates": ("uint4_wo_128",)}, ConfigError, "at least two candidates"),
        ({"bits": -1}, ConfigError, "Possible for vllm: 4, 8"),
        ({"bits": float("nan")}, ConfigError, "Possible for vllm: 4, 8"),
        ({"bits": 4, "scheme": "int8"}, ConfigError, "exclude each other"),
        ({"effort": "bst"}, ConfigError, "Did you mean 'best'"),
        ({"scheme": "int8", "form": "awq"}, NotSupportedError, "as awq"),
    ],
)
def test_wrong_words_say_what_is_possible(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chosen("vllm", **arguments)


def test_an_onnx_file_needs_data_of_its_own_and_a_folder_has_the_text_of_the_package() -> None:
    with pytest.raises(CalibrationError, match="pass --calib FILE"):
        chosen("onnxruntime", True, effort="best")
    assert chosen("vllm", effort="best").effort == "best"
    assert chosen("vllm").effort == "fast" and chosen("vllm").algorithms == ()
    with_data = chosen("vllm", has_data=True)
    assert with_data.effort == "balanced" and with_data.algorithms == ("qronos",)


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_effort_names_algorithms_that_there_are(effort: str) -> None:
    for scheme in (*SCHEMES, *MIXES):
        torch_algorithms(steps_for(scheme, effort).algorithms)
    assert steps_for("uint4_wo_128", effort).algorithms[:1] != ("qronos",) or effort == "balanced"


def test_what_was_measured_to_gain_nothing_has_no_algorithm() -> None:
    for scheme in ("int8_wo", "fp8", "ptpc_fp8", "mxfp8_e4m3", "bfloat16"):
        assert steps_for(scheme, "best").algorithms == steps_for(scheme, "balanced").algorithms == ()
    assert steps_for("int8", "best").algorithms == ("smooth",)


def test_floats_of_4_bits_with_such_inputs_are_equalized_before_they_are_solved() -> None:
    for scheme in ("mxfp4", "nvfp4", "amdfp4"):
        for effort in ("balanced", "best"):
            first, solver = steps_for(scheme, effort).algorithms
            assert first == "equalize" and solver.startswith("qronos"), scheme
    for scheme in ("mxfp4_weight_only", "mxfp4_mxfp6_e2m3", "int4_wa_64", "uint4_wo_64"):
        assert "equalize" not in steps_for(scheme, "best").algorithms, scheme


def table_of(page: str, first: str) -> dict[str, dict[str, str]]:
    """The table of a page of docs/choose whose first column is named so: row -> column -> cell."""
    lines = (Path(__file__).parents[2] / "docs" / "choose" / page).read_text().split(f"| {first} |")[1].splitlines()
    columns = [cell.strip(" `") for cell in lines[0].split("|")[:-1]]
    rows = (line.strip("|").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines[2:]))
    return {name.strip(" `"): dict(zip(columns, map(str.strip, cells), strict=True)) for name, *cells in rows}


def test_the_best_is_what_the_table_calls_best() -> None:
    """The solver with the least divergence in each row of docs/choose/algorithm.md; distillation follows it."""
    table = table_of("algorithm.md", "Scheme")
    seconds = table.pop("CPU seconds")
    assert len(table) >= 6 and "qronos:fisher=true" in seconds
    for scheme, losses in table.items():
        steps = steps_for(scheme, "best")
        *_, asked = torch_algorithms(steps.algorithms)
        [least] = torch_algorithms([min(losses, key=lambda name: float(losses[name]))])
        assert (asked.name, bool(asked.fisher)) == (least.name, bool(least.fisher)), scheme
        assert steps.distills, scheme


def test_parameters_of_algorithms_are_typed() -> None:
    assert torch_algorithms(["gptq"]) == ["gptq"]
    by_name = algo_config_by_name("qronos")
    assert [by_name.desc_act, by_name.static_groups, by_name.group_aware_order] == [False, False, True]  # type: ignore
    assert torch_algorithms(["qronos:alpha=0.001"]) == [by_name]
    [said] = torch_algorithms(["qronos:desc_act=true"])
    assert [said.desc_act, said.static_groups, said.group_aware_order] == [True, True, False]
    assert each_algorithm(["rotation, gptq", "awq:alpha=1,x=2"]) == ["rotation", "gptq", "awq:alpha=1,x=2"]
    assert torch_algorithms(["gptq:refine_passes=3,desc_act=false"]) == [GPTQConfig(refine_passes=3, desc_act=False)]
    assert onnx_algorithms(["cle:cle_steps=2"])[0].cle_steps == 2
    for words, message in {
        "gptq:refine_pases=3": "Did you mean 'refine_passes'",
        "gptq:refine_passes=x": "expected int",
        "gptq:refine_passes": "is no parameter",
        "gptq:refine_passes=1,refine_passes=2": "twice",
        "gtpq": "Did you mean 'gptq'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            torch_algorithms([words])
    with pytest.raises(ConfigError, match="target_layer_config"):
        onnx_algorithms(["auto_mixprecision"])


def test_every_scheme_has_one_name() -> None:
    assert len(scheme_names()) == len(set(scheme_names()))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_folder_is_served_in_the_type_of_its_model(name: str) -> None:
    """Both servers run AWQ in bfloat16, which most models say in their config.json, and where float16 overflows."""
    assert chosen(name).form == "awq"
    assert chosen(name).command("out").endswith(" out")
    cached = chosen(name, cache="fp8", cache_forms={"compressed-tensors"})
    assert cached.command("out").removeprefix(chosen(name).command("out")).startswith(" --kv-cache-dtype fp8")


@pytest.mark.parametrize("cache", CACHE_SCHEMES)
@pytest.mark.parametrize("name", GOALS)
def test_a_cache_is_written_where_the_format_holds_it_and_the_program_reads_it(name: str, cache: str) -> None:
    goal, spec = GOALS[name], cache_spec(cache)
    if goal.folder is None:
        return
    forms = {form for form, row in FORMATS.items() if row.holds_cache(spec)}
    if cache not in goal.cache:
        with pytest.raises(NotSupportedError, match=f"{goal.program} is not known to read a cache .* in {cache}"):
            chosen(name, cache=cache, cache_forms=forms)
        return
    for bits in (None, *goal.folder.bits):
        choice = chosen(name, bits=bits, cache=cache, cache_forms=forms)
        assert choice.form in forms
        assert (choice.form, choice.scheme) in {(fact.form, fact.scheme) for fact in goal.loaded(False)}
    with pytest.raises(NotSupportedError, match="awq format has no place for a KV cache"):
        chosen(name, form="awq", cache=cache, cache_forms=forms)


def test_a_scheme_without_a_form_for_a_cache_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"uint4_wo_128 as awq only.*Possible beside one: .*int4_wo_128"):
        chosen("sglang", scheme="uint4_wo_128", cache="fp8", cache_forms={"quark", "compressed-tensors"})


def test_a_target_of_another_program_is_refused_beside_a_goal() -> None:
    openvino, here = chosen("openvino", True), chosen("onnxruntime", True)
    assert openvino.target_with(None) == openvino.target_with("openvino") == "openvino"
    assert here.target_with(None) is None and here.target_with("ort_arm64") == "ort_arm64"
    with pytest.raises(ConfigError, match="--target ort_x64 does not fit OpenVINO, .* Possible: --target openvino"):
        openvino.target_with("ort_x64")


@pytest.mark.parametrize("name", GOALS)
def test_targets_beside_a_goal_are_those_of_the_onnx_flow(name: str) -> None:
    defaults = GOALS[name].onnx
    assert defaults is None or {*defaults.targets} <= {*TARGETS}


@pytest.mark.parametrize(("asked", "fitting", "scheme"), [
    ({"goal": "vllm"}, "uint4_wo_64 uint4_wo_32", "uint4_wo_64"),
    ({"goal": "transformers", "bits": 4}, "uint4_wo_32", "uint4_wo_32"),
    ({"goal": "vllm", "scheme": "int4"}, "uint4_wo_32", "uint4_wo_32"),
    ({"goal": "transformers", "scheme": "uint4_wo_128"}, "uint4_wo_32", "uint4_wo_128"),  # asked for by its name
    ({"goal": "vllm"}, "uint4_wo_128 uint4_wo_64", "uint4_wo_128"),
    ({"goal": "vllm"}, "", "uint4_wo_128"),  # nothing fits: the work says so
    ({"goal": "ryzen-ai"}, "uint4_wo_64", "uint4_wo_128"),  # of which no other is known to load
    ({"goal": "vllm", "bits": 4.5}, "uint4_wo_64", "mix"),
])  # fmt: skip
def test_groups_that_do_not_divide_a_model_are_smaller(asked: dict[str, Any], fitting: str, scheme: str) -> None:
    choice = chosen(**asked)
    found = choice.fitted(lambda name: name in fitting.split())
    assert found.scheme == scheme
    assert (found is choice) == (scheme == choice.scheme)
    if found is not choice:
        assert "do not divide this model" in found.reasons["scheme"] and found.algorithms == choice.algorithms


def weak_for_encoders(scheme: str) -> bool:
    """Inputs in 4 bits, or in integers with one scale for all: of MiniLM the cosines are .87 to .91 at the least, and a
    third of the nearest sentences are others.
    """
    spec = SCHEMES[scheme].input if scheme in SCHEMES else None
    return spec is not None and (spec.dtype.bits <= 4 or (not spec.dynamic and not spec.dtype.is_float))


@pytest.mark.parametrize("name", [name for name, goal in GOALS.items() if goal.folder and not goal.networks])
def test_no_goal_chooses_a_scheme_that_is_weak_for_encoders(name: str) -> None:
    """Every choice that names no scheme: of bits, with a cache or a budget, with data or without."""
    assert all(map(weak_for_encoders, ("int8", "mxfp4", "nvfp4", "int4_wa_64")))
    defaults = GOALS[name].folder
    assert defaults is not None
    bits = [None, *defaults.bits, *defaults.cached]
    asked = [GoalRequest(goal=name, bits=n, has_data=data) for n in bits for data in (False, True)]
    chosen = [choose(each) for each in asked]
    form, mixed = defaults.mixed or ("", ())
    candidates = mixed or (RULES[form]().candidates if form else ())
    assert not [scheme for scheme in (*(each.scheme for each in chosen), *candidates) if weak_for_encoders(scheme)]


@pytest.mark.parametrize(("asked", "form", "scheme"), [
    ({"goal": "transformers"}, "quark", "int8_wo"),
    ({"goal": "vllm", "has_data": True}, "quark", "int8_dynamic"),
    ({"goal": "onnxruntime"}, "onnx", "int8_wo"),
    ({"goal": "transformers", "scheme": "int4"}, "quark", "uint4_wo_128"),  # what is named stays
    ({"goal": "transformers", "bits": 4}, "quark", "uint4_wo_128"),
    ({"goal": "transformers", "algorithms": ("gptq",)}, "quark", "uint4_wo_128"),
    ({"goal": "vllm", "form": "awq"}, "awq", "uint4_wo_128"),  # which holds no 8 bits
    ({"goal": "ryzen-ai"}, "quark", "uint4_wo_128"),
])  # fmt: skip
def test_a_model_that_writes_no_text_gets_8_bits(asked: dict[str, Any], form: str, scheme: str) -> None:
    choice = chosen(**asked).of_other_model("BertModel", sentences=False)
    assert (choice.form, choice.scheme) == (form, scheme)
    assert ("a model that does not go on writing a text" in str(choice)) == (scheme in ("int8_wo", "int8_dynamic"))


def test_the_command_of_an_encoder_loads_its_class() -> None:
    plain, listed = (chosen("transformers").of_other_model("BertModel", sentences) for sentences in (False, True))
    command = plain.command("out", tokenizer=False)
    assert "t.BertModel.from_pretrained" in command and "TOKENIZER" not in command
    assert "s.SentenceTransformer(sys.argv[1])" in listed.command("out")
