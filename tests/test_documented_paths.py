"""Paths without a file: what they define is there, and what is absent says what is possible instead."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from quark import documented_paths
from quark.documented_paths import ABSENT, HOMES, PATHS, homes_of
from quark.errors import NotSupportedError
from tests.source_tree import MODULES

NAMES = [(path, name) for path in HOMES for name in homes_of(path)]
MISSING = [(path, name) for path, (names, _) in ABSENT.items() for name in names.split()]


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_a_name_is_what_its_home_defines(path: str, name: str) -> None:
    home, own = homes_of(path)[name]
    assert getattr(importlib.import_module(path), name) is getattr(importlib.import_module(home), own)


@pytest.mark.parametrize(("path", "name"), MISSING)
def test_what_is_absent_is_imported_and_refuses_its_use(path: str, name: str) -> None:
    found = getattr(importlib.import_module(path), name)
    assert (found.__name__, found.__module__) == (name, path)
    for use in (found, lambda: found.from_dict({}), lambda: isinstance(1, found), lambda: type("Own", (found,), {})):
        with pytest.raises(NotSupportedError, match=f"{name} is not part of this version. Possible: "):
            use()


def test_no_path_hides_a_file_and_none_is_named_twice() -> None:
    """A parent may be a package of files; the finder is asked last."""
    assert not {*HOMES, *ABSENT} & MODULES.keys()
    assert not [name for path, name in MISSING if name in homes_of(path)]
    assert sum(isinstance(finder, documented_paths.DocumentedPaths) for finder in sys.meta_path) == 1


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
    assert "quark.torch.kernel" in PATHS
