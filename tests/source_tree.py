"""The source of quark as data: its files, what each imports, and circles among imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "quark"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({file.parent for file in FILES})


def relative(path: Path) -> str:
    """A path as the lists of exceptions write it: from `src/quark`, with slashes."""
    return path.relative_to(SOURCE).as_posix()


def module(file: Path) -> str:
    """The dotted name under which Python imports a file."""
    return ".".join(("quark", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


FACES = ("__init__.py", "torch/__init__.py", "onnx/__init__.py")
"""The tables of public names: they name what scripts import, wherever it stands."""
MODULES = {module(file): file for file in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def paths_of(file: Path) -> dict[int, int]:
    """First line of each function and method -> its cyclomatic complexity, with that of all that is defined in it.

    One, and one more for each branch, loop, comprehension and operand of `and` and `or`.
    """
    from radon.complexity import cc_visit_ast
    from radon.visitors import Function

    def complexity(block: Function) -> int:
        return int(block.complexity) + sum(map(complexity, block.closures))

    return {block.lineno: complexity(block) for block in cc_visit_ast(parsed(file)) if block.letter != "C"}


@cache
def imported(file: Path) -> frozenset[str]:
    """Every module that a file imports at any depth, inside functions and for types only too."""
    names: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            # `from package import module` needs the module; any other name needs the package.
            names |= inner if len(inner) == len(node.names) else {node.module, *inner}
    return frozenset(names)


def imports_between_files() -> dict[str, set[str]]:
    """What each file imports of quark, both as paths from `src/quark`."""
    return {
        relative(file): {relative(MODULES[name]) for name in imported(file) & MODULES.keys() if name != own}
        for own, file in MODULES.items()
    }


def imports_between_entries(folder: Path) -> dict[str, set[str]]:
    """What the files and folders that stand in a folder import of each other; `__init__.py` counts for its folder.

    The tables of public names count for none.
    """
    found: dict[str, set[str]] = {}
    here = f"{relative(folder)}/" if folder != SOURCE else ""
    for file, targets in imports_between_files().items():
        if not file.startswith(here) or file in FACES:
            continue
        entry = file.removeprefix(here).split("/")[0]
        seen = {target.removeprefix(here).split("/")[0] for target in targets if target.startswith(here)}
        found.setdefault(entry, set()).update(seen - {entry, "__init__.py"})
    found.pop("__init__.py", None)
    return found


def circles(imports: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The sets of names of which each imports every other, directly or through others of the set."""
    reached = {name: _reachable(name, imports) for name in imports}
    found = {frozenset(other for other in reach if name in reached[other]) for name, reach in reached.items()}
    return sorted((set(circle) for circle in found if circle), key=sorted)


def _reachable(start: str, imports: Mapping[str, Iterable[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(imports[name])
    return seen


def share_a_word(name: str, text: str) -> bool:
    """Words are the same where one starts as the other does, as `rotate` and `rotation`; `AdaRound` is adaround."""
    return name.replace("_", "") in text.lower().replace("_", "") or any(
        one == other or (min(len(one), len(other)) >= 4 and one[:4] == other[:4])
        for one in words(name)
        for other in words(text)
    )


def words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)}
