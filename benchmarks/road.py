"""How far a command travels through the package until it begins to write, and what it asks for more than once.

    python -m benchmarks.road quantize examples/models/language_model --for vllm -o OUT
    python -m benchmarks.road plan examples/models/language_model --scheme mxfp4

A reader of the code goes the same way: each function where it is entered first, from one file to the next. A line says
how many functions and files there are up to the first tensor that is written, how often the way comes back to a file
that it had left, and how many functions of the package lie above each other there. A second line counts, in the whole
run, what is to be done once: how often config.json of the folder is opened, the class of its model is built, names are
mapped, and a plan is made. The last says the CPU seconds of the command, as its own process, without this counting.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

WRITES = ("write_tensor", "write_gguf")
"""Functions with which writing begins."""
ONCE = ("build_skeleton", "dropped_names", "load_config", "make_plan", "read_config", "source_names")
"""Functions that read a folder, build its model, map its names and make its plan."""


class Road:
    """The functions of a package in the order in which they are entered first.

    Args:
        root: The folder of the package.
        model: The folder that a command reads.
    """

    def __init__(self, root: Path, model: Path) -> None:
        self._root, self._config = f"{root}{os.sep}", (model / "config.json").absolute()
        self.functions: dict[tuple[str, str], None] = {}
        self.times: Counter[str] = Counter()
        self.depth: int | None = None

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        """Take down a call, as `sys.setprofile` gives it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root) or code.co_name.startswith("<"):
            return
        if code.co_name in ONCE:
            self.times[code.co_name] += 1
        if self.depth is None:
            self.functions.setdefault((code.co_filename, code.co_qualname))
            if code.co_name in WRITES:
                self.depth = self._above(frame)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take down a file that is opened, as `sys.addaudithook` gives it."""
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            self.times["config.json opened"] += Path(arguments[0]).absolute() == self._config

    def _above(self, frame: FrameType | None) -> int:
        found = 0
        while frame is not None:
            found += frame.f_code.co_filename.startswith(self._root)
            frame = frame.f_back
        return found

    @property
    def files(self) -> list[str]:
        """The files in the order of the way: one that is come back to is there again."""
        entered = [file for file, _ in self.functions]
        return [*entered[:1], *(after for before, after in pairwise(entered) if before != after)]


def returns(files: Iterable[str]) -> int:
    """How often a way comes back to where it was before."""
    way = list(files)
    return len(way) - len(set(way))


def main(words: list[str]) -> None:
    """Run a command of `quark`, and print its way."""
    import quark
    from quark.cli import program

    model = next((Path(word) for word in words[1:] if Path(word).is_dir()), Path())
    road = Road(Path(quark.__file__).parent, model)
    sys.addaudithook(road.audit)
    sys.argv = ["quark", *words]
    sys.setprofile(road.enter)
    try:
        program()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.setprofile(None)
    files = road.files
    depth = "nothing was written" if road.depth is None else f"stack {road.depth}"
    print(f"functions {len(road.functions)}, files {len(set(files))}, returns {returns(files)}, {depth}")
    print(", ".join(f"{name} {count}" for name, count in sorted(road.times.items())))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    force = [] if road.depth is None else ["--force"]
    subprocess.run([sys.executable, "-m", "quark", *words, *force], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"CPU seconds {spent:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
