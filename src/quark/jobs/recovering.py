"""Recovery of an ONNX file: how far to go, as a request or an effort says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.errors import ConfigError
from quark.goals.efforts import BALANCED, FAST
from quark.jobs.request import FileRequest
from quark.onnx import ModelQuantizer
from quark.onnx.search.recovery.search import Recovery


@dataclass(frozen=True)
class Recovering:
    """How far to go; see `ModelQuantizer.recover`."""

    budget: str
    metric: str
    target: float | None
    quick: bool = False
    allow_wider: bool = False

    def run(
        self,
        quantizer: ModelQuantizer,
        model: Path,
        output: str,
        reader: Any,
        weights_alone: ModelQuantizer | None = None,
        without_samples: ModelQuantizer | None = None,
    ) -> tuple[str, Recovery]:
        """Write the best that is found; return what it is in words, and the search."""
        found = quantizer.recover(
            model, output, reader,
            budget=self.budget, metric=self.metric, target=self.target, quick=self.quick,
            allow_wider=self.allow_wider, weights_alone=weights_alone, without_samples=without_samples,
        )  # fmt: skip
        types = [f"{count} {name} {kind}" for (name, kind), count in sorted(found.types.items())]
        return ", ".join(types) or "no Q/DQ", found


QUICK = Recovering("60s", "sqnr", None, quick=True)
"""What a file gets for which no configuration is given: at most a minute."""


def recovery_of(effort: str, has_data: bool) -> Recovering | None:
    """What an effort of a goal means."""
    if not has_data or effort == FAST:
        return None
    return QUICK if effort == BALANCED else Recovering("10m", "sqnr", None)


def asked(request: FileRequest) -> Recovering | None:
    """What a request asks for; None without --recover. Raises ConfigError for an option that then says nothing."""
    if request.recover:
        budget, metric = request.budget or "10m", request.metric or "sqnr"
        return Recovering(budget, metric, request.reach, allow_wider=request.allow_wider)
    given = {"--budget": request.budget, "--metric": request.metric, "--reach": request.reach}
    for flag, value in (given | {"--allow-wider": request.allow_wider or None}).items():
        if value is not None:
            raise ConfigError(f"{flag} goes with --recover.")
    return None
