"""A case: a damaged input, what is done with it, and what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.fuzz.bases import Bases

Random = np.random.Generator
MARGIN = 10.0
"""dB that a result may lie below what plain rounding leaves of the undamaged model: twice the step costs 6."""


class WrongError(Exception):
    """What an oracle finds in a result that was accepted."""


def nothing_to_compare() -> float:
    """A judge of what has no result: that it was accepted is all there is to say."""
    return math.inf


@dataclass(frozen=True)
class Case:
    """What is run, and how its result is judged; each in a process of its own.

    Attributes:
        said: What was damaged, and the command.
        work: Runs quark. Raises QuarkError to refuse.
        judge: Called where `work` ended well. Gives the SQNR of the result against the source in dB; raises WrongError.
        outputs: Paths that `work` may make or replace.
        margin: dB that the SQNR may lie below the bound; None where damaged values may cost anything.
        like: Names the bound that this case shares with others.
        bound: SQNR in dB that others leave of the undamaged input, of `tests.fuzz.bounds`; None for 0 dB.
        sound: Whether nothing was damaged, so that refusing is wrong.
        user: Whether `work` runs as a user without rights, where this process has all of them.
    """

    said: str
    work: Callable[[], None]
    judge: Callable[[], float] = nothing_to_compare
    outputs: tuple[Path, ...] = ()
    margin: float | None = MARGIN
    like: str = ""
    bound: Callable[[], float] | None = None
    sound: bool = False
    user: bool = False


@dataclass(frozen=True)
class Place:
    """Folders of a case: `inputs` are made by it, `outputs` by quark."""

    folder: Path
    bases: Bases
    marker: Path = field(init=False)
    """What hostile content writes when it is run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "marker", self.folder / "marker")
        for folder in (self.inputs, self.outputs):
            folder.mkdir(parents=True)

    @property
    def inputs(self) -> Path:
        return self.folder / "in"

    @property
    def outputs(self) -> Path:
        return self.folder / "out"


SOUND = 0.05
"""Share of cases in which nothing is damaged."""

Make = Callable[[Random, Place], Case]
"""A kind of cases."""


def pick(random: Random, options: Any) -> Any:
    """One of a sequence, as it is: numpy's `choice` would turn it into an array."""
    return list(options)[int(random.integers(len(options)))]
