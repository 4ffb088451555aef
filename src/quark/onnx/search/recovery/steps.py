"""What recovery tries, in this order. A new step is a row of STEPS."""

from __future__ import annotations

from dataclasses import dataclass

from quark.onnx.config.algo_configs import (
    AdaQuantConfig,
    AdaRoundConfig,
    BiasCorrectionConfig,
    CLEConfig,
    QuarotConfig,
    SmoothQuantConfig,
)
from quark.onnx.search.noise.float_nodes import FloatNodes
from quark.onnx.search.noise.tensor_ranges import TensorRanges
from quark.onnx.search.recovery.changes import (
    Change,
    again,
    algorithm,
    floating,
    raise_all_bits,
    raise_bits,
    ranges,
    solve_few_bits,
    tensor_ranges,
    tuning,
    with_plain_ranges,
)


@dataclass(frozen=True)
class Step:
    """One thing to try.

    Attributes:
        name: What the table calls it.
        change: What it does to the settings.
        like: Name of the step before that tells what this one costs; "" for none.
        factor: How many times the work of that one.
        last_resort: Whether time is kept for it, where there is a target.
        wider: Whether it gives a model of more bits than the config asks for.
        follows: Name of a step before, without whose gain there is no hope in this one; "" for none. Where there is a
            target, all is tried.
        least: That gain, in dB of noise; below 0 what it may have lost.
    """

    name: str
    change: Change
    like: str = ""
    factor: float = 1
    last_resort: bool = False
    wider: bool = False
    follows: str = ""
    least: float = 0.0


RANGES = {
    "MinMax": ranges("min_max"),
    "MinMSE": ranges("mse"),
    "Percentile 99.99": ranges("percentile", 99.99),
    "Entropy": ranges("entropy"),
}
EQUALIZE = algorithm(CLEConfig(cle_scale_use_threshold=False, cle_steps=4))
SMOOTH = algorithm(SmoothQuantConfig())
OFTEN = 10
"""Iterations after which training looks at the clock."""
SHORT = "AdaQuant, 30 iterations"
ADAROUND, ADAQUANT = "AdaRound, 100 iterations", "AdaQuant, 300 iterations"
LONGER, LONGEST = "AdaRound, 1000 iterations", "AdaQuant, 3000 iterations"
FAR_ENOUGH = 0.02
"""Rate of a short learning, in scales of a weight: 30 falling steps move it by a third of a code at most.

ResNet-18, held out, at .01, .03 and .06: 8 bits 27.40, 27.22, 27.11 dB; 4 bits 17.24, 17.95, 17.36."""
ENOUGH = 0.1
"""dB that learning has to gain before it is worth ten times as long."""
FAR = 1.0
"""dB that ranges may be behind the best, and yet be better with what an algorithm makes of the model."""
STEPS = (
    *(Step(f"ranges: {name}", change) for name, change in RANGES.items()),
    Step("weight ranges: MinMSE", ranges("mse", of=("weight",))),
    Step("CLE", EQUALIZE),
    Step("CLE, ranges of the config", with_plain_ranges(EQUALIZE)),
    Step("SmoothQuant", SMOOTH),
    Step("SmoothQuant, ranges of the config", with_plain_ranges(SMOOTH)),
    Step("QuaRot", algorithm(QuarotConfig())),
    *(
        Step(f"ranges again: {name}", again(change), follows=f"ranges: {name}", least=-FAR)
        for name, change in RANGES.items()
    ),
    Step("ranges of each tensor", tensor_ranges(TensorRanges())),
    # It runs both models layer by layer, and so does each step behind it that keeps it.
    Step("BiasCorrection", algorithm(BiasCorrectionConfig())),
    # Seconds, where learning takes minutes.
    Step("GPTQ, of weights of few bits", solve_few_bits),
    Step("the worst nodes in float", floating(FloatNodes())),
    Step(SHORT, tuning(AdaQuantConfig(num_iterations=30, relative_rate=FAR_ENOUGH, log_period=OFTEN))),
    Step(ADAROUND, tuning(AdaRoundConfig(num_iterations=100, log_period=OFTEN)), SHORT, 4),
    Step(ADAQUANT, tuning(AdaQuantConfig(num_iterations=300, log_period=OFTEN)), ADAROUND, 3),
    Step(LONGER, tuning(AdaRoundConfig(log_period=OFTEN)), ADAROUND, 10, follows=ADAQUANT, least=ENOUGH),
    Step(LONGEST, tuning(AdaQuantConfig(log_period=OFTEN)), ADAQUANT, 10, follows=LONGER, least=ENOUGH),
    Step("more bits for the most sensitive layers", raise_bits, wider=True),
    Step("more bits for all layers", raise_all_bits, last_resort=True, wider=True),
)
FEW_IN_FLOAT = tuple(
    Step(f"{share:.0%} of the nodes in float", floating(FloatNodes(share), where_lost=True))
    for share in (0.05, 0.1, 0.2)
)
PLENTY = 40.0
"""dB: noise of a hundredth of the outputs, which no task's figure showed; quick steps look no further."""
QUICK_STEPS = (
    *(Step(f"ranges: {name}", change) for name, change in RANGES.items() if name != "Entropy"),
    *FEW_IN_FLOAT,
    Step("ranges of each tensor", tensor_ranges(TensorRanges())),
    Step("BiasCorrection", algorithm(BiasCorrectionConfig())),
)
"""Those that gain most for their seconds, for a configuration that nobody chose."""
WEIGHTS_STEPS = (Step("BiasCorrection", algorithm(BiasCorrectionConfig())), *FEW_IN_FLOAT)
"""What helps weights alone."""
