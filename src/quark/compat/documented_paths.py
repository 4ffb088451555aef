"""Paths of the documented system that have no file of their own, as modules.

`from quark.torch.quantization.config.config import Config` works: paths.txt says where each name is defined, and the
module of such a path is made from these rows as source text. A wheel holds the same texts as files, for type checkers
and editors; elsewhere DocumentedPaths makes the modules when they are imported. It is one entry of `quark.__path__`,
and of those of packages with documented modules, so that Python asks it for modules of these alone. A name of ABSENT
can be imported, and its use raises NotSupportedError, which says what is possible instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, PathEntryFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quark.compat.absent import ABSENT, absent

ENTRY = "quark: documented paths"
"""The entry of `__path__` that leads to DocumentedPaths."""
TABLE = Path(__file__).with_name("paths.txt")
PACKAGE = Path(__file__).parent.parent


@cache
def homes() -> dict[str, dict[str, str]]:
    """Documented path -> home -> names, as paths.txt has them; a row "run" is a call instead."""
    table: dict[str, dict[str, str]] = {}
    path = home = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if not line.startswith(" "):
            path = words[0]
            table[path] = {}
        elif words[0].endswith(":"):
            home = words[0][:-1]
            table[path][home] = " ".join(words[1:])
        else:
            table[path][home] += " " + " ".join(words)
    return table


@cache
def paths() -> frozenset[str]:
    """Every module of the two tables: the paths, and the packages that they lie in."""
    parts = [path.split(".") for path in (*homes(), *ABSENT)]
    return frozenset(".".join(part[:count]) for part in parts for count in range(2, len(part) + 1))


def is_package(path: str) -> bool:
    """Return True where another documented path lies below."""
    return any(other.startswith(f"{path}.") for other in paths())


def names_of(path: str) -> dict[str, tuple[str, str]]:
    """Name -> its home and its name there, for the names that the rows of a path list; not those of a star."""
    found = {}
    for home, names in homes().get(path, {}).items():
        for name in names.split() if home != "run" else ():
            documented, _, own = name.partition("=")
            if documented != "*":
                found[documented] = (home, own or documented)
    return found


def missing_names(path: str) -> list[str]:
    """The documented names of a path that this version does not have."""
    return ABSENT.get(path, ("", ""))[0].split()


def source_of(path: str) -> str:
    """The module of a documented path as Python source: imports from the homes, and what it runs as a program."""
    lines = ['"""A documented path. The names are defined elsewhere; quark.compat.paths.txt says where."""', ""]
    rows = {home: names for home, names in homes().get(path, {}).items() if home != "run"}
    stars = [home for home, names in rows.items() if "*" in names.split()]
    lines += [f"from {home} import *" for home in stars]
    listed = names_of(path)
    for name, (home, own) in listed.items():
        lines.append(f"from {home} import {own} as {name}")
    if "__getattr__" not in listed:
        lines += [
            "from quark.compat.documented_paths import asked_of as _asked_of",
            "",
            "__getattr__ = _asked_of(__name__)",
        ]
    if not stars:
        public = [name for name in (*listed, *missing_names(path)) if not name.startswith("__")]
        lines.append(f"__all__ = {public!r}")
    if "run" in homes().get(path, {}):
        home, call = homes()[path]["run"].rsplit(".", 1)
        lines += ["", 'if __name__ == "__main__":', f"    from {home} import {call.split('(')[0]}", "", f"    {call}"]
    return "\n".join(lines) + "\n"


def write_files(folder: Path) -> list[tuple[str, Path]]:
    """Write the modules of all paths below a folder.

    Returns:
        For each its place in a distribution, as `quark/torch/kernel/mx.py`, and the file.
    """
    written = []
    for path in sorted(paths()):
        place = f"{path.replace('.', '/')}{'/__init__' * is_package(path)}.py"
        if (PACKAGE.parent / place).exists():
            continue  # a package of files, below which a path lies
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source_of(path), encoding="utf-8")
        written.append((place, file))
    return written


def asked_of(path: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module of a path: absent names, modules below, and an error with the nearest name."""

    def find(name: str) -> Any:
        if name in missing_names(path):
            return absent(path, name)
        if f"{path}.{name}" in paths():
            return import_module(f"{path}.{name}")
        from quark.errors import did_you_mean

        hint = "" if name.startswith("_") else f" {did_you_mean(name, dir(sys.modules[path]))}"
        raise AttributeError(f"module {path!r} has no attribute {name!r}.{hint}")

    return find


class DocumentedPaths(PathEntryFinder, InspectLoader):
    """Makes the modules of the two tables, where no file has the path."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in paths():
            return None
        folders = [entry for entry in sys.modules[fullname.rpartition(".")[0]].__path__ if entry != ENTRY]
        spec = PathFinder.find_spec(fullname, folders, target)
        if spec is None:
            spec = ModuleSpec(fullname, self, is_package=is_package(fullname))
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.insert(0, ENTRY)
        return spec

    def is_package(self, fullname: str) -> bool:
        return is_package(fullname)

    def get_source(self, fullname: str) -> str:
        return source_of(fullname)


def _finder_of(entry: str) -> DocumentedPaths:
    if entry != ENTRY:
        raise ImportError(entry)
    return DocumentedPaths()


def install(path: list[str]) -> None:
    """Let the modules of the tables be imported.

    Args:
        path: `quark.__path__`.
    """
    if ENTRY not in path:
        path.insert(0, ENTRY)
        sys.path_hooks.append(_finder_of)
