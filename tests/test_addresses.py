"""An address shows what its homes list in `__all__`, and nothing else."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.source_tree import FILES, parsed, relative
from tests.test_architecture import is_address

ADDRESSES = [file for file in FILES if is_address(file)]
NOT_DOCUMENTED = {
    "UnknownAlgoConfig": "what a checkpoint records of an algorithm that this version does not know",
    "Row": "a row of the table of presets",
    "QRow": "a row of the table of presets",
}


def loaded(file: Path) -> ModuleType:
    return importlib.import_module(
        "quark." + relative(file.with_suffix("")).replace("/", ".").removesuffix(".__init__")
    )


def homes(address: Path) -> list[ModuleType]:
    """The modules of which an address is a star import."""
    imports = [node for node in parsed(address).body if isinstance(node, ast.ImportFrom)]
    return [importlib.import_module(str(node.module)) for node in imports if node.names[0].name == "*"]


def named(address: Path) -> set[str]:
    """The names that an address imports one by one."""
    imports = [node for node in parsed(address).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names} - {"*", "annotations"}


def visible(module: ModuleType) -> set[str]:
    """The public names of a module that are no modules themselves."""
    return {
        name for name, value in vars(module).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }


@pytest.mark.parametrize("address", ADDRESSES, ids=relative)
def test_an_address_shows_what_its_homes_list(address: Path) -> None:
    module, listed = loaded(address), named(address)
    for home in homes(address):
        # An address of an address has no list of its own: it shows what the other shows.
        of_home = set(getattr(home, "__all__", visible(home)))
        hidden = [name for name in of_home if getattr(module, name) is not getattr(home, name)]
        assert not hidden, f"{hidden} of {home.__name__} come from another home"
        listed |= of_home
    assert visible(module) == {name for name in listed if not name.startswith("_")}


def test_a_home_lists_every_public_class() -> None:
    for home in {home for address in ADDRESSES for home in homes(address) if hasattr(home, "__all__")}:
        own = {name for name in visible(home) if getattr(getattr(home, name), "__module__", None) == home.__name__}
        classes = {name for name in own if isinstance(getattr(home, name), type)}
        assert classes - NOT_DOCUMENTED.keys() <= set(home.__all__), home.__name__
