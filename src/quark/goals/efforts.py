"""Efforts: how much is done for accuracy, and which algorithms that means for a scheme.

Mean KL divergence of the next token from the float model on held-out text, in millinats (a Llama of 6.8 million
parameters, 64 windows of 256 tokens), and seconds for three layers of the shape of one billion parameters:

    weights         nearest   GPTQ   Qronos   AutoRound
    uint4, 128        4.99    1.46    1.12
    int3, 128        26.3     6.73    5.26      5.79
    int2, 64        160.2    47.5    27.8      26.9
    MXFP4, alone      5.92    1.84    1.52
    MXFP4, inputs    26.2    21.7    22.4      21.0
    NVFP4, inputs    15.8    12.5    11.9      12.2
    seconds           1.8    46      88        several times that

So Qronos is balanced. It loses less than GPTQ in 15 of 18 rows, by 3 to 41 %: in five of these, in all six of the table
of docs/choose/algorithm.md, and in four of six of a Qwen2 of 4.2 million parameters; in two rows of 4 bits with inputs
it loses 1 and 3 % more. It takes 1.5 to 2 times as long, at the shape above 1.8 by now.

The best solver is Qronos by Fisher information of outputs, in every row of that table, which a test compares with what
is chosen here: on the example language model it leaves 3.2 where Qronos alone leaves 4.8 (uint4), 15.6 for 21.8
(int3), 43.3 for 46.1 and GPTQ's 47.8 (MXFP4 with inputs), 22.7 for 23.5 (NVFP4 with inputs). AutoRound leaves 18.4 of
int3 and takes twice as long.

Of 4-bit floats with inputs, what is done before the solver decides. On a model of 135 million parameters (SmolLM2; 16
windows of 512 held-out tokens) MXFP4 loses 1270 to nearest and 679 with Qronos on 32 windows; on 16, 741 equalized
and to nearest, 442 with Qronos; 349 and 285 with rotations in each forward, too. The example model has no channels that
are far larger than others: 52.9 with Qronos, 51.7 equalized before.

Of weights alone (`uint4_wo_64`, prose and code, 8 windows each), SmolLM2 loses 40.2 and 70.9 with Qronos, 38.6 and 66.3
by Fisher information in twice its time, and to nearest 309 and 310 (16 windows): a smaller gain than that of the
example model.

Texts that the model writes and distillation after it take another 3 to 30 % off
(docs/guide/distillation.md). Of 8 bits, to nearest loses 3 of SmolLM2 already; static integer inputs gain by
SmoothQuant, which leaves alone what it does not help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleType
from quark.errors import CalibrationError, ConfigError, did_you_mean
from quark.gguf import MIXES

FAST, BALANCED, BEST = EFFORTS = ("fast", "balanced", "best")
DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")
"""The calibration text of the package, which language models get where none is given; its end says what it is."""
HELD_OUT_TEXT = Path(__file__).with_name("held_out_text.txt")
"""The text of the package that nothing is calibrated on: prose, dialogue and code, written for it."""

QRONOS = "qronos:fisher=auto"
"""Qronos by Fisher information of outputs, where the model has logits and there is room for their scores."""
EQUALIZE = "equalize"
ROTATION = "rotation:online_r1_rotation=true,r2=true,r4=true,rotation_size=32,where_possible=true"
"""In blocks of the scales of OCP MX, in each forward where they cannot be folded."""
DISTILLATION = "distillation"
TEXTS, FEWEST_TEXTS = 512, 64
"""Samples that a language model writes itself for the best, and the fewest that are worth their time."""
MOST_SECONDS = 3600.0
"""Seconds that the best steps may take by estimate; where they would take more, there are fewer, or none."""
_WHY_FISHER = "Qronos by Fisher information: of SmolLM2-135M in uint4 it leaves 39 millinats, alone 40, to nearest 309"
"""Of weights alone."""


@dataclass(frozen=True)
class Steps:
    """The steps of an effort for a scheme.

    Attributes:
        algorithms: As --algorithm takes them.
        why: The reason, a clause.
        distills: Whether texts of the model's own and distillation follow, where model, memory and time allow.
        rotates: Whether ROTATION goes before the solver, where the program runs it and the model is in memory.
    """

    algorithms: tuple[str, ...]
    why: str
    distills: bool = False
    rotates: bool = False


def check_effort(effort: str | None) -> None:
    """Raise ConfigError for an unknown effort."""
    if effort is not None and effort not in EFFORTS:
        raise ConfigError(f"--effort {effort!r} is unknown. {did_you_mean(effort, EFFORTS)}")


def effort_of(effort: str | None, has_data: bool) -> str:
    """The effort that is asked for; balanced where there are data and nothing is said, else fast.

    Raises:
        ConfigError: There is no such effort.
    """
    check_effort(effort)
    if effort is None:
        return BALANCED if has_data else FAST
    return effort


def require_data(effort: str, has_data: bool, onnx: bool) -> None:
    """Raise CalibrationError where algorithms are to run without data: the text of the package is for folders."""
    if effort != FAST and not has_data and onnx:
        raise CalibrationError(
            f"--effort {effort} needs calibration data: pass --calib FILE. Possible without: --effort {FAST}."
        )


def steps_for(scheme: str, effort: str) -> Steps:
    """The algorithms for a scheme of a model folder."""
    if effort == FAST:
        return Steps((), "rounded to nearest: seconds, and no data where no input is static")
    balanced, best = _steps(scheme)
    return balanced if effort == BALANCED else best


_BALANCED_SOLVER = Steps(("qronos",), "Qronos: loses less than GPTQ, in less than twice its time")
SMOOTH = Steps(("smooth",), "SmoothQuant: outliers of inputs move to weights where that helps")
FISHER = Steps((QRONOS,), _WHY_FISHER, distills=True)
FISHER_WITH_INPUTS = Steps((QRONOS,), "Qronos by Fisher information: it loses least of the solvers", distills=True)
EQUALIZED_ALONE = Steps((EQUALIZE,), "equalizing halves what rounded inputs lose")
"""Where there is no time for a solver."""
_EQUALIZED = (
    Steps((EQUALIZE, "qronos"), f"{EQUALIZED_ALONE.why}; {_BALANCED_SOLVER.why}"),
    Steps((EQUALIZE, QRONOS), f"{EQUALIZED_ALONE.why}; {FISHER_WITH_INPUTS.why}", distills=True),
)
"""Of 4-bit floats that share scales in blocks, with such inputs."""


def _nearest(why: str) -> tuple[Steps, Steps]:
    return Steps((), why), Steps((), why)


def _steps(scheme: str) -> tuple[Steps, Steps]:
    """Return the balanced steps and the best steps."""
    if scheme in MIXES:
        nearest = Steps((), "8 bits to nearest lose 3 millinats of SmolLM2-135M")
        best = Steps(
            ("qronos",), "Qronos: of SmolLM2-135M in Q4_K_M it leaves 10 millinats, to nearest 44", distills=True
        )
        return (nearest, nearest) if scheme == "q8_0" else (_BALANCED_SOLVER, best)
    layer = SCHEMES[scheme]
    weight = layer.weight
    if weight is None or weight.is_cast or (weight.dtype.bits >= 8 and layer.input is None):
        return _nearest("8 bits and more to nearest lose 3 millinats of SmolLM2-135M: no algorithm is needed")
    if weight.dtype.bits >= 8:
        if weight.dtype.is_float:
            return _nearest("of FP8 and MX types of 8 bits no algorithm was measured to gain")
        return SMOOTH, SMOOTH
    if weight.code_spec is not None or weight.dtype.is_block:
        return _nearest("for this type no algorithm was measured")
    return _of_few_bits(scheme, layer)


def _of_few_bits(scheme: str, layer: LayerSpec) -> tuple[Steps, Steps]:
    """Return the steps of a scheme whose weights have less than 8 bits."""
    weight = layer.weight
    assert weight is not None
    if layer.input is None:
        return _BALANCED_SOLVER, FISHER
    if weight.dtype.is_float and layer.input.dtype.bits <= 4:
        balanced, best = _EQUALIZED
        return balanced, replace(best, rotates=weight.scale_type is ScaleType.float8_e8m0fnu)
    return _BALANCED_SOLVER, FISHER_WITH_INPUTS
