"""The choices that noise makes: which nodes stay in float, and by which statistic each noisy tensor has its range.

    observer(t) = argmin over candidates c of  power( Q_c(x_t) - x_t )        power: `sensitivity.py`

The nodes are those whose noise weighs most in the outputs, decided once for a model. No statistic is the best for all
tensors: one that is cut off costs its outliers, one that is not costs the digits of all others, and what either does to
the outputs follows from the layers after. So each tensor (with all that share its scale) is quantized alone under each
candidate, as a noise in the float model, and the outputs decide. Quiet tensors keep the range that they have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quark.base.log import logger
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NothingQualifiesError
from quark.onnx.calibration.calibrate import range_classes, solved_observer
from quark.onnx.calibration.data.samples import required
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import Statistics
from quark.onnx.config.settings import Settings
from quark.onnx.decide import Decision, decide
from quark.onnx.graph.output_parts import output_parts
from quark.onnx.placement.dual_pairs import source_name
from quark.onnx.search.evaluator import PartValues
from quark.onnx.search.noise.sensitivity import OutputNoise, Probe, halved, sensitivity
from quark.onnx.search.noise.sources import NoiseModel, NoiseSource


@dataclass(frozen=True)
class FloatNodes:
    """Nodes in float for the noise they would add, as recovery asks for them.

    Attributes:
        share: Of the quantized nodes, at most, each counted by its time where kernels were timed, and rounded up where
            they were not.
        runs: Float forwards of the first sample that the noise is measured with; others take half as many.
    """

    share: float = 0.05
    runs: int = 88

    @property
    def forwards(self) -> int:
        """How many forwards that is: the second sample has the groups that the first left, half as many as its runs."""
        return self.runs + self.runs // 2


Measured = list[tuple[Settings, OutputNoise]]
"""The noise of each tensor under some settings."""


def known_noise(settings: Settings, measured: Measured) -> tuple[OutputNoise, list[str]] | None:
    """Return the noise under settings that differ in fewer nodes in float alone, and the nodes that came since.

    Each noise is that of one tensor in the float model, whatever else is quantized.
    """
    for before, noise in measured:
        specs = replace(settings.specs, exclude=before.specs.exclude)
        added = settings.specs.exclude[len(before.specs.exclude) :]
        names = [name for name in added if isinstance(name, str)]
        if replace(settings, specs=specs) == before and len(names) == len(added):
            return noise, names
    return None


def noise_under(
    prepared: Prepared, config: FloatNodes, settings: Settings, measured: Measured, measure: PartValues | None
) -> tuple[OutputNoise, list[str]]:
    """The noise under some settings, measured where it is not known yet, and the nodes in float that it does not know.

    The arguments are those of `leave_in_float`.
    """
    known = known_noise(settings, measured)
    if known is None:
        required(prepared.data, config)
        noise = sensitivity(prepared, settings, runs=config.runs, measure=measure)
        measured.append((settings, noise))
        known = noise, []
    return known


def leave_in_float(
    prepared: Prepared,
    config: FloatNodes,
    settings: Settings,
    measured: Measured | None = None,
    measure: PartValues | None = None,
) -> Settings:
    """Settings that exclude these nodes.

    Args:
        prepared: The float model and its samples; not changed.
        config: How many.
        settings: Of the other nodes.
        measured: Noises of the model on these samples; read, and completed.
        measure: Gives the values by which a part of an output is compared; None for the part itself.

    Raises:
        NothingQualifiesError: No node alone, or with few others, takes noise away.
    """
    found, before = noise_under(prepared, config, settings, [] if measured is None else measured, measure)
    quantized = found.of_nodes().keys() - set(before)
    # The seconds of a node over those of a usual one.
    seconds = {node: taken for node, taken in settings.measurement.node_seconds if node in found.of_nodes()}
    usual = sum(seconds.values()) / max(1, len(seconds))
    costs = {node: taken / usual for node, taken in seconds.items()} if usual else None
    count = config.share * len(quantized)
    nodes = found.worst_nodes(math.ceil(count) if costs is None else count, before, costs)
    if not nodes:
        raise NothingQualifiesError("FloatNodes: the outputs have no noise that few nodes in float would take away.")
    logger.info("In float, for the noise that they put into the outputs: %s.", ", ".join(nodes))
    return replace(settings, specs=replace(settings.specs, exclude=(*settings.specs.exclude, *nodes)))


# Ranges --------------------------------------------------------------------------------------------------------------


GAIN = 0.9
"""A range is changed where this share of its noise is not left: less is chance, with few samples."""


@dataclass(frozen=True)
class TensorRanges:
    """Other ranges for the noisiest tensors, as recovery asks for them.

    Attributes:
        candidates: (observer, percentile) whose ranges are tried.
        count: How many of the noisiest tensors.
        runs: Float forwards of each sample to find these.
        samples: How many samples are run.
    """

    candidates: tuple[tuple[str, float], ...] = (("min_max", 0), ("mse", 0), ("percentile", 99.99), ("entropy", 0))
    count: int = 16
    runs: int = 32
    samples: int = 1

    @property
    def forwards(self) -> int:
        """How many forwards that is at most."""
        return self.samples * (self.runs + self.count * (1 + len(self.candidates)))


def choose_ranges(
    prepared: Prepared, config: TensorRanges, settings: Settings, measure: PartValues | None = None
) -> Settings:
    """Settings with the ranges of the noisiest tensors.

    Args:
        prepared: The float model and its samples; not changed.
        config: Statistics to try, and for how many tensors.
        settings: Those that `prepare` gave.
        measure: Gives the values by which a part of an output is compared; None for the part itself.

    Raises:
        NothingQualifiesError: No other range is better for any of them.
    """
    samples, prepared = required(prepared.data, config), prepared.in_memory()
    statistics = prepared.own_statistics
    assert statistics is not None
    decision = decide(prepared.copy(), settings, fold=False)
    classes = _classes(decision)
    tensors = {source_name(v): decision.placement.root(v).name or "" for v in decision.placement.activations}
    noise, parts = NoiseModel(decision), tuple(output_parts(prepared.model).values())
    with noise.open() as run:
        probes = [Probe(run, samples, i, parts, measure) for i in range(min(config.samples, len(samples)))]
        trial = _Trial(noise.sources, tensors, probes)
        noisy = trial.noisiest(config.runs, config.count)
        least = {root: GAIN * trial.power(root) for root in noisy}
        chosen: dict[str, tuple[float, float]] = {}
        looked = {root: [classes[root].params] for root in noisy if root in classes}
        for observer, percentile in config.candidates:
            ranges = _ranges({root: classes[root] for root in looked}, observer, percentile, settings, statistics)
            # What is the same under two statistics is run once.
            new = {root: params for root, (_, params) in ranges.items() if not _among(params, looked[root])}
            trial.look(new)
            for root, params in new.items():
                looked[root].append(params)
                power = trial.power(root)
                if power < least[root]:
                    least[root], chosen[root] = power, ranges[root][0]
    if not chosen:
        raise NothingQualifiesError(
            f"TensorRanges: none of the {len(noisy)} tensors with most noise has a better range."
        )
    logger.info(
        "%d of the %d tensors with most noise get other ranges, which add less noise to the outputs.",
        len(chosen),
        len(noisy),
    )
    known = dict(settings.calibration.ranges) | chosen
    return replace(settings, calibration=replace(settings.calibration, ranges=tuple(known.items())))


class _Trial:
    """The noise of tensors that share a scale, under the qparams that are looked at.

    Args:
        sources: All sources of noise.
        tensors: Activation -> the one that stands for all of its scale.
        probes: A sample each.
    """

    def __init__(self, sources: Sequence[NoiseSource], tensors: Mapping[str, str], probes: Sequence[Probe]) -> None:
        self._count, self._tensors, self._probes = len(sources), tensors, probes
        self._members: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            root = "" if source.node else tensors.get(source.name)
            if root:
                self._members.setdefault(root, []).append(index)

    def noisiest(self, runs: int, count: int) -> list[str]:
        """The scales whose tensors add most to the outputs, found in as many runs."""
        powers = halved(self._count, runs, self._probes)
        return sorted(self._members, key=lambda root: -sum(powers[i] for i in self._members[root]))[:count]

    def look(self, params: Mapping[str, QParams]) -> None:
        """Take these scales' tensors under other qparams."""
        for probe in self._probes:
            probe.look({name: params[root] for name, root in self._tensors.items() if root in params})

    def power(self, root: str) -> float:
        """Return what the tensors of a scale add, over all samples."""
        return sum(probe.power_of_all(self._members[root]) for probe in self._probes)


@dataclass(frozen=True)
class _Class:
    """Tensors that share a scale.

    Attributes:
        names: Of those whose values count.
        spec: That they have.
        params: That were decided.
    """

    names: list[str]
    spec: TensorSpec
    params: QParams


def _classes(decision: Decision) -> dict[str, _Class]:
    """Of the tensors whose scale follows from a range: the name of the one that stands for a class -> the class."""
    placement, found = decision.placement, {}
    for root, names in range_classes(placement).items():
        spec = placement.activations[root]
        if spec.has_zero_point and not spec.is_cast and not spec.is_block:
            found[root.name or ""] = _Class(names, spec, decision.qparams.activations[root])
    return found


def _ranges(
    classes: Mapping[str, _Class], observer: str, percentile: float, settings: Settings, statistics: Statistics
) -> dict[str, tuple[tuple[float, float], QParams]]:
    """Classes -> their range by a statistic, and the qparams of that; what a decision solved before is not anew."""
    asked = replace(
        settings, calibration=replace(settings.calibration, percentile=percentile or settings.calibration.percentile)
    )
    found = {}
    for root, one in classes.items():
        seen = solved_observer(one.names, replace(one.spec, observer=observer), asked, statistics)
        low, high = seen.range()
        found[root] = (float(low), float(high)), seen.qparams()
    return found


def _among(params: QParams, others: Sequence[QParams]) -> bool:
    """Return True where one of the others is the same scale and zero point."""
    return any(
        np.array_equal(params.scale, other.scale) and np.array_equal(params.zero_point or 0, other.zero_point or 0)
        for other in others
    )
