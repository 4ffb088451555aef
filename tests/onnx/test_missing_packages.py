"""Without its libraries the ONNX flow says which pip line brings them, by whatever way one comes to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quark
from quark.errors import MissingDependencyError, require_packages

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocker())
"""
PROGRAM = "from quark.cli import main; sys.argv = {words!r}; main()"
WAYS = [
    "import quark.onnx",
    "from quark.onnx.quantization.config.config import Config",
    "import quark.onnx.tools.remove_qdq",
    PROGRAM.format(words=["quark", "inspect", "m.onnx"]),
    PROGRAM.format(words=["quark", "quantize", "m.onnx", "--config", "A8W8", "-o", "out.onnx"]),
    PROGRAM.format(words=["quark", "evaluate", "m.onnx", "q.onnx", "--data", "x.npz"]),
]


def test_a_finder_that_refuses_and_a_module_that_stands_in_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"onnxruntime.*pip install 'openquark\[onnx\]'"):
        require_packages("The ONNX flow", "onnx", "onnxruntime")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxruntime"])
def test_every_way_names_the_pip_line(package: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    source = str(Path(quark.__file__).parents[1])
    code = BLOCK.format(package=package) + f"sys.path.insert(0, {source!r})\n{way}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"needs the package {package}, which is not installed: pip install 'openquark[onnx]'" in last
    assert "Traceback" not in done.stderr or way.startswith(("import", "from quark.onnx"))
