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

So GPTQ is the best for its time, and the best of all is Qronos, but for MXFP4 with inputs. There the order is another
on each model: on the one of this repository (64 windows of 256 tokens, 60 held out) to nearest has 54.0, GPTQ 44.7,
Qronos 45.3 and AutoRound 45.5, so that GPTQ, within 4 % of the best on both, stays. By Fisher information of outputs
Qronos leaves less of weights alone on both models that were tried: of the one here 3.1 for 4.5 (uint4), 12.9 for 18.3
(int3), 61 for 77 (int2), 3.8 for 5.7 (MXFP4); NVFP4 with inputs 21.5 for 22.5. AutoRound leaves 18.4 of int3
there and takes twice as long. Of 8 bits, to nearest loses 0.1 already; static integer inputs gain by
SmoothQuant, which leaves alone what it does not help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quark.core.schemes import SCHEMES
from quark.errors import CalibrationError, ConfigError, did_you_mean
from quark.goals.facts import MIX_NAMES

FAST, BALANCED, BEST = EFFORTS = ("fast", "balanced", "best")
DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")
"""The calibration text of the package, which language models get where none is given; its end says what it is."""

QRONOS = "qronos:fisher=auto"
"""Qronos by Fisher information of outputs, where the model has logits and there is room for their scores."""
ON_THE_WAY = f"{QRONOS},desc_act=false,static_groups=false,group_aware_order=true"
"""The same with the scales of a group found when its columns are reached: for integers in groups."""
WHY_FISHER = "Qronos by Fisher information: 3.1 millinats of uint4, alone 4.5, to nearest 12.1"
"""Of weights alone."""


@dataclass(frozen=True)
class Steps:
    """What an effort means for a scheme.

    Attributes:
        algorithms: As --algorithm takes them.
        why: The reason, a clause.
    """

    algorithms: tuple[str, ...]
    why: str


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


GPTQ = Steps(("gptq",), "GPTQ: most of what can be gained, at half the time of the best")
SMOOTH = Steps(("smooth",), "SmoothQuant: outliers of inputs move to weights where that helps")
FISHER = Steps((QRONOS,), WHY_FISHER)
FISHER_IN_GROUPS = Steps((ON_THE_WAY,), WHY_FISHER)


def _nearest(why: str) -> tuple[Steps, Steps]:
    return Steps((), why), Steps((), why)


def _steps(scheme: str) -> tuple[Steps, Steps]:
    """What is balanced, and what is best."""
    if scheme in MIX_NAMES:
        return _steps_of_mix(scheme)
    layer = SCHEMES[scheme]
    weight = layer.weight
    if weight is None or weight.is_cast or (weight.dtype.bits >= 8 and layer.input is None):
        return _nearest("8 bits and more to nearest lose 0.1 millinats: no algorithm is needed")
    if weight.dtype.bits >= 8:
        if weight.dtype.is_float:
            return _nearest("of FP8 and MX types of 8 bits no algorithm was measured to gain")
        return SMOOTH, SMOOTH
    if weight.code_spec is not None or weight.dtype.is_block:
        return _nearest("for this type no algorithm was measured")
    if layer.input is None:
        in_groups = not weight.dtype.is_float and "per_channel" not in scheme
        return GPTQ, FISHER_IN_GROUPS if in_groups else FISHER
    if scheme.startswith("mxfp4"):
        why = "GPTQ: of MXFP4 with inputs Qronos lost more on two models, AutoRound on one, and 3 % less on the other"
        return GPTQ, Steps(("gptq",), why)
    return GPTQ, Steps((QRONOS,), "Qronos by Fisher information: of NVFP4 21.5 millinats, alone 22.5")


def _steps_of_mix(scheme: str) -> tuple[Steps, Steps]:
    nearest = Steps((), "8 bits to nearest lose 0.1 millinats")
    best = Steps(("qronos",), "Qronos: 3.1 millinats of Q4_K_M where to nearest has 6.1")
    return (nearest, nearest) if scheme == "q8_0" else (GPTQ, best)
