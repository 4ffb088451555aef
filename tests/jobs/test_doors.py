"""Doors: the command line, a recipe, a plan, the Python call with a path and with a module do the same for a request.

What each would write is looked at where the writing begins, so that a case costs no quantization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import quark as package
from quark.errors import QuarkError
from quark.goals import GOALS
from quark.goals.efforts import EFFORTS
from quark.jobs import FolderJob, run_folder
from quark.jobs.folders.export import Export
from quark.torch.config.config import OWN_ALGORITHMS
from tests.commands.program import quark
from tests.models.families import family
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama

CALIB = TEXT / "calibration.txt"
SCHEMES: tuple[str | None, ...] = (None, "int4", "int8", "fp8", "mxfp4", "nvfp4", "q4_k_m", "uint4_wo_32", "bfloat16")
PROGRAMS = [name for name, goal in GOALS.items() if goal.folder is not None]


class Stopped(QuarkError):
    """Raised where the writing begins."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What `write_folder` was told: config, calibration data, format."""
    told: list[Any] = []

    def write(job: FolderJob, export: Export) -> None:
        said = job.request.device, job.request.dtype
        told.append((job.config.to_dict(), job.calibration, export.form, *said))
        raise Stopped("here the writing begins")

    monkeypatch.setattr(run_folder, "write_folder", write)
    yield told


def by_command(output: str, said: dict[str, Any]) -> None:
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    done = quark("quantize", LANGUAGE_MODEL, "-o", output, *words)
    assert done.code
    raise QuarkError(done.err)


def by_python(output: str, said: dict[str, Any]) -> None:
    names = {"for": "goal", "calib": "data"}
    package.quantize(LANGUAGE_MODEL, output=output, **{names.get(name, name): value for name, value in said.items()})


def by_recipe(output: str, said: dict[str, Any]) -> None:
    data = {"path": str(said["calib"]), "samples": said["samples"]} if "calib" in said else None
    content = {name: value for name, value in said.items() if name not in ("calib", "samples")}
    file = Path(f"{output}.yaml")
    file.write_text(json.dumps({"recipe": 1, "model": str(LANGUAGE_MODEL), "data": data, **content}))
    done = quark("run", file, "-o", output)
    assert done.code
    raise QuarkError(done.err)


DOORS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "command": by_command,
    "python": by_python,
    "recipe": by_recipe,
}


def told_by(door: str, output: Path, begun: list[Any], said: dict[str, Any]) -> Any:
    """What the writing began with, or the error before it."""
    begun.clear()
    with pytest.raises(QuarkError) as error:
        DOORS[door](str(output), said)
    return begun[0] if begun else bare(str(error.value))


def bare(message: str) -> str:
    """An error without the spelling of options, which is that of the door."""
    message = message.strip().removeprefix("quark: ").removeprefix("quark run: ")
    message = message.replace("--for", "goal").replace("--calib", "data")
    message = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), message)
    return "".join(message.replace("=", "").split())


CASES = [
    (goal, scheme, effort, data)
    for goal in PROGRAMS
    for scheme in SCHEMES
    for effort in (None, *EFFORTS)
    for data in (False, True)
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if i % 23 else ()) for i, case in enumerate(CASES)], ids=str
)
def test_every_door_does_the_same(case: tuple[Any, ...], tmp_path: Path, begun: list[Any]) -> None:
    goal, scheme, effort, data = case
    said: dict[str, Any] = {"for": goal, "scheme": scheme, "effort": effort}
    said |= {"calib": CALIB, "samples": 2} if data else {}
    said = {name: value for name, value in said.items() if value is not None}
    first, *others = (told_by(door, tmp_path / "out", begun, said) for door in DOORS)
    assert all(other == first for other in others)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize(("goal", "scheme"), [("llama.cpp", None), ("transformers", "int4"), ("vllm", "mxfp4")])
def test_a_plan_names_the_algorithms_that_run(
    goal: str, scheme: str | None, effort: str, tmp_path: Path, begun: list[Any]
) -> None:
    said = {"for": goal, **({"scheme": scheme} if scheme else {}), "effort": effort, "calib": CALIB, "samples": 2}
    config = told_by("command", tmp_path / "out", begun, said)[0]
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    table = json.loads(quark("plan", LANGUAGE_MODEL, *words, "--json").out)["tables"][0]["rows"]
    planned = next(row["chosen"] for row in table if row[""] == "algorithms")
    run = [each["name"] for each in config.get(OWN_ALGORITHMS) or config["algo_config"] or []]
    assert [word.partition(":")[0] for word in planned.split(", ") if "=" not in word.partition(":")[0]] == (
        run or ["none"]
    )


@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_a_module_and_its_folder_have_the_same_layers_in_float(model_type: str, tmp_path: Path) -> None:
    (family(model_type) if model_type != "llama" else tiny_llama()).save_pretrained(tmp_path / "model")
    package.quantize(tmp_path / "model", "int8_wo", output=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    made = package.quantize(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), "int8_wo", output=tmp_path / "b")
    assert made is not None and stored.keys() == load_file(tmp_path / "b" / "model.safetensors").keys()
