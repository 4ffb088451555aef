"""Words of the field in names and texts, and no short function that a reader must jump to once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.source_tree import FILES, module, parsed, paths_of, relative

# Each has a word of the field: after, kept, compared, copy, equal, shown, candidate, and, large.
DENIED = [
    "alike", "aloud", "behind", "besides", "held", "judge", "judged", "judges", "judging", "lent", "loud", "rival",
    "rivals", "twin", "twins",
]  # fmt: skip

# Documented names that have one: file -> words.
DOCUMENTED = {"jobs/folders/bit_budget.py": ["alike"], "torch/bit_budget/measure.py": ["alike"]}

# Private functions of a few lines that could stand where they are called, and why each does not.
STAND_ALONE = {
    "torch/algorithms/input_group.py:_has_tiles": "tests put another processor in its place",
    "torch/model/blocks/streams.py:_Recorder.order.aside": "makes a function of its own for each block",
    "torch/model/blocks/streams.py:giving_stand_ins.aside": "makes a function of its own for each block",
    "torch/model/calibration_data/batches.py:_has_length": "says where it fails, which a statement cannot",
}

FEWEST_LINES = 6
FEW_PATHS = 10

_WORDS = "|".join(DENIED)
_DENIED = re.compile(
    rf"(?<![a-z])(?!held[-_]out)(?:{_WORDS})(?![a-z])|(?!Held[-_]out)(?:{_WORDS.title()})(?![a-z])|(?<![A-Z])(?!HELD_OUT)(?:{_WORDS.upper()})(?![A-Z])"
)
_HALF = re.compile(r'"""(?:(?:The same|As above|What|Whether)\b|As `).*')
"""A docstring that begins with another definition, or is half a sentence, which only the code finishes."""


def denied_words(text: str) -> list[tuple[int, str]]:
    """The lines of a text with the denied words in them: of names, whose parts are words, and of all else."""
    return [(n, word) for n, line in enumerate(text.splitlines(), 1) for word in _DENIED.findall(line)]


@dataclass(frozen=True)
class Place:
    """A definition, or a name that is read or imported."""

    file: Path
    node: ast.AST

    @cached_property
    def path(self) -> list[ast.AST]:
        """The nodes around it, from the module on."""
        path: list[ast.AST] = []
        outer = _outer(self.file).get(self.node)
        while outer is not None:
            path.insert(0, outer)
            outer = _outer(self.file).get(outer)
        return path

    @property
    def homes(self) -> list[ast.ClassDef | ast.FunctionDef]:
        """The classes and functions around it."""
        return [outer for outer in self.path if isinstance(outer, (ast.ClassDef, ast.FunctionDef))]

    def is_closure(self) -> bool:
        return bool(self.homes) and isinstance(self.homes[-1], ast.FunctionDef)

    def is_call(self) -> bool:
        return isinstance(self.path[-1], ast.Call) and self.path[-1].func is self.node

    def takes_statements(self) -> bool:
        """True where statements before the one with the call do what the call does, whenever it does."""
        for outer, inner in zip(self.path, (*self.path[1:], self.node), strict=True):
            each = isinstance(outer, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
            chosen = isinstance(outer, ast.IfExp) and inner is not outer.test
            later = isinstance(outer, ast.BoolOp) and inner is not outer.values[0]
            again = isinstance(outer, ast.While) and inner is outer.test
            if each or chosen or later or again or (isinstance(outer, ast.If) and outer.orelse == [inner]):
                return False
        return True

    def paths(self) -> int:
        """Paths through the outermost function around it, with those of all that is defined there."""
        functions = [home for home in self.homes if isinstance(home, ast.FunctionDef)]
        return paths_of(self.file).get(functions[0].lineno, 0) if functions else 0


@cache
def _outer(file: Path) -> dict[ast.AST, ast.AST]:
    """Node -> the one that it is a part of."""
    return {inner: node for node in ast.walk(parsed(file)) for inner in ast.iter_child_nodes(node)}


@cache
def _places() -> tuple[dict[str, list[Place]], dict[str, list[Place]], dict[str, set[str]]]:
    """Name -> definitions; name -> where it is read or imported; class -> names of its bases."""
    definitions: dict[str, list[Place]] = defaultdict(list)
    uses: dict[str, list[Place]] = defaultdict(list)
    bases: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef):
                definitions[node.name].append(Place(file, node))
            elif isinstance(node, ast.ClassDef):
                bases[node.name] |= {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
            elif isinstance(node, (ast.Name, ast.Attribute)):
                uses[node.id if isinstance(node, ast.Name) else node.attr].append(Place(file, node))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    uses[alias.name].append(Place(file, node))
    return definitions, uses, bases


def called_once() -> dict[str, str]:
    """Short private functions and closures that could stand where they are called: "file:function" -> file of the call.

    Those cannot that are handed on as values, or by decorators, generators, and methods that a class of the family
    defines again. Of several statements neither can those that are called for each entry of a comprehension, or only
    under a condition within an expression. Those need not where the caller would then have more than FEW_PATHS paths.
    """
    definitions, uses, _ = _places()
    found = {}
    for name, one in ((name, one) for name, several in definitions.items() for one in several):
        assert isinstance(one.node, ast.FunctionDef)
        if name.startswith("__") or not _is_short(one.node) or not (name.startswith("_") or one.is_closure()):
            continue
        places = [use for use in uses[name] if _may_mean(use, one, definitions[name])]
        if len(places) != 1 or not places[0].is_call() or one.node in places[0].path:
            continue
        paths = places[0].paths() + (0 if one.is_closure() else paths_of(one.file)[one.node.lineno]) - 1
        body = _body(one.node)
        is_expression = len(body) == 1 and isinstance(body[0], (ast.Return, ast.Expr))
        fits = paths <= FEW_PATHS and (is_expression or places[0].takes_statements())
        if fits and not _is_again(one, definitions[name]):
            names = ".".join(home.name for home in (*one.homes, one.node))
            found[f"{relative(one.file)}:{names}"] = relative(places[0].file)
    return found


def _body(node: ast.FunctionDef) -> list[ast.stmt]:
    return node.body[ast.get_docstring(node) is not None :]


def _is_short(node: ast.FunctionDef) -> bool:
    """True for a plain function of few lines without its docstring."""
    plain = all(getattr(d, "id", "") in ("staticmethod", "classmethod") for d in node.decorator_list)
    body = _body(node)
    if not plain or not body or any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node)):
        return False
    return (body[-1].end_lineno or 0) - body[0].lineno < FEWEST_LINES - 1


def _may_mean(use: Place, one: Place, several: list[Place]) -> bool:
    """True where a use of a name may be one of this definition, of several with that name."""
    home = one.homes[-1] if one.homes else None
    if isinstance(home, ast.FunctionDef):
        return home in use.path
    if isinstance(home, ast.ClassDef):
        alone = not any(each.homes for each in several if each is not one)
        return isinstance(use.node, ast.Attribute) and (use.file == one.file or alone)
    if isinstance(use.node, ast.ImportFrom):
        return use.node.module == module(one.file)
    return use.file == one.file and isinstance(use.node, ast.Name)


def _is_again(one: Place, several: list[Place]) -> bool:
    """True for a method that a class has again which has a base, of this package, in common with its own."""
    kinds = [each.homes[-1] for each in several if each is not one and each.homes]
    own = _family(one.homes[-1].name) if one.homes else set()
    return any(not own.isdisjoint(_family(kind.name)) for kind in kinds if isinstance(kind, ast.ClassDef))


def _family(kind: str) -> set[str]:
    """The name of a class and those of the classes that it comes from, of this package."""
    bases, found, waiting = _places()[2], set[str](), [kind]
    while waiting:
        name = waiting.pop()
        if name in bases and name not in found:
            found.add(name)
            waiting.extend(bases[name])
    return found


def test_denied_words_are_in_no_name_and_no_text() -> None:
    texts = {relative(file): file.read_text(encoding="utf-8") for file in FILES}
    found = {file: [*denied_words(file), *denied_words(text)] for file, text in texts.items()}
    found = {
        file: [(n, word) for n, word in lines if word not in DOCUMENTED.get(file, ())] for file, lines in found.items()
    }
    assert not any(found.values()), {file: lines for file, lines in found.items() if lines}


def test_a_short_function_that_is_called_once_stands_where_it_is_called() -> None:
    found = called_once()
    new = {name: call for name, call in found.items() if name not in STAND_ALONE}
    assert not new, new
    stale = sorted(STAND_ALONE.keys() - found.keys())
    assert not stale, f"no exceptions any longer: {stale}"


def test_a_docstring_is_understood_by_itself() -> None:
    texts = {relative(file): file.read_text(encoding="utf-8") for file in FILES}
    found = {file: lines for file, text in texts.items() if (lines := _HALF.findall(text))}
    assert not found, found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("lent_tokens", 1),
        ("_is_held", 1),
        ("BesidesIt", 1),
        ("JUDGED = 3", 1),
        ("held-out data, held_out, Held-out", 0),
        ("shelved, twinkle, talent, beside", 0),
    ],
)
def test_words_are_found_in_names_too(text: str, count: int) -> None:
    assert len(denied_words(text)) == count
