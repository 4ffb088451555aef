"""The algorithms by the class of their config. A new one is a file here and a line below.

Each takes the float model after its passes, changes it, and returns how many places it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quark.errors import ConfigError, NotSupportedError
from quark.log import logger
from quark.onnx.algo_configs import CLEConfig
from quark.onnx.algorithms.cle import equalize
from quark.onnx.settings import Settings

if TYPE_CHECKING:
    import onnx_ir as ir

ALGORITHMS: dict[type[Any], Callable[[ir.Model, Any, Settings], int]] = {CLEConfig: equalize}


def check_algorithms(algorithms: Sequence[Any]) -> None:
    """Raise NotSupportedError for algorithms that this version does not have, before any work is done."""
    missing = [type(algorithm).__name__ for algorithm in algorithms if type(algorithm) not in ALGORITHMS]
    if missing:
        possible = ", ".join(kind.__name__ for kind in ALGORITHMS)
        raise NotSupportedError(f"{', '.join(missing)}: not part of this version. Possible: {possible}.")


def run_algorithms(model: ir.Model, settings: Settings) -> int:
    """Run those of the settings in their order; return how many places changed.

    Raises:
        ConfigError: One finds nothing to do.
    """
    total = 0
    for algorithm in settings.algorithms:
        count = ALGORITHMS[type(algorithm)](model, algorithm, settings)
        if count == 0:
            raise ConfigError(f"{type(algorithm).__name__}: nothing in this model qualifies. Leave it out.")
        logger.info("%s: %d places.", type(algorithm).__name__, count)
        total += count
    return total


__all__ = ["ALGORITHMS", "check_algorithms", "run_algorithms"]
