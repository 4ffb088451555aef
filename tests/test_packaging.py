"""What the distribution requires is what its code imports, and an absent package is named with the line that helps."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import FILES, imported, parsed, relative

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it to Python 3.10

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What of the package each extra serves; the longest path that fits counts. Everything else needs no extra.
EXTRAS_OF = {
    "base/data_files/images.py": {"images"},
    "base/libraries/": {"torch", "diffusers"},
    "report/": {"report"},
    "torch/": {"torch"},
    "torch/checkpoint/hooks/of_diffusers.py": {"torch", "diffusers"},
    "torch/flows/on_load/of_diffusers.py": {"torch", "diffusers"},
    "torch/diffusion/": {"torch", "diffusers"},
    "torch/flows/adapters.py": {"torch", "peft"},
    "torch/writers/gguf/": {"torch", "gguf"},
    "gguf/": {"torch", "gguf"},
    "torch/writers/onnx/": {"torch", "onnx"},
    "onnx_ops/": {"onnx"},
    "onnx_ops/encryption.py": {"onnx", "crypto"},
    "onnx/": {"onnx"},
    "onnx/calibration/histogram_figures.py": {"onnx", "plot"},
    "onnx/config/lowering/shapeshifter.py": {"onnx", "yaml"},
    "onnx/passes/slim.py": {"onnx", "slim"},
    "onnx/algorithms/rounding/": {"onnx", "torch"},  # AdaRound and AdaQuant are trained by torch
    "commands/": {"torch", "onnx"},
    "compat/auto_search/": {"onnx"},
    "compat/llm_scripts/": {"torch"},
    "compat/onnx_names/": {"onnx"},
    "compat/onnx_tools/": {"onnx"},
    "compat/quark_cli/": {"torch", "onnx"},
    "base/telemetry.py": {"onnx"},
    "compat/torch_names/": {"torch"},
    "jobs/folders/pictures.py": {"torch", "diffusers"},
    "jobs/": {"torch", "onnx"},
}
IMPORTED_AS = {"pyyaml": "yaml", "pillow": "PIL", "protobuf": "google", "onnx-ir": "onnx_ir"}
COME_WITH_OTHERS = {
    "pydantic_core": "pydantic brings the one version that it works with",
    "triton": "torch brings the one version that it works with, where it is for GPUs",
    "tokenizers": "transformers brings the one version that it works with",
    "IPython": "a notebook brings it, and bars are shown in none without",
}
NEVER_IMPORTED = {
    "onnxscript": "torch.onnx.export imports it, on which export_onnx is built",
}

TOOLS = ("dev", "docs", "tasks")
"""Extras that no import statement of the package names."""


def import_name(requirement: str) -> str:
    name = re.split(r"[<>=!~\[; ]", requirement)[0]
    return IMPORTED_AS.get(name, name)


BASE = {import_name(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {
    extra: {import_name(requirement) for requirement in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra not in ("all", *TOOLS)
}


def extras_of(file: Path) -> set[str]:
    fitting = [path for path in EXTRAS_OF if relative(file).startswith(path)]
    return EXTRAS_OF[max(fitting, key=len)] if fitting else set()


def third_party(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(file)} - sys.stdlib_module_names - {"quark"}


def test_every_import_is_a_requirement_of_its_extra() -> None:
    wrong = {}
    for file in FILES:
        required = BASE.union(*(EXTRAS[extra] for extra in extras_of(file)), COME_WITH_OTHERS)
        if third_party(file) - required:
            wrong[relative(file)] = third_party(file) - required
    assert not wrong, wrong


def test_every_requirement_is_imported() -> None:
    everywhere = {name for file in FILES for name in third_party(file)}
    unused = {"dependencies": BASE - everywhere}
    for extra, required in EXTRAS.items():
        names = {name for file in FILES if extra in extras_of(file) for name in third_party(file)}
        unused[extra] = required - names - NEVER_IMPORTED.keys()
    assert not any(unused.values()), unused
    assert not NEVER_IMPORTED.keys() & everywhere, "no exceptions any longer"


def test_all_is_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    # An extra whose packages need a newer Python is left out there; by itself it is asked for, and pip says so.
    assert {one.partition(";")[0] for one in extras["all"]} == {f"openquark[{extra}]" for extra in EXTRAS}
    assert "openquark[all]" in extras["dev"]


def test_the_versions_of_python_begin_where_they_are_said_to() -> None:
    versions = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions


def test_the_license_is_there() -> None:
    assert PROJECT["license"] == "MIT"
    for file in PROJECT["license-files"]:
        assert "MIT License" in (ROOT / file).read_text(encoding="utf-8")


def test_pip_lines_name_extras_that_there_are() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *FILES]
    pip_line = re.compile(r"pip\s+install (?:-e )?'(?:openquark|\.)\[([\w,]+)\]'")
    named = [(page, line) for page in pages for line in pip_line.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 3
    wrong = [(page, line) for page, line in named if not set(line.split(",")) <= {*EXTRAS, "all", *TOOLS}]
    assert not wrong, wrong


def test_what_continuous_integration_installs_is_pinned_in_versions_that_are_allowed() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    asked = [one for one in map(Requirement, (*PROJECT["dependencies"], *extras)) if one.name != PROJECT["name"]]
    assert len(asked) > 30
    wrong = [str(one) for one in asked if pinned.get(canonicalize_name(one.name), "none") not in one.specifier]
    assert not wrong, wrong


def test_every_requirement_has_an_oldest_version() -> None:
    lines = (*PROJECT["dependencies"], *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]))
    for line in lines:
        # `make release` installs this version, to see that it runs.
        assert [one.operator for one in Requirement(line).specifier] == [">="], line


def test_each_extra_is_installed_by_itself_before_a_release() -> None:
    release = (ROOT / ".ci" / "release").read_text(encoding="utf-8")
    listed = re.search(r"^EXTRAS=\$\{EXTRAS:-(.*)\}$", release, re.MULTILINE)
    assert listed is not None
    assert set(listed[1].split()) == {"none", "oldest", *EXTRAS}
    # With each, a command runs that reaches its code or the one beside it.
    for extra in EXTRAS:
        assert re.search(rf"^    ([\w |]* )?{extra}( [\w |]*)?\) (for|quark) ", release, re.MULTILINE), extra


@pytest.mark.slow
def test_packages_are_looked_for_in_the_extra_that_brings_them() -> None:
    calls = [
        (relative(file), [argument.value for argument in node.args[1:] if isinstance(argument, ast.Constant)])
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("require_packages")
    ]
    assert len(calls) > 5
    for place, (extras, *packages) in calls:
        brought = {name for extra in str(extras).split(",") for name in EXTRAS[extra]}
        assert packages and set(packages) <= brought, place


@pytest.mark.parametrize(
    ("absent", "code", "line"),
    [
        ("torch", "import quark.torch", "pip install 'openquark[torch]'"),
        ("onnx", "import quark.onnx", "pip install 'openquark[onnx]'"),
        ("onnxruntime", "from quark.onnx.quantizer import ModelQuantizer", "pip install 'openquark[onnx]'"),
        ("torch", "from quark.cli import main; main()", "pip install 'openquark[torch]'"),
    ],
)
def test_an_absent_package_is_named_with_its_line(absent: str, code: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = f"import sys; sys.modules[{absent!r}] = None; {code}"
    arguments = ["plan", str(tmp_path), "--scheme", "int8"]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"needs the package {absent}, which is not installed: {line}." in last
    assert "main()" not in code or last == done.stderr.strip(), "one line, no traceback"
