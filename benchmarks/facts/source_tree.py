"""The source of a server, read without importing it: its classes, what each builds, and which architecture is which.

vLLM and SGLang are read: folders of Python whose models are classes that build layers in their constructors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

MODELS = ("models", "attention")
"""Folders that hold models, and parts that models have in common and whose layers have names in a folder (SGLang's
indexer); what is elsewhere are layers themselves."""


@dataclass(frozen=True, eq=False)
class Source:
    """One class.

    Attributes:
        name: Of the class.
        file: That defines it.
        tree: Its definition.
    """

    name: str
    file: SourceFile
    tree: ast.ClassDef

    @cached_property
    def assigned(self) -> list[tuple[str, ast.expr]]:
        """(attribute, value) of each `self.attribute = value` in it."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        found.append((target.attr, node.value))
        return found

    @cached_property
    def bases(self) -> list[Source]:
        """The classes that it is one of, as far as they are in the folder."""
        return [found for base in self.tree.bases for found in self.file.classes_named(ast.unparse(base))]

    @cached_property
    def uses(self) -> list[Source]:
        """The classes that its text names."""
        names = dict.fromkeys(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        return [found for name in names if name != self.name for found in self.file.classes_named(name)]


@dataclass(eq=False)
class SourceFile:
    """One file.

    Attributes:
        tree: All files.
        path: Within the folder.
        body: What it says.
    """

    folder: SourceTree
    path: Path
    body: ast.Module
    classes: dict[str, Source] = field(default_factory=dict)
    resolved: dict[str, list[Source]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.body):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = Source(node.name, self, node)

    @cached_property
    def imports(self) -> dict[str, list[tuple[str, str]]]:
        """Name -> (module, name there), of each branch of an `if` that imports it."""
        found: dict[str, list[tuple[str, str]]] = {}
        package = self.path.parent.parts
        for node in ast.walk(self.body):
            if isinstance(node, ast.ImportFrom):
                above = (self.folder.package, *package[: len(package) - node.level + 1]) if node.level else ()
                module = ".".join([*above, *([node.module] if node.module else [])])
                for each in node.names:
                    found.setdefault(each.asname or each.name, []).append((module, each.name))
        return found

    def classes_named(self, name: str) -> list[Source]:
        """The classes of a name, defined here or imported."""
        if name in self.classes:
            return [self.classes[name]]
        if name not in self.resolved:
            self.resolved[name] = []  # of files that import each other, the end
            files = [(self.folder.file_of(module), there) for module, there in self.imports.get(name, [])]
            found = [each for file, there in files if file is not None for each in file.classes_named(there)]
            self.resolved[name] = list(dict.fromkeys(found))
        return self.resolved[name]


@dataclass(eq=False)
class SourceTree:
    """The Python files of a folder that is a package.

    Attributes:
        root: The folder, as `.../site-packages/vllm`.
    """

    root: Path
    files: dict[Path, SourceFile | None] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """Its name."""
        return self.root.name

    def read(self, path: Path) -> SourceFile | None:
        """A file, by its path within the folder; None where there is none."""
        if path not in self.files:
            there = self.root / path
            body = ast.parse(there.read_text(encoding="utf-8")) if there.is_file() else None
            self.files[path] = None if body is None else SourceFile(self, path, body)
        return self.files[path]

    def file_of(self, module: str) -> SourceFile | None:
        """The file of a module, by its full name."""
        first, *rest = module.split(".")
        if first != self.package or not set(MODELS).intersection(rest):
            return None
        path = Path(*rest)
        return self.read(path / "__init__.py") or (self.read(path.with_suffix(".py")) if rest else None)

    def at(self, path: str) -> Iterator[SourceFile]:
        """The file of a path within the folder, or all below it; none where there is nothing."""
        place = self.root / path
        for there in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            file = self.read(there.relative_to(self.root))
            if file is not None:
                yield file


def built_of(model: Source) -> list[Source]:
    """The classes that a model is built of, itself first."""
    found, waiting = {model: None}, [model]
    while waiting:
        each = waiting.pop()
        for other in (*each.bases, *each.uses):
            if other not in found:
                found[other] = None
                waiting.append(other)
    return list(found)
