"""Paths without a file: what they define is there, and what is absent says what is possible instead."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quark.compat.absent import ABSENT
from quark.compat.documented_paths import ENTRY, homes, names_of, paths, write_files
from quark.errors import NotSupportedError
from tests.source_tree import MODULES, SOURCE

NAMES = [(path, name) for path in homes() for name in names_of(path) if not path.endswith("__main__")]
MISSING = [(path, name) for path, (names, _) in ABSENT.items() for name in names.split()]
STARS = [path for path, rows in homes().items() if any("*" in names.split() for names in rows.values())]
NOT_DOCUMENTED = {
    "UnknownAlgoConfig": "what a checkpoint records of an algorithm that this version does not know",
    "Row": "a row of the table of presets",
    "QRow": "a row of the table of presets",
}


def visible(module: ModuleType) -> set[str]:
    """The public names of a module that are no modules themselves."""
    return {
        name for name, value in vars(module).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def star_homes(path: str) -> list[ModuleType]:
    """The modules of which a path shows all names."""
    rows = homes()[path].items()
    return [importlib.import_module(home) for home, names in rows if home != "run" and "*" in names.split()]


def test_every_name_is_what_its_home_defines() -> None:
    wrong = [
        (path, name)
        for path, name in NAMES
        for home, own in [names_of(path)[name]]
        if getattr(importlib.import_module(path), name) is not getattr(importlib.import_module(home), own)
    ]
    assert len(NAMES) > 120 and not wrong, wrong


@pytest.mark.parametrize("path", STARS)
def test_a_path_shows_what_its_homes_list(path: str) -> None:
    module, listed = importlib.import_module(path), set(names_of(path))
    for home in star_homes(path):
        # A path of a path has no list of its own: it shows what the other shows.
        of_home = set(getattr(home, "__all__", visible(home)))
        hidden = [name for name in of_home if getattr(module, name) is not getattr(home, name)]
        assert not hidden, f"{hidden} of {home.__name__} come from another home"
        listed |= of_home
    assert visible(module) == {name for name in listed if not name.startswith("_")}


def test_a_home_lists_every_public_class() -> None:
    for home in {home for path in STARS for home in star_homes(path) if hasattr(home, "__all__")}:
        own = {name for name in visible(home) if getattr(getattr(home, name), "__module__", None) == home.__name__}
        classes = {name for name in own if isinstance(getattr(home, name), type)}
        assert classes - NOT_DOCUMENTED.keys() <= set(home.__all__), home.__name__


@pytest.mark.parametrize(("path", "name"), MISSING)
def test_what_is_absent_is_imported_and_refuses_its_use(path: str, name: str) -> None:
    found = getattr(importlib.import_module(path), name)
    assert (found.__name__, found.__module__) == (name, path)
    for use in (
        found, lambda: found.from_dict({}), lambda: isinstance(1, found), lambda: type("Own", (found,), {}),
        lambda: found["a key"], lambda: list(found), lambda: "a key" in found,
    ):  # fmt: skip
        with pytest.raises(NotSupportedError, match=f"{name} is not part of this version. Possible: "):
            use()


def test_no_path_hides_a_file_and_none_is_named_twice() -> None:
    """A parent may be a package of files, which comes first."""
    assert not {*homes(), *ABSENT} & MODULES.keys()
    assert not [name for path, name in MISSING if name in names_of(path)]


def test_only_imports_of_packages_with_documented_modules_are_looked_up_in_the_table() -> None:
    code = (
        "import sys\nbefore = list(sys.meta_path)\nimport quark\nassert sys.meta_path == before\n"
        "import quark.onnx.operators.custom_ops, quark.core, json\n"
        f"print(*(name for name, module in sys.modules.items() if {ENTRY!r} in getattr(module, '__path__', ())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quark", "quark.onnx", "quark.onnx.operators"]


def test_a_wheel_holds_the_paths_as_files(tmp_path: Path) -> None:
    """For type checkers, editors and packagers."""
    files = dict(write_files(tmp_path))
    assert files.keys() >= {"quark/torch/quantization/__init__.py", "quark/onnx/tools/fix_shapes.py"}
    assert not [place for place in files if (SOURCE.parent / place).exists()]
    for place, file in files.items():
        compile(file.read_text(encoding="utf-8"), place, "exec")


def test_an_unknown_name_is_an_import_error_with_the_nearest_ones() -> None:
    with pytest.raises(ImportError, match="dq_mxfp8"):
        exec("from quark.torch.kernel.mx import dq_mxfp8")
    with pytest.raises(AttributeError, match="Did you mean 'dq_mxfp4'"):
        importlib.import_module("quark.torch.kernel.mx").dq_mxfp8  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("quark.torch.kernel.gemm")


def test_a_module_below_is_an_attribute_and_lists_its_names() -> None:
    code = "import quark.torch.kernel; print(quark.torch.kernel.mx.__name__, 'qdq_mxfp4' in dir(quark.torch.kernel.mx))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "quark.torch.kernel.mx True\n"
    space: dict[str, object] = {}
    exec("from quark.torch.utils.diffusers import *", space)
    assert "get_calib_dataloader" in space and "calibration" not in space
    assert "quark.torch.kernel" in paths()


def test_a_path_runs_as_a_program() -> None:
    for path, shown in {
        "quark.onnx.tools.fix_shapes": "fix_shapes",
        "quark.onnx.tools.evaluate.py": "BASELINE",
    }.items():
        done = subprocess.run([sys.executable, "-m", path, "--help"], capture_output=True, text=True, check=True)
        assert shown in done.stdout
