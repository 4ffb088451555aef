"""A name of another library that its documentation does not promise, and whether an installed version has it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Name:
    """A name that is private, or younger than the oldest version that quark takes.

    Attributes:
        module: The module inside the library.
        name: What is taken from it: a name of the module, or an attribute of its classes or objects.
        use: Its purpose here.
        since: The first version that has it; empty: all that quark takes.
        before: What is done with older versions.
    """

    module: str
    name: str
    use: str
    since: str = ""
    before: str = ""

    def __post_init__(self) -> None:
        assert bool(self.since) == bool(self.before), f"{self.name}: since a version, and what is done before it"


def is_there(library: str, name: Name) -> bool:
    """Tell if the installed version of a library has a name: in its module, or written in the text of that.

    An attribute that only objects have can be found in the text alone.
    """
    path = f"{library}.{name.module}"
    try:
        spec = find_spec(path)
    except ImportError:  # of the package around it
        return False
    if spec is None or spec.origin is None:
        return False
    found: object = importlib.import_module(path)
    for part in name.name.split("."):
        found = getattr(found, part, None)
    return found is not None or name.name.rpartition(".")[2] in Path(spec.origin).read_text(encoding="utf-8")
