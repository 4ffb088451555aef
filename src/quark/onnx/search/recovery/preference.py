"""preference: which of two files is written, one made without samples and one made with them.

    between     the one without samples, where it is more exact, at most WON slower and at most MORE larger
    speed       the faster; of two that are as fast, the more exact
    accuracy    the more exact
    size        the smaller; of two that are as small, as `between` says

For none of them a file wins with which the task suffers, if it does not suffer with the other (`alternative.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quark.errors import ConfigError, did_you_mean
from quark.onnx.search.latency.whole_file import TOLERANCE

WON, MORE = 0.15, 0.02
"""Share of the time that static integers have to win, and of the bytes.

A file whose integers are 0.07 to 0.1 faster here is 0 to 0.02 faster by another clock, on other samples."""


@dataclass(frozen=True)
class Costs:
    """A file that is made without samples beside one that is made with them.

    Attributes:
        more_exact: Whether the one without is the more exact.
        time: Time of the one with samples over that of the one without.
        bytes: Bytes of the one without samples over those of the one with.
    """

    more_exact: bool
    time: float
    bytes: float


def _between(costs: Costs) -> bool:
    return costs.more_exact and costs.time * (1 + WON) >= 1 and costs.bytes <= 1 + MORE


def _fast(costs: Costs) -> bool:
    return costs.time > 1 + TOLERANCE or (costs.more_exact and costs.time >= 1 - TOLERANCE)


def _small(costs: Costs) -> bool:
    return costs.bytes < 1 - MORE or (costs.bytes <= 1 + MORE and _between(costs))


BETWEEN, SPEED, ACCURACY, SIZE = "between", "speed", "accuracy", "size"
PREFERENCES: dict[str, Callable[[Costs], bool]] = {
    BETWEEN: _between,
    SPEED: _fast,
    ACCURACY: lambda costs: costs.more_exact,
    SIZE: _small,
}
"""Name -> whether the file that is made without samples is written."""


def choice_text(costs: Costs, name: str, all_of_them: bool) -> str:
    """Say which file a preference takes, and, if that is asked for, what the others would take."""
    taken = {each: "without" if wins(costs) else "with" for each, wins in PREFERENCES.items()}
    others = "; ".join(f"--prefer {each}: {word}" for each, word in taken.items() if each != name)
    return f"the file {taken[name]} samples is taken" + (f" ({others})" if all_of_them else "")


def check_preference(name: str) -> None:
    """Raise ConfigError for an unknown name."""
    if name not in PREFERENCES:
        raise ConfigError(f"There is no preference {name!r}. {did_you_mean(name, PREFERENCES)}")


def bound_of(name: str) -> float:
    """The time of a file with samples over that of one without, from which on a preference takes the latter."""
    return 1.0 if name == SPEED else 1 / (1 + WON)
