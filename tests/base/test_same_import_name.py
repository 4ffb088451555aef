"""openquark and amd-quark in one environment: what each order of installing leaves, and what is said of it.

Made of links to the source here. With the packages themselves, 171 files are of both in amd-quark 0.13, of which
`quark/__init__.py` is one: `pip install --no-deps openquark amd-quark`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import quark
from quark.base.same_import_name import altered_files, other_version, why_mixed

SOURCE = Path(quark.__file__).parent
THEIRS = '"""AMD Quark."""\n__version__ = "0.13"\n__all__ = ["__version__"]\n'
"""The code of `quark/__init__.py` in amd-quark 0.13."""


def site(folder: Path, init: str | None = None, amd: bool = True) -> Path:
    """A folder of packages with both, openquark with the `__init__.py` that is given, its own, or ("") none."""
    package = folder / "quark"
    package.mkdir(parents=True)
    for path in SOURCE.iterdir():
        if path.name not in ("__pycache__", "__init__.py"):
            (package / path.name).symlink_to(path)
    own = (SOURCE / "__init__.py").read_bytes()
    content = own if init is None else init.encode()
    if content:
        (package / "__init__.py").write_bytes(content)
    record = folder / "openquark-1.0.0.dist-info" / "RECORD"
    record.parent.mkdir()
    lines = [f"quark/{name},sha256={digest_in_record(SOURCE / name)}," for name in ("__init__.py", "cli.py")]
    record.write_text("\n".join([*lines, "openquark-1.0.0.dist-info/RECORD,,"]) + "\n")
    (record.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: openquark\nVersion: 1.0.0\n")
    if amd:
        (folder / "amd_quark-0.13.dist-info").mkdir()
    return folder


def digest_in_record(file: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, *options, "-c", code, "doctor"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder, check=False)


PROGRAM = "from quark.cli import program; program()"
"""The code of the script `quark`."""


@pytest.mark.slow
def test_openquark_installed_last_says_so_in_one_line_and_works(tmp_path: Path) -> None:
    folder = site(tmp_path / "site")
    done = run(folder, "import quark; print(quark.quantize.__module__)")
    assert (done.returncode, done.stdout) == (0, "quark.one_call\n")
    assert done.stderr.count("\n") == 1 and "amd-quark 0.13 is installed in the same environment" in done.stderr
    assert "pip uninstall amd-quark, then pip install --force-reinstall --no-deps openquark" in done.stderr
    done = run(folder, PROGRAM)
    assert done.returncode == 0 and "amd-quark 0.13" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "amd", "words"),
    [
        (
            THEIRS,
            True,
            "amd-quark 0.13, which is imported as quark, too, was installed over it. Possible: pip uninstall",
        ),
        ("", False, "so uninstalling amd-quark leaves it"),
    ],
    ids=["amd-quark last", "amd-quark uninstalled"],
)
def test_the_program_says_what_happened_to_its_files(init: str, amd: bool, words: str, tmp_path: Path) -> None:
    # Without the packages of this environment, in which openquark is whole.
    done = run(site(tmp_path / "site", init, amd), PROGRAM, "-S")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("quark: 1 files, quark/__init__.py among them, of openquark in ")
    assert words in done.stderr


@pytest.mark.slow
def test_openquark_alone_says_nothing(tmp_path: Path) -> None:
    done = run(site(tmp_path / "site", amd=False), "import quark")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_other_package_is_known_by_a_name_in_the_folder(tmp_path: Path) -> None:
    assert other_version(tmp_path) is None and other_version(tmp_path / "absent.zip") is None
    for name in ("amd_quark_tools-1.0.dist-info", "quark-0.1.dist-info", "amd_quark-0.12.egg-info"):
        (tmp_path / name).mkdir()
    assert other_version(tmp_path) is None
    (tmp_path / "amd_quark-0.13rc1.dist-info").mkdir()
    assert other_version(tmp_path) == "0.13rc1"


def test_files_are_compared_with_those_that_were_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    assert altered_files() == []
    (folder / "quark" / "__init__.py").write_text(THEIRS)
    (folder / "quark" / "cli.py").unlink()
    assert altered_files() == ["quark/__init__.py", "quark/cli.py"]
    package = ModuleType("quark")
    package.__path__ = [str(folder / "quark")]
    assert "2 files, quark/__init__.py among them" in (why_mixed(package) or "")
    assert why_mixed(quark) is None
