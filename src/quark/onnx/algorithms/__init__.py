"""The algorithms by the class of their config. A new one is a file here and a line below.

DATA: refuse data that cannot serve, before any work is done. BEFORE: change the float model, before it is decided what
is quantized. AFTER: change float weights and biases once all scales are known. BEFORE and AFTER return how many places
they changed; each list runs in the order that the config has. An algorithm may be in several lists. What searches for
settings is in `search/settle.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingQualifiesError
from quark.onnx.algorithms.quantized_layers import QuantizedLayers
from quark.onnx.algorithms.rescaling.bias_correction import add_biases, check_examples, correct_biases
from quark.onnx.algorithms.rescaling.cle import equalize
from quark.onnx.algorithms.rescaling.quarot import rotate
from quark.onnx.algorithms.rescaling.smooth_quant import smooth
from quark.onnx.algorithms.rounding.fast_finetune import finetune_layers
from quark.onnx.algorithms.rounding.gptq import solve_weights
from quark.onnx.algorithms.rounding.worst_layers import WorstLayers, improve_worst
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    BiasCorrectionConfig,
    CLEConfig,
    GPTQConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.config.settings import Settings

DATA: dict[type[Any], Callable[[ir.Model, Any, Settings, Samples], None]] = {BiasCorrectionConfig: check_examples}
BEFORE: dict[type[Any], Callable[[ir.Model, Any, Settings, Samples | None], int]] = {
    CLEConfig: equalize,
    SmoothQuantConfig: smooth,
    QuarotConfig: rotate,
    BiasCorrectionConfig: add_biases,
}
AFTER: dict[type[Any], Callable[[QuantizedLayers, Any], int]] = {
    GPTQConfig: solve_weights,
    AdaRoundConfig: finetune_layers,
    AdaQuantConfig: finetune_layers,
    BiasCorrectionConfig: correct_biases,
    WorstLayers: improve_worst,
}


def check_data(model: ir.Model, settings: Settings, data: Samples) -> None:
    """Raise CalibrationError for data that an algorithm could not use."""
    for algorithm in settings.algorithms:
        if type(algorithm) in DATA:
            DATA[type(algorithm)](model, algorithm, settings, data)


def run_before(model: ir.Model, settings: Settings, data: Samples | None) -> int:
    """Run those that change the float model; return how many places changed.

    Raises:
        NothingQualifiesError: One finds nothing to do, and the settings do not allow that.
    """
    # Not asked for by name, and decided upon by now: no word where nothing qualifies, as in a body.
    changed = equalize(model, settings.equalization, settings) if isinstance(settings.equalization, CLEConfig) else 0
    for algorithm in settings.algorithms:
        if type(algorithm) in BEFORE:
            count = BEFORE[type(algorithm)](model, algorithm, settings, data)
            # One that also runs afterwards is compared then.
            changed += count if type(algorithm) in AFTER else _counted(algorithm, count, settings)
    return changed


def run_after(quantized: QuantizedLayers) -> None:
    """Run those that change weights under fixed scales. Raises NothingQualifiesError."""
    for algorithm in quantized.decision.settings.algorithms:
        if type(algorithm) in AFTER:
            _counted(algorithm, AFTER[type(algorithm)](quantized, algorithm), quantized.decision.settings)


def _counted(algorithm: Any, count: int, settings: Settings) -> int:
    """The count, logged. One of 0 is a warning: presets and scripts name algorithms for many models at once."""
    name = type(algorithm).__name__
    if count:
        logger.info("%s: %d places.", name, count)
    elif settings.allow_noop:
        logger.warning("%s: nothing in this model qualifies; the model is what it is without.", name)
    else:
        raise NothingQualifiesError(
            f"{name}: nothing in this model qualifies. Possible: leave it out, or AllowNoop=True (--allow-noop on the "
            "command line)."
        )
    return count
    return count
