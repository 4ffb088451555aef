"""The plan of the house holds: arrows, circles, folders, names, complexity. Each test lists all that break it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from types import ModuleType

import pytest

from tests.architecture_exceptions import (
    IN_BOTH_FLOWS,
    LISTS,
    NAMED_OTHERWISE,
    SEVERAL_MEANINGS,
)
from tests.source_tree import (
    FACES,
    FILES,
    FOLDERS,
    circles,
    imported,
    imports_between_entries,
    imports_between_files,
    parsed,
    paths_of,
    relative,
    share_a_word,
)

# From the ground up: each imports itself and what stands further down, never what stands beside it, but on the ground.
ARROWS = [
    "errors __version__",
    "base",
    "core",
    "report",
    "onnx_ops gguf",
    "goals",
    "torch onnx",
    "jobs",
    "commands",
    "cli one_call",
    "compat",
    "__main__",
]

MOST_ENTRIES = 16
MOST_LINES = 800
MOST_PATHS = 15


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def check(offenders: Mapping[str, object], exceptions: Mapping[str, str]) -> None:
    """Every offender is an exception with a reason, and every exception is still needed."""
    new = {name: found for name, found in offenders.items() if name not in exceptions}
    assert not new, new
    stale = sorted(exceptions.keys() - offenders.keys())
    assert not stale, f"no exceptions any longer: {stale}"


def test_imports_follow_the_arrows() -> None:
    floor_of = {name: floor for floor, names in enumerate(ARROWS) for name in names.split()}
    wrong = []
    for file, targets in imports_between_files().items():
        own = file.split("/")[0].removesuffix(".py")
        if file in FACES:
            continue
        for target in targets - {"__init__.py"}:
            other = target.split("/")[0].removesuffix(".py")
            above_or_beside = floor_of[other] >= max(floor_of[own], 1)
            if other != own and above_or_beside:
                wrong.append(f"{file} imports {target}")
    assert not wrong, wrong


def test_the_core_needs_numpy_only_and_onnx_ops_no_torch() -> None:
    wrong = [
        f"{relative(file)} imports {name}"
        for folder, others in {"core": ("torch", "onnx", "onnx_ir", "onnxruntime"), "onnx_ops": ("torch",)}.items()
        for file in FILES
        for name in imported(file)
        if relative(file).startswith(f"{folder}/") and under(name, *others)
    ]
    assert not wrong, wrong


def test_only_the_tables_of_public_names_lead_to_what_earlier_spellings_need() -> None:
    wrong = [
        f"{file} imports {target}"
        for file, targets in imports_between_files().items()
        for target in targets
        if target.startswith("compat/") and not file.startswith("compat/") and file not in FACES
    ]
    assert not wrong, wrong


def test_gguf_files_are_reached_by_one_door() -> None:
    """Its names, and the one exporter and importer that takes models apart for such files."""
    wrong = [
        f"{file} imports {target}"
        for file, targets in imports_between_files().items()
        for target in targets - {"gguf/__init__.py"}
        if target.startswith("gguf/") and not file.startswith(("gguf/", "torch/writers/gguf/"))
    ]
    assert not wrong, wrong


def test_registered_entries_never_import_the_flow() -> None:
    rooms = ("layers/", "formats/", "observers/", "algorithms/", "passes/")
    wrong = [
        f"{file} imports {target}"
        for file, targets in imports_between_files().items()
        for target in targets
        if any(room in file for room in rooms) and target.endswith("/quantizer.py")
    ]
    assert not wrong, wrong


def test_circles_are_found() -> None:
    imports = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": ["d2"], "d2": [], "e": ["a", "d"]}
    assert circles(imports) == [{"b", "c"}]
    assert circles({**imports, "d2": ["a"]}) == [{"a", "b", "c", "d", "d2"}]


def test_files_import_each_other_in_no_circle() -> None:
    found = circles(imports_between_files())
    assert not found, found


def test_the_entries_of_a_folder_import_each_other_in_no_circle() -> None:
    """Entries are files and folders, of every folder: a folder imports what any of its files does."""
    found = {relative(folder): circles(imports_between_entries(folder)) for folder in FOLDERS}
    assert not any(found.values()), {folder: entries for folder, entries in found.items() if entries}


def test_a_folder_is_seen_at_a_glance() -> None:
    full = {}
    for folder in FOLDERS:
        entries = {file for file in folder.iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()}
        entries = {file for file in entries if file.name != "__init__.py"}
        if len(entries) > MOST_ENTRIES and relative(folder) not in LISTS:
            full[relative(folder)] = len(entries)
    assert not full, full


def flow_of(file: str) -> str:
    """The flow that the names of a file are of; its folder, where they are of none."""
    return file.removeprefix("compat/").split("/")[0].removesuffix("_names")


def test_a_class_name_has_one_meaning() -> None:
    """Names with an underscore do not leave their file, so they may recur."""
    homes = defaultdict(list)
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(relative(file))
    several = {name: files for name, files in homes.items() if len(files) > 1}
    of_both = {name for name, files in several.items() if sorted(map(flow_of, files)) == ["onnx", "torch"]}
    reason = "documented for both flows, where each has its own"
    check(several, SEVERAL_MEANINGS | {name: reason for name in IN_BOTH_FLOWS if name in of_both})
    assert set(IN_BOTH_FLOWS) <= of_both


def test_a_file_is_named_for_what_it_holds() -> None:
    """A word of its name is in one of the public names that it defines, or in its first sentence."""
    wrong = {}
    for file in FILES:
        if file.stem in ("__init__", "__main__", "__version__", "base"):
            continue  # base.py is what the entries of its folder share
        public = [
            node.name
            for node in parsed(file).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        ]
        sentence = (ast.get_docstring(parsed(file)) or "").split("\n")[0]
        if not any(share_a_word(file.stem, text) for text in [*public, sentence]):
            wrong[relative(file)] = public
    check(wrong, NAMED_OTHERWISE)


def test_files_stay_short() -> None:
    lines = {relative(file): file.read_text(encoding="utf-8").count("\n") for file in FILES}
    long = {file: count for file, count in lines.items() if count > MOST_LINES}
    assert not long, long


def test_functions_stay_simple() -> None:
    """Paths as `paths_of` counts them, what is defined within a function with it."""
    found = {
        f"{relative(file)}:{line}": count
        for file in FILES
        for line, count in paths_of(file).items()
        if count > MOST_PATHS
    }
    assert not found, found


def loaded_after(statement: str) -> set[str]:
    """Modules in sys.modules of a fresh interpreter after the statement, which must print nothing."""
    code = f"{statement}\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return set(done.stderr.split())


def test_import_quark_loads_nothing() -> None:
    assert not loaded_after("import quark") & {"torch", "onnx", "numpy", "pydantic", "rich"}


def test_import_quark_torch_loads_nothing_and_its_names_torch_only() -> None:
    loaded = loaded_after("import quark.torch")
    assert not loaded & {"torch", "numpy", "pydantic", "rich"}
    loaded = loaded_after("from quark.torch import GPTQConfig")
    assert not loaded & {"torch", "onnx"}
    loaded = loaded_after("from quark.torch import *")
    assert "torch" in loaded
    assert not loaded & {"transformers", "onnx", "onnxruntime", "accelerate", "rich", "typer", "torch._dynamo"}


def test_the_quantizer_of_onnx_models_loads_what_runs_when_it_runs() -> None:
    loaded = loaded_after("from quark.onnx import ModelQuantizer")
    later = ("quark.onnx.search", "quark.onnx.flow", "quark.onnx.algorithms")
    assert not {name for name in loaded if name.startswith(later)}
    assert not loaded & {"torch", "pydantic", "scipy", "rich"}


def test_command_line_help_does_not_load_torch() -> None:
    assert not loaded_after("from quark.cli import app; app()") & {"torch", "transformers", "onnx"}


@pytest.mark.parametrize("flow", ["torch", "onnx"])
def test_all_is_what_is_visible(flow: str) -> None:
    package = importlib.import_module(f"quark.{flow}")
    public = {name for name in dir(package) if not name.startswith("_")}
    visible = {name for name in public if not isinstance(getattr(package, name), ModuleType)}
    documented = {name for name in package.__all__ if name.startswith("_")}
    assert sorted(package.__all__) == sorted(visible | documented)
