"""Sensitivity: the noise that each quantized tensor alone puts into the outputs of a model.

With n_i the noise where tensor i stands (`sources.py`), and a group g of tensors with random signs c_i:

    power(g) = mean over samples of sum over float outputs o of |f_o(x + sum_(i in g) c_i n_i) - f_o(x)|^2 / |f_o(x)|^2

An output that a Concat joins counts once for each of its parts (`graph/output_parts.py`). Where models are compared by
the scores of probabilities (`search/evaluator.py`), these take the place of f: what is searched is what is compared.

The signs keep noises that would cancel, or add up, from doing so: in the mean over signs the power of a group is the
sum of those of its tensors, as far as f is linear. So tensors are found by halving: the noisiest group is split, in the
order of the graph, and both halves are run, until as many runs are made as were allowed. What is left in groups
shares the power of its group. With as many runs as tensors each is run alone: its power is then that of the model with
this tensor alone quantized. Each run is a float forward for each sample; no trial quantizes a model or loads one.

Groups: adaptive group testing, Dorfman 1943; noise power that adds up: Zhou et al. 2018 (arXiv:1712.01048).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quark.core.array import NumpyArray
from quark.core.scales import QParams
from quark.errors import ConfigError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.decide import decide
from quark.onnx.graph.output_parts import OutputPart, output_parts
from quark.onnx.search.evaluator import PartValues
from quark.onnx.search.noise.sources import Noise, NoiseModel, NoiseRun, NoiseSource

_SIGNS_SEED = 0
_LEAST_COST = 0.01
"""Nodes that a move costs at least."""
_FIRST_GROUPS = 8
"""Groups before the first is split."""


@dataclass(frozen=True)
class OutputNoise:
    """The result of `sensitivity`.

    Attributes:
        powers: Source -> power of its noise relative to the outputs, summed over these; infinite where an output is no
            longer finite.
    """

    powers: Mapping[NoiseSource, float]

    @property
    def total(self) -> float:
        """The power of all noises."""
        return math.fsum(self.powers.values())

    def of_nodes(self) -> dict[str, float]:
        """Node -> the power of what it alone holds, and an equal share of what it holds with others."""
        found: dict[str, float] = {}
        for source, power in self.powers.items():
            for node in source.holders:
                found[node] = found.get(node, 0.0) + power / len(source.holders)
        return found

    def worst_nodes(
        self, count: float, before: Iterable[str] = (), costs: Mapping[str, float] | None = None
    ) -> list[str]:
        """The nodes that are best left in float, at most `count` of them, the ones that gain most first.

        Args:
            count: How many, beside those before.
            before: Nodes that are in float already.
            costs: Node -> as how many it counts; None for one each.

        A tensor is quantized as long as one of its holders is. So a step takes all that still hold one tensor, and the
        step is taken that removes most noise for its cost: greedy, as for a knapsack.
        """
        first = list(dict.fromkeys(before))
        chosen = list(first)
        count += _cost(first, costs)
        while best := self._best_move(chosen, count - _cost(chosen, costs), costs):
            chosen += sorted(best)
        return chosen[len(first) :]

    def _best_move(
        self, chosen: Sequence[str], room: float, costs: Mapping[str, float] | None
    ) -> frozenset[str] | None:
        """The nodes that remove most noise for their cost, beside those that are chosen; None where none fit."""
        before = set(chosen)
        left = {source: power for source, power in self.powers.items() if not source.holders <= before}
        gains: dict[frozenset[str], float] = {}
        for move in {source.holders - before for source in left}:
            if _cost(move, costs) <= room:
                removed = sum(power for source, power in left.items() if source.holders <= before | move)
                gains[move] = removed / max(_cost(move, costs), _LEAST_COST)
        best = max(gains, key=lambda move: (gains[move], sorted(move)), default=None)
        return best if best and gains[best] else None


def _cost(nodes: Iterable[str], costs: Mapping[str, float] | None) -> float:
    """As how many nodes some count together."""
    return sum(1.0 if costs is None else costs.get(node, 0.0) for node in nodes)


def sensitivity(
    prepared: Prepared,
    settings: Settings,
    *,
    runs: int | None = None,
    count: int = 2,
    measure: PartValues | None = None,
) -> OutputNoise:
    """The noise of each quantized tensor at the outputs of a model.

    Args:
        prepared: The float model and its samples; not changed.
        settings: Those that `prepare` gave. Algorithms are not run.
        runs: Most runs of the first sample, whose groups the others measure; None for one for each tensor, alone.
        count: How many of the samples are run, from the first.
        measure: Gives the values by which a part of an output is compared; None for the part itself.

    Raises:
        ConfigError: Fewer than one run or sample.
        NotSupportedError: Inputs are quantized as they come.
        CalibrationError: There are no samples.
    """
    if count < 1 or (runs is not None and runs < 1):
        raise ConfigError(f"sensitivity: runs={runs}, count={count}: possible: at least 1 of each.")
    data, parts = prepared.data, tuple(output_parts(prepared.model).values())
    noise = NoiseModel(decide(prepared.in_memory().copy(), settings, fold=False))
    with noise.open() as run:
        probes = (Probe(run, data, sample, parts, measure) for sample in range(min(count, len(data))))
        powers = halved(len(noise.sources), runs, probes)
    return OutputNoise(dict(zip(noise.sources, powers, strict=True)))


class Probe:
    """One sample: the noise of each source, and the outputs of the float model.

    Args:
        run: The sessions.
        data: Samples, whose time may end: then the next run raises TimeUpError.
        sample: Which of them.
        parts: Of each output of the model.
        measure: As of `sensitivity`.
    """

    def __init__(
        self,
        run: NoiseRun,
        data: Samples,
        sample: int,
        parts: Sequence[Sequence[OutputPart]],
        measure: PartValues | None = None,
    ) -> None:
        self._run, self._data, self._feed, self._parts = run, data, data[sample], parts
        self._measure = measure or (lambda part, x, y: (x, y))
        self._noises = run.look(self._feed)
        self._signs = np.random.default_rng(_SIGNS_SEED).choice((-1.0, 1.0), len(self._noises))
        self._expected = run.outputs(self._feed, [], [])

    def power(self, group: Sequence[int]) -> float:
        """The power of the noise of a group."""
        # A tensor alone has the sign that it has in the quantized model.
        factors = self._signs[list(group)] if len(group) > 1 else [1.0]
        return self._power([self._noises[i] for i in group], factors)

    def look(self, given: Mapping[str, QParams]) -> None:
        """Take the noise of these activations, and of no others, under other qparams than were decided."""
        self._noises = []
        self._noises = self._run.look(self._feed, given)

    def power_of_all(self, group: Sequence[int]) -> float:
        """The power of a group with the signs that its tensors have in the quantized model."""
        return self._power([self._noises[i] for i in group], [1.0] * len(group))

    def _power(self, noises: Sequence[Mapping[str, Noise]], factors: Sequence[float] | NumpyArray) -> float:
        self._data.check_time()
        found = self._run.outputs(self._feed, noises, factors)
        joined = zip(self._parts, self._expected, found, strict=True)
        return sum(self._relative_of(parts, x, y) for parts, x, y in joined if x.dtype.kind == "f")

    def _relative_of(self, parts: Sequence[OutputPart], x: NumpyArray, y: NumpyArray) -> float:
        """The sum of what each part of an output lost; infinite where the output has another shape."""
        if x.shape != y.shape:
            return math.inf
        return sum(_relative(*self._measure(part, part.of(x), part.of(y))) for part in parts)


def _relative(x: NumpyArray, y: NumpyArray) -> float:
    """Power of y - x over that of x, of the finite x; 0 where x is all zero."""
    finite = np.isfinite(x)
    x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
    signal = float(x @ x)
    if not np.isfinite(y).all():
        return math.inf
    return float((y - x) @ (y - x)) / signal if signal else 0.0


def halved(number: int, runs: int | None, probes: Iterable[Probe]) -> list[float]:
    """The power of each of `number` sources, the mean over samples, by at most `runs` runs of groups for each.

    The first sample splits the groups, and the others measure what is left of them, so that one is stored at a time.
    """
    sums: dict[tuple[int, ...], float] = {}
    count = 0
    for probe in probes:
        found = {group: probe.power(group) for group in sums} if sums else _split(number, runs, probe)
        sums = {group: sums.get(group, 0.0) + power for group, power in found.items()}
        count += 1
        del probe  # its noises go before the next one has any
    powers = [0.0] * number
    for group, power in sums.items():
        for index in group:
            powers[index] = power / count / len(group)
    return powers


def _split(number: int, runs: int | None, probe: Probe) -> dict[tuple[int, ...], float]:
    """Groups of sources and their powers: the noisiest is halved, until as many runs are made as were allowed."""
    left = number if runs is None else runs
    size = 1 if left >= number else -(-number // min(left, _FIRST_GROUPS))
    groups: list[tuple[float, tuple[int, ...]]] = []

    def measure(group: tuple[int, ...]) -> None:
        power = probe.power(group)
        powers[group] = power
        heapq.heappush(groups, (-power if len(group) > 1 else 1.0, group))

    powers: dict[tuple[int, ...], float] = {}
    for start in range(0, number, size):
        measure(tuple(range(start, min(start + size, number))))
        left -= 1
    while left > 1 and groups and groups[0][0] <= 0:
        _, group = heapq.heappop(groups)
        del powers[group]
        middle = len(group) // 2
        measure(group[:middle])
        measure(group[middle:])
        left -= 2
    return powers
