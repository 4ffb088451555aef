"""Which of the private and young names that quark takes of other libraries the installed versions have."""

from __future__ import annotations

from benchmarks.facts.checks import installed
from quark.base.libraries import LIBRARIES, is_there


def print_libraries() -> int:
    """Print a line for each name; the exit code is 1 where one is absent that nothing is said to be done without."""
    absent = 0
    for home in LIBRARIES:
        library = home.__name__.rpartition(".")[2]
        there = installed(library)
        print(f"{library} {there or 'is not installed'}")
        for name in home.NAMES if there else ():
            found = is_there(library, name)
            absent += not found and not name.before
            young = f" (from {name.since} on; before: {name.before})" if name.since else ""
            print(f"  {'there ' if found else 'ABSENT'}  {name.module}: {name.name}, for {name.use}{young}")
    return int(absent > 0)
