"""The history of a search: what was tried, with what score, in which time; a file from which a search goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from quark.base.files import atomic_file, digest_of
from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.errors import ConfigError, FormatError

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str | float) -> float:
    """Seconds of "90s", "10m" or "1h", or of a number. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip()) if isinstance(text, str) else None
    seconds = float(found[1]) * SECONDS[found[2]] if found else text
    if isinstance(seconds, (str, bool)) or not seconds > 0:
        raise ConfigError(f"The budget {text!r} is no time. Possible: a number with its unit, as in 90s, 10m or 1h.")
    return float(seconds)


@dataclass(frozen=True)
class TimeBudget:
    """The time that a search has.

    Attributes:
        clock: What tells the time, in seconds.
        end: When it is over; inf for as long as it takes.
    """

    clock: Callable[[], float]
    end: float = math.inf

    @classmethod
    def of(cls, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> TimeBudget:
        """Some seconds from now on, or None for as long as it takes."""
        return cls(clock, math.inf if seconds is None else clock() + seconds)

    def left(self, kept: float = 0.0) -> float:
        """Seconds, without those that are kept for something else; below 0 after the end."""
        return self.end - kept - self.clock()

    @property
    def shown(self) -> float | None:
        """Seconds that are left, at least 0; None without an end."""
        return None if math.isinf(self.end) else max(0.0, self.left())


@dataclass(frozen=True)
class Trial:
    """A record in the log of a search.

    Attributes:
        step: Name of the step; the text of a choice.
        before: The metric of the best model before it; None of the first trial, which is the plain config, and where
            each choice is made by itself.
        after: The metric with it; None where there was no model to measure.
        seconds: Of quantizing and measuring, where these are measured.
        result: "kept", "no gain", or why it came to nothing.
        choice: The parameters, where a search chooses among such.
    """

    step: str
    before: float | None
    after: float | None
    seconds: float = 0.0
    result: str = "kept"
    choice: Mapping[str, Any] = field(default_factory=dict)


def text_of(config: Mapping[str, Any]) -> str:
    """A config as text: equal for equal ones, whatever the order of their names."""
    return json.dumps(config, default=repr, sort_keys=True)


def identity_of(model: str | os.PathLike[str] | onnx.ModelProto, *others: Any) -> str:
    """A hash of the model and of `others`, on which scores depend in addition to the config."""
    own = (
        hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
        if isinstance(model, onnx.ModelProto)
        else digest_of(Path(model))
    )
    return hashlib.sha256(repr((own, *others)).encode()).hexdigest()


class History:
    """The trials of one study.

    Args:
        path: The file; None keeps them in memory only.
        study: Name of the study.
        identity: See `identity_of`.
        resume: Whether to go on with the trials that the file has.

    Attributes:
        trials: Choices with their scores, of which less is better; inf for one that failed.

    Raises:
        ConfigError: The file has trials of another model, metric or study.
        FormatError: It is no file of trials.
    """

    def __init__(self, path: Path | None = None, study: str = "", identity: str = "", resume: bool = False) -> None:
        self._path, self._head = path, {"study": study, "identity": identity}
        self.trials: list[Trial] = []
        if path is None or not resume or not path.exists():
            return
        try:
            content = plain_json(path.read_text("utf-8"))
            head = {name: content[name] for name in self._head}
            trials = [_of_choice(dict(trial["params"]), float(trial["score"])) for trial in content["trials"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{path} is no file of trials: {error!r}.") from None
        if head != self._head:
            raise ConfigError(
                f"{path} has trials of another model, data, metric or study. Possible: another output_dir, or "
                "load_study_if_exists=False."
            )
        self.trials = trials
        logger.info("Search: %d trials of %s count.", len(trials), path)

    def score_of(self, config: Mapping[str, Any]) -> float | None:
        """The score of a config that was tried; None for another."""
        wanted = text_of(config)
        return next((trial.after for trial in self.trials if trial.step == wanted), None)

    def add(self, config: dict[str, Any], score: float) -> None:
        """Note a trial, and write the file anew, whole or not at all."""
        self.trials.append(_of_choice(config, score))
        if self._path is None:
            return
        trials = [{"params": trial.choice, "score": trial.after} for trial in self.trials]
        with atomic_file(self._path) as temporary:
            temporary.write_text(json.dumps({**self._head, "trials": trials}, default=repr, indent=1), "utf-8")


def _of_choice(config: Mapping[str, Any], score: float) -> Trial:
    return Trial(text_of(config), None, score, choice=config)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Log lines go to a file too, at its end."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
