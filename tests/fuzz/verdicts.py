"""The verdict on a case: from how its processes ended, and from what is on the disk before and after."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.child import Ending, Limits, in_child

CLEAR, RIGHT = "clear", "right"
VERDICTS = (CLEAR, RIGHT, "foreign", "hang", "crash", "wrong", "memory", "connected")
"""Only the first two are as promised."""

LOGS = "logs"
MOST_TIMES, MOST_MORE = 3, 500 << 20
"""Memory that a case may take: so many times its input, and so many bytes more."""


@dataclass(frozen=True)
class Verdict:
    """One of VERDICTS, and why."""

    name: str
    why: str = ""

    @property
    def good(self) -> bool:
        return self.name in (CLEAR, RIGHT)


Bound = Callable[[], float]


def verdict(case: Case, place: Place, limits: Limits, bound: Bound) -> Verdict:
    """Run a case and judge it.

    Args:
        case: What to run.
        place: Where it is.
        limits: Of each of its processes.
        bound: Of the SQNR, in dB, before the margin of the case; asked for where it counts.
    """
    before = snapshot([place.folder, place.bases.folder])
    ending = in_child(case.work, place.folder / LOGS / "work", limits, case.user)
    changed = changes(before, snapshot([place.folder, place.bases.folder]))
    if ending.connected:
        return Verdict("connected", ending.connected)
    if ending.grown > MOST_TIMES * _size(place.inputs) + MOST_MORE:
        return Verdict("memory", f"{ending.grown >> 20} MB, of an input of {_size(place.inputs) >> 20} MB")
    if ending.how == "refused" and case.sound:
        return Verdict("wrong", f"sound, and refused: {ending.text}")
    if ending.how == "refused":
        if changed:
            return Verdict("wrong", f"refused, and yet on the disk: {changed[0]}")
        return Verdict(CLEAR, ending.text) if "\n" not in ending.text else Verdict("foreign", f"lines: {ending.text!r}")
    if ending.how != "returned":
        return Verdict(ending.how, _shown(ending))
    beside = [line for line in changed if not any(_within(line, output) for output in case.outputs)]
    if beside:
        return Verdict("wrong", f"outside of the output: {beside[0]}")
    return _judged(case, in_child(case.judge, place.folder / LOGS / "judge", limits), bound)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _judged(case: Case, judged: Ending, bound: Bound) -> Verdict:
    if judged.how != "returned":
        how = "" if judged.how == "wrong" else f"the judge ended by {judged.how}: "
        return Verdict("wrong", how + _shown(judged))
    if case.margin is not None:
        least = bound() - case.margin
        if not judged.value >= least:  # NaN is below every bound
            return Verdict("wrong", f"{judged.value:.1f} dB, where {least:.1f} are the least")
    return Verdict(RIGHT)


def _shown(ending: Ending) -> str:
    """A traceback as its last line and the last place in quark."""
    lines = [line.strip() for line in ending.text.strip().splitlines()]
    if len(lines) < 2 or "Traceback" not in ending.text:
        return " ".join(lines)
    ours = [line for line in lines if line.startswith("File") and "/quark/" in line]
    where = ours[-1].split("/quark/", 1)[1].replace('", line ', ":").split(",")[0] if ours else "no file of quark"
    message = next((line for line in reversed(lines) if line and not line.startswith(("^", "~"))), "")
    return f"{message[:300]} ({where})"


def snapshot(folders: Iterable[Path]) -> dict[Path, Any]:
    """Of everything in the folders, what changes when it is written or replaced; links are not followed."""
    found: dict[Path, Any] = {}
    pending = list(folders)
    while pending:
        for path in pending.pop().iterdir():
            if path.name == LOGS:
                continue
            state = path.lstat()
            folder = stat.S_ISDIR(state.st_mode)
            # A folder's own times and size change with its entries, which are listed.
            times = () if folder else (state.st_size, state.st_mtime_ns)
            found[path] = (state.st_mode, state.st_ino, state.st_rdev, times)
            if folder:
                pending.append(path)
    return found


def changes(before: dict[Path, Any], after: dict[Path, Any]) -> list[str]:
    """A line for each path that appeared, vanished or changed, sorted."""
    paths = sorted({*before, *after})
    words = {(False, True): "made", (True, False): "removed", (True, True): "changed"}
    return [f"{path} {words[path in before, path in after]}" for path in paths if before.get(path) != after.get(path)]


def _within(line: str, output: Path) -> bool:
    path = Path(line.rsplit(" ", 1)[0])
    return path == output or output in path.parents
