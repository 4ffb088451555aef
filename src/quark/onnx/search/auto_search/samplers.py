"""Samplers: what a search tries next, given what it has seen. A configuration is drawn name by name.

TPE (Bergstra et al. 2011): of the trials so far, the best quarter are good and the rest are bad. Each value is drawn by
how often good trials have it, and of some such draws the one with the largest ratio good : bad is taken. Numbers of a
range are seen through normal curves around those of the trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quark.onnx.search.auto_search.search_space import CONDITION, Config, holds, is_range

SEED = 42
STARTUP = 10
"""SearchTrials of TPE that are drawn at random."""
DRAWS = 24
"""Draws of TPE for each name, of which one is taken."""
GOOD = 0.25
"""Share of the trials that are good."""

Draw = Callable[[str, Any], Any]


def configuration(search_space: Mapping[str, Any], draw: Draw) -> Config:
    """A config of a flat space, each value drawn by (name, values); a group that does not count is left out."""
    config: Config = {}
    for name, values in search_space.items():
        if isinstance(values, list):
            config[name] = draw(name, values)
    for name, group in search_space.items():
        if isinstance(group, dict) and holds(group[CONDITION], config):
            chosen = {inner: draw(f"{name}.{inner}", v) for inner, v in group.items() if inner != CONDITION}
            if chosen:
                config[name] = chosen
    return config


class RandomSampler:
    """Draws every value alike. The same seed gives the same draws.

    Args:
        search_space: A flat space.
        seed: Of the draws.
    """

    def __init__(self, search_space: Mapping[str, Any], seed: int = SEED) -> None:
        self.space, self.random = search_space, np.random.default_rng(seed)

    def suggest(self, trials: Sequence[tuple[Config, float]]) -> Config:
        """The next config, given those so far with their scores, of which less is better."""
        return configuration(self.space, lambda name, values: self._draw(values))

    def _draw(self, values: Any) -> Any:
        if not is_range(values):
            return values[int(self.random.integers(len(values)))]
        low, high = _scaled(values["low"], values), _scaled(values["high"], values)
        return _number(float(self.random.uniform(low, high)), values)


class TPESampler(RandomSampler):
    """Draws what good trials have and bad ones have not; the first trials are random."""

    def suggest(self, trials: Sequence[tuple[Config, float]]) -> Config:
        """The next config, given those so far with their scores, of which less is better."""
        if len(trials) < STARTUP:
            return super().suggest(trials)
        ranked = [config for config, _ in sorted(trials, key=lambda trial: trial[1])]
        count = max(1, math.ceil(GOOD * len(ranked)))
        good, bad = ranked[:count], ranked[count:]
        return configuration(self.space, lambda name, values: self._best(values, _seen(name, good), _seen(name, bad)))

    def _best(self, values: Any, good: list[Any], bad: list[Any]) -> Any:
        if is_range(values):
            return self._best_number(values, good, bad)
        shares = [_shares(values, seen) for seen in (good, bad)]
        draws = self.random.choice(len(values), DRAWS, p=shares[0])
        return values[int(max(draws, key=lambda index: shares[0][index] / shares[1][index]))]

    def _best_number(self, values: Mapping[str, Any], good: list[Any], bad: list[Any]) -> Any:
        low, high = _scaled(values["low"], values), _scaled(values["high"], values)
        if not good or not high > low:
            return self._draw(values)
        centres = [np.array([_scaled(value, values) for value in seen]) for seen in (good, bad)]
        width = (high - low) / 5
        draws = np.clip(self.random.choice(centres[0], DRAWS) + self.random.normal(0, width, DRAWS), low, high)
        ratio = [_density(draws, centre, width, high - low) for centre in centres]
        return _number(float(draws[int(np.argmax(ratio[0] / ratio[1]))]), values)


SAMPLERS: Mapping[str, type[RandomSampler]] = {"TPE": TPESampler, "Random": RandomSampler}


def _seen(name: str, trials: Sequence[Config]) -> list[Any]:
    """The values that trials have under "name" or "group.name"; one that has none is left out."""
    group, _, inner = name.rpartition(".")
    configs = [trial.get(group, {}) for trial in trials] if group else list(trials)
    return [config[inner] for config in configs if inner in config]


def _shares(values: Sequence[Any], seen: Sequence[Any]) -> Any:
    """How often each value was seen, and once more, as shares of one."""
    counts = np.array([1 + sum(value == other for other in seen) for value in values], np.float64)
    return counts / counts.sum()


def _density(x: Any, centres: Any, width: float, span: float) -> Any:
    """The mean of normal curves around the centres, and of an even one over the whole range."""
    curves = np.exp(-0.5 * ((x[:, None] - centres) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return (curves.sum(1) + 1 / span) / (len(centres) + 1)


def _scaled(value: float, values: Mapping[str, Any]) -> float:
    return math.log(value) if values.get("log") else float(value)


def _number(scaled: float, values: Mapping[str, Any]) -> Any:
    """A number of a range, from its scale, on its steps."""
    value = math.exp(scaled) if values.get("log") else scaled
    low, high = values["low"], values["high"]
    step = values.get("step", 1 if values["type"] == "int" else None)
    if step:
        value = low + round((min(value, high) - low) / step) * step
        value -= step if value > high else 0
    value = min(max(value, low), high)
    return int(value) if values["type"] == "int" else float(value)
