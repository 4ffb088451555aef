"""Without a package that the PyTorch flow needs, whatever is asked for names the line that installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.torch_zoo import LANGUAGE_MODEL, ROOT, TEXT

CHILD = """
import sys

absent = sys.argv.pop(1)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
if sys.argv[1] == "import":
    import quark.torch
from quark.cli import main
main()
"""
WORK = {
    "import": ["import"],
    "plan": ["plan", str(LANGUAGE_MODEL), "--scheme", "int8_wo"],
    "quantize": ["quantize", str(LANGUAGE_MODEL), "--scheme", "int8_wo", "--output", "out"],
    "evaluate": ["evaluate", str(LANGUAGE_MODEL), str(LANGUAGE_MODEL), "--text", str(TEXT / "calibration.txt")],
}


CASES = [("torch", work) for work in WORK]
CASES += [("transformers", "plan"), ("transformers", "evaluate"), ("safetensors", "quantize")]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "work"), CASES)
def test_an_absent_package_is_named_with_its_pip_line(package: str, work: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, package, *WORK[work]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1, child.stderr
    assert (
        f"needs the package {package}, which is not installed: pip install 'openquark[" in child.stderr + child.stdout
    )
    assert work == "import" or "Traceback" not in child.stderr
    assert not list(tmp_path.iterdir())


def test_schemes_are_listed_without_the_other_flow() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, "onnx", "schemes"],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert "int4_wo_128" in child.stdout and "pip install 'openquark[onnx]'" in child.stdout
