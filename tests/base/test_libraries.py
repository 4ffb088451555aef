"""What is private or young of other libraries is asked in one file for each of them, and is there."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from quark.base.libraries import LIBRARIES, Name, is_there, transformers
from quark.base.libraries.installed_packages import is_transformers_version_lower
from quark.errors import MissingDependencyError, NotSupportedError
from tests.source_tree import FILES, parsed, relative

HOMES = "base/libraries/"
ROWS = [(home.__name__.rpartition(".")[2], name) for home in LIBRARIES for name in home.NAMES]
ELSEWHERE = {
    "compat/of_diffusers.py": "adds quark to the tables of diffusers while that is read",
    "torch/checkpoint/hooks/of_diffusers.py": "derives a class from one of diffusers",
    "torch/flows/on_load/of_diffusers.py": "derives a class from one of diffusers",
    "torch/flows/on_load/of_transformers.py": "derives classes from those of transformers, and speaks of their tables",
    "torch/llm/chat_worker.py": "is a script that must not import quark, which would take memory that it bounds",
    "torch/writers/config_files.py": "knows `_name_or_path` as a field of config.json",
}
"""Files that take such names themselves, each with its reason."""


def row_id(value: object) -> str:
    return value.name if isinstance(value, Name) else str(value)


def is_younger(library: str, name: Name) -> bool:
    """Whether the installed version is older than the name."""
    numbers = [[int(x) for x in re.findall(r"\d+", text)[:3]] for text in (version(library), name.since or "0")]
    return numbers[0] < numbers[1]


@pytest.mark.parametrize(("library", "name"), ROWS, ids=row_id)
def test_a_name_is_there_from_the_version_on_that_is_said(library: str, name: Name) -> None:
    pytest.importorskip(library)
    if is_younger(library, name):
        pytest.skip(f"{library} {version(library)} is older: {name.before}")
    assert is_there(library, name)


def test_a_name_that_is_not_there_is_found_missing() -> None:
    assert not is_there("transformers", Name("core_model_loading", "NoSuchName", "nothing"))
    assert not is_there("transformers", Name("no_such.module", "Name", "nothing"))


def test_the_oldest_version_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"transformers>={transformers.OLDEST}"' in text


def test_an_older_version_is_refused_with_the_oldest_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "is_transformers_version_lower", lambda bound: bound == transformers.OLDEST)
    with pytest.raises(MissingDependencyError, match=rf"needs {transformers.OLDEST} or newer: pip install"):
        transformers.import_transformers()
    assert not is_transformers_version_lower(transformers.OLDEST)


def test_a_tokenizer_that_an_old_version_would_guess_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").touch()
    for old in (True, False):
        monkeypatch.setattr(transformers, "is_transformers_version_lower", lambda _, old=old: old)
        if old:
            with pytest.raises(NotSupportedError, match=r"no tokenizer_config\.json.*transformers 5\.6 or newer"):
                transformers.require_readable_tokenizer(tmp_path)
        else:
            transformers.require_readable_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").touch()
    monkeypatch.setattr(transformers, "is_transformers_version_lower", lambda _: True)
    transformers.require_readable_tokenizer(tmp_path)


@pytest.mark.parametrize("home", LIBRARIES, ids=lambda home: home.__name__.rpartition(".")[2])
def test_no_other_file_takes_such_names(home: ModuleType) -> None:
    """Imports of modules inside a library, modules looked up by name, and attributes that its file lists."""
    library = home.__name__.rpartition(".")[2]
    private = {row.name.rpartition(".")[2] for row in home.NAMES if row.name.rpartition(".")[2].startswith("_")}
    wrong = []
    for file in FILES:
        where = relative(file)
        if where.startswith(HOMES) or where in ELSEWHERE:
            continue
        for node in ast.walk(parsed(file)):
            inside = (
                (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{library}."))
                or (isinstance(node, ast.Import) and any(x.name.startswith(f"{library}.") for x in node.names))
                or (isinstance(node, ast.Constant) and re.fullmatch(rf"{library}(\.\w+)+", str(node.value)))
                or (isinstance(node, ast.Attribute) and node.attr in private)
                or (isinstance(node, ast.Constant) and node.value in private)
            )
            if inside:
                wrong.append(f"{where}:{getattr(node, 'lineno', 0)}")
    assert not wrong, wrong
