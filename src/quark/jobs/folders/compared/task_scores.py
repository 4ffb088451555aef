"""Scores of a float and a quantized model on a task, and the word or the function that says which."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.base.progress import progress
from quark.errors import ConfigError, did_you_mean, one_line
from quark.report.page import PageTable

if TYPE_CHECKING:
    from quark.torch.flows.parted import PartedModel

Pair = tuple["PartedModel", "PartedModel"]
LOSS, CHOICE, EXACT_MATCH, ACCURACY, MAP = METRICS = ("loss", "choice", "exact_match", "accuracy", "map")


@dataclass(frozen=True)
class TaskScores:
    """The scores of both models on a task.

    Attributes:
        over: What it was measured on, in words: "12 questions".
        scores: Name of a figure -> that of the float and of the quantized model.
        same: Share of the questions, or images, for which both give equal answers, right or wrong; None where that is
            not known.
    """

    over: str
    scores: Mapping[str, tuple[float, float]]
    same: float | None = None

    def table(self) -> PageTable:
        """The figures of both models, and their difference."""
        same = "" if self.same is None else f"; equal answers of both {self.same:.2%}"
        rows = [
            (name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
            for name, (before, after) in self.scores.items()
        ]
        return PageTable(("metric", "float", "quantized", "difference"), rows, f"Task: {self.over}{same}")


Task = Callable[[Pair, Sequence[Any]], TaskScores]
"""Takes both models, and the batches that their outputs were compared on."""


def outputs_of_both(models: Pair, batches: Sequence[Any], words: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The number of each batch, and the outputs by name of both models, in memory or block by block.

    Raises CalibrationError for a batch that they do not take.
    """
    from quark.torch.flows.parted import parts_of  # imports torch: after --help
    from quark.torch.model.batches import named_outputs

    blocks = models[0].find_blocks(batches[0], ())
    visits = ((part, index) for part in parts_of(models, batches, blocks) for index in range(len(batches)))
    for part, index in progress(visits, words, total=(1 + len(blocks)) * len(batches)):
        made = part.run(index, batches[index])
        if part.block is None:
            yield index, [dict(named_outputs(output)) for output in made]


def check_metric(metric: str | None) -> None:
    """Raise ConfigError for a metric that is neither a word nor MODULE:FUNCTION, before models are read."""
    if metric is not None and metric not in METRICS and ":" not in metric:
        raise ConfigError(f"--metric {metric!r} is unknown, and no MODULE:FUNCTION. {did_you_mean(metric, METRICS)}")


def own_metric(metric: str) -> Callable[[Any, Any], float]:
    """The function MODULE:FUNCTION of a user, in a file of the current folder, whose code runs.

    Args:
        metric: "my_metrics:score" of my_metrics.py; "tools.scores:f1" of tools/scores.py.

    Raises:
        ConfigError: There is no such file or function, or its code fails; of what is returned: when it is called.
    """
    module, _, name = metric.partition(":")
    file = Path.cwd() / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        raise ConfigError(f"--metric {metric}: there is no {file}. Possible: a file in the current folder.")
    logger.info("--metric %s: the code of %s runs.", metric, file)
    spec = importlib.util.spec_from_file_location(f"quark_metric_{module}", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # where its dataclasses look for it
    with _code_of_user(metric):
        spec.loader.exec_module(loaded)
    function = getattr(loaded, name, None)
    if not callable(function):
        there = [each for each, value in vars(loaded).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(
            f"--metric {metric}: {file} has no function {name!r}. Possible: {', '.join(there) or 'none'}."
        )

    def score(model: Any, samples: Any) -> float:
        with _code_of_user(metric):
            found = function(model, samples)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise ConfigError(f"--metric {metric} gives {found!r:.60}, and a number is needed.") from None

    return score


@contextmanager
def _code_of_user(metric: str) -> Iterator[None]:
    """Within: code imports from the current folder, and what it raises becomes a ConfigError."""
    sys.path.insert(0, folder := str(Path.cwd()))
    try:
        yield
    except Exception as error:
        raise ConfigError(f"--metric {metric} raises {type(error).__name__}: {one_line(error)}") from error
    finally:
        sys.path.remove(folder)
