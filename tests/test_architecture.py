"""The plan of the house holds: arrows, imports, sizes, addresses."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "quark"
FILES = sorted(SOURCE.rglob("*.py"))
ADDRESSES = ("torch/quantization/", "torch/export/", "onnx/quantization/", "onnx/tools/", "onnx/operators/custom_ops")
MAX_FILE, MAX_FUNCTION = 400, 60


def relative(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def imported(file: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_follow_the_arrows(file: Path) -> None:
    names, place = imported(file), relative(file)
    if place.startswith("core/"):
        wrong = [n for n in names if under(n, "torch", "onnx", "quark.torch", "quark.onnx", "quark.commands")]
    elif place.startswith("onnx_ops/"):
        wrong = [n for n in names if under(n, "torch", "quark.torch", "quark.onnx", "quark.commands", "quark.cli")]
    elif place.startswith("torch/"):
        wrong = [n for n in names if under(n, "quark.onnx", "quark.commands", "quark.cli")]
    elif place.startswith("onnx/"):
        wrong = [n for n in names if under(n, "quark.torch", "quark.commands", "quark.cli")]
    else:
        wrong = []
    if not place.startswith(ADDRESSES):
        addresses = ("quark.torch.quantization", "quark.torch.export", "quark.onnx.quantization", "quark.onnx.tools")
        wrong += [n for n in names if under(n, *addresses)]
    assert not wrong, f"{place} imports {wrong}"


@pytest.mark.parametrize("file", [f for f in FILES if "quantizer.py" not in f.name], ids=relative)
def test_registered_entries_never_import_the_flow(file: Path) -> None:
    if any(part in relative(file) for part in ("layers/", "formats/", "observers/", "algorithms/", "passes/")):
        assert not [n for n in imported(file) if n.endswith(".quantizer")]


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= MAX_FILE, "split the file where its concepts part"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("file", [f for f in FILES if relative(f).startswith(ADDRESSES)], ids=relative)
def test_addresses_hold_imports_only(file: Path) -> None:
    for node in ast.parse(file.read_text()).body:
        documented = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exported = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        started = (
            isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and one_call(node.body)
        )
        assert documented or exported or started or isinstance(node, (ast.Import, ast.ImportFrom)), ast.unparse(node)


def one_call(body: list[ast.stmt]) -> bool:
    """Whether a block does no more than call one function."""
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call)


def loaded_after(statement: str) -> set[str]:
    """Modules in sys.modules of a fresh interpreter after the statement, which must print nothing."""
    code = f"{statement}\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return set(done.stderr.split())


def test_import_quark_loads_nothing() -> None:
    assert not loaded_after("import quark") & {"torch", "onnx", "numpy", "pydantic", "rich"}


def test_import_quark_torch_loads_torch_only() -> None:
    loaded = loaded_after("import quark.torch")
    assert "torch" in loaded
    assert not loaded & {"transformers", "onnx", "onnxruntime", "accelerate", "rich", "typer", "torch._dynamo"}


def test_command_line_help_does_not_load_torch() -> None:
    assert not loaded_after("import quark.cli") & {"torch", "transformers", "onnx"}


def test_public_names() -> None:
    import quark.torch

    for name in quark.torch.__all__:
        assert getattr(quark.torch, name) is not None
