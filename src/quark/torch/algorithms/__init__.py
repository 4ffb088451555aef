"""The accuracy algorithms. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Sequence

from quark.errors import ConfigError, NotSupportedError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.rotation.quarot import QuaRot
from quark.torch.algorithms.rounding.autoround import AutoRound
from quark.torch.algorithms.rounding.distillation import Distillation
from quark.torch.algorithms.rounding.gptq import GPTAQ, GPTQ, Qronos
from quark.torch.algorithms.rounding.imatrix import Imatrix, ImportanceScale
from quark.torch.algorithms.rounding.svdquant import SVDQuant
from quark.torch.algorithms.scaling.awq import AWQ
from quark.torch.algorithms.scaling.base import Folding
from quark.torch.algorithms.scaling.equalize import Equalize
from quark.torch.algorithms.scaling.smooth_quant import AutoSmoothQuant, SmoothQuant
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    DistillationConfig,
    EqualizeConfig,
    GPTAQConfig,
    GPTQConfig,
    ImatrixConfig,
    ImportanceScaleConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.config.families import without_shown

ALGORITHMS: dict[type[AlgoConfig], type[Algorithm]] = {
    SmoothQuantConfig: SmoothQuant,
    AutoSmoothQuantConfig: AutoSmoothQuant,
    EqualizeConfig: Equalize,
    AWQConfig: AWQ,
    GPTQConfig: GPTQ,
    GPTAQConfig: GPTAQ,
    QronosConfig: Qronos,
    ImportanceScaleConfig: ImportanceScale,
    ImatrixConfig: Imatrix,
    AutoRoundConfig: AutoRound,
    RotationConfig: QuaRot,
    SVDQuantConfig: SVDQuant,
    DistillationConfig: Distillation,
}
"""Config class -> algorithm."""


def algorithms_of(configs: Sequence[AlgoConfig]) -> list[Algorithm]:
    """The algorithms of `algo_config`, in the order given.

    Raises:
        NotSupportedError: An algorithm that this version does not have, as that of a checkpoint of another one; names
            the possible ones.
        ConfigError: One that rescales what layers read, after one that gives them a branch which reads it too.
    """
    algorithms: list[Algorithm] = []
    for config in configs:
        cls = next((ALGORITHMS[kind] for kind in type(config).__mro__ if kind in ALGORITHMS), None)
        if cls is None:
            possible = ", ".join(kind.__name__ for kind in ALGORITHMS)
            raise NotSupportedError(f"{type(config).__name__} is not part of this version. Possible: {possible}.")
        if issubclass(cls, Folding) and any(isinstance(before, SVDQuant) for before in algorithms):
            raise ConfigError(f"{type(config).__name__} goes before SVDQuantConfig in algo_config, not after it.")
        algorithms.append(cls(without_shown(config)))
    return algorithms


__all__ = ["ALGORITHMS", "Algorithm", "Block", "algorithms_of"]
