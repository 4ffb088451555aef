"""Nodes go back to float where the noise that they avoid is worth their time, beside a search of all choices."""

from __future__ import annotations

import math
from itertools import chain, combinations, pairwise

import numpy as np
import pytest

from quark.errors import NothingQualifiesError
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.graph.model_file import infer_shapes, load
from quark.onnx.placement.place import place
from quark.onnx.search.latency.choose_nodes import Edge, KernelChoice, PlacementChoice, cost
from quark.onnx.search.latency.node_groups import NodeGroups
from quark.onnx.search.noise.choices import FloatNodes
from quark.onnx.search.noise.priced import ENOUGH, leave_in_float_at, nodes_at
from quark.onnx.search.noise.sensitivity import OutputNoise
from quark.onnx.search.noise.sources import NoiseSource
from tests.models.onnx_zoo import mlp, vectors
from tests.onnx.search.noise.test_sensitivity import SETTINGS

NAMES = "abcdef"


def chain_of_kernels(seed: int) -> tuple[PlacementChoice, OutputNoise]:
    """Six nodes after each other; each holds a weight, and each pair an activation."""
    random = np.random.default_rng(seed)
    in_float = dict(zip(NAMES, random.uniform(1, 3, 6), strict=True))
    in_integers = {name: seconds * random.uniform(0.4, 0.95) for name, seconds in in_float.items()}
    pairs = list(pairwise(NAMES))
    edges = tuple(Edge(a, frozenset(b), False, *random.uniform(0.01, 0.1, 2)) for a, b in pairs)
    held = [frozenset(each) for each in chain(NAMES, pairs)]
    powers = {NoiseSource(f"t{i}", "", names): 10 ** random.uniform(-5, -2) for i, names in enumerate(held)}
    choice = KernelChoice(in_float, in_integers, edges)
    return PlacementChoice(choice, NodeGroups(), frozenset(NAMES), sum(in_float.values())), OutputNoise(powers)


@pytest.mark.parametrize("price", [0.1, 0.5, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_choice_is_better_at_the_price(seed: int, price: float) -> None:
    """In time and noise, where noise costs what the price says of the noise that is left."""
    found, noise = chain_of_kernels(seed)
    kept = nodes_at(price, found, noise, set(NAMES))

    def left(integers: set[str]) -> float:
        return sum(power for source, power in noise.powers.items() if source.holders & integers)

    for_one = found.float_seconds / 100 * 10 / (price * math.log(10)) / (left(kept) + ENOUGH)
    every = [set(some) for size in range(7) for some in combinations(NAMES, size)]
    least = min(cost(found.choice, some) + for_one * left(some) for some in every)
    assert cost(found.choice, kept) + for_one * left(kept) == pytest.approx(least)


def test_a_lower_price_leaves_more_in_float_and_nothing_comes_back() -> None:
    found, noise = chain_of_kernels(5)
    kept = [nodes_at(price, found, noise, set(NAMES) - {"c"}) for price in (20.0, 1.0, 0.05)]
    assert kept[0] > kept[1] > kept[2] and "c" not in kept[0]


def test_the_settings_leave_the_others_in_integers_or_say_that_no_node_is_worth_it() -> None:
    model = load(mlp())
    infer_shapes(model)
    prepared = Prepared(model, Samples(vectors(2), model_inputs(model)))
    names = frozenset(node.name or "" for node in place(model.clone(), SETTINGS).nodes)
    choice = KernelChoice(dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.1) | {"hidden_node": 0.999}, ())
    found = PlacementChoice(choice, NodeGroups(), names, float(len(names)))
    with pytest.raises(NothingQualifiesError):
        leave_in_float_at(1e3, found, prepared, FloatNodes(), SETTINGS, [])
    assert leave_in_float_at(1.0, found, prepared, FloatNodes(), SETTINGS, []).specs.exclude == ("hidden_node",)
