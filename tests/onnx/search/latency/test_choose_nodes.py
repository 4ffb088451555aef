"""choose_nodes finds the optimum: compared with every subset of small random graphs."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from quark.onnx.search.latency.choose_nodes import Absorbed, Edge, KernelChoice, choose_nodes, cost


def _random(seed: int) -> KernelChoice:
    rng = np.random.default_rng(seed)
    names = [f"n{i}" for i in range(rng.integers(1, 8))]
    edges = []
    for _ in range(rng.integers(0, 10)):
        readers = frozenset(str(name) for name in rng.choice(names, rng.integers(0, len(names) + 1), replace=False))
        writer = None if rng.random() < 0.2 else str(rng.choice(names))
        edges.append(Edge(writer, readers, bool(rng.random() < 0.3), *rng.uniform(0, 2, 2)))
    needs = frozenset((str(rng.choice(names)), str(rng.choice(names))) for _ in range(rng.integers(0, 3)))
    times = [dict(zip(names, map(float, rng.uniform(0, 5, len(names))), strict=True)) for _ in range(2)]
    absorbed = tuple(
        Absorbed(edges[i].writer or "", str(rng.choice(names)), edges[i].readers)
        for i in range(min(len(edges), 2))
        if edges[i].writer is not None and edges[i].readers - {edges[i].writer}
    )
    return KernelChoice(*times, tuple(edges), needs, absorbed, float(rng.choice([0.0, 0.1])))


@pytest.mark.parametrize("seed", range(60))
def test_no_subset_is_faster(seed: int) -> None:
    choice = _random(seed)
    names = list(choice.in_float)
    subsets = [set(part) for size in range(len(names) + 1) for part in combinations(names, size)]
    least = min(cost(choice, part) for part in subsets)
    chosen = choose_nodes(choice)
    # Flows are sums of the same seconds in another order.
    assert cost(choice, chosen) == pytest.approx(least, rel=1e-12, abs=1e-12)


def test_a_chain_is_worth_its_conversions_only_as_a_whole() -> None:
    def chain(length: int) -> set[str]:
        names = [f"n{i}" for i in range(length)]
        edges = [Edge(None, frozenset({names[0]}), False, 1.0, 1.0), Edge(names[-1], frozenset(), True, 1.0, 1.0)]
        edges += [Edge(a, frozenset({b}), False, 1.0, 1.0) for a, b in pairwise(names)]
        return choose_nodes(KernelChoice(dict.fromkeys(names, 2.0), dict.fromkeys(names, 1.0), tuple(edges)))

    assert not chain(2)  # 2 seconds gained, 2 spent
    assert chain(3) == {"n0", "n1", "n2"}


def test_a_slow_group_among_integers_takes_a_neighbour_with_it_into_float() -> None:
    """For ONNX Runtime would compute it in integers all the same."""
    edges = (Edge("a", frozenset({"b"}), False, 0.1, 0.1), Edge("b", frozenset({"c"}), False, 0.1, 0.1))
    in_float, in_integers = {"a": 5.0, "b": 1.0, "c": 3.0}, {"a": 1.0, "b": 9.0, "c": 1.0}
    assert choose_nodes(KernelChoice(in_float, in_integers, edges)) == {"a", "c"}
    assert choose_nodes(KernelChoice(in_float, in_integers, edges, absorbed=(Absorbed("b", "a", frozenset("c")),))) == {
        "a"
    }


def test_equal_times_stay_in_float() -> None:
    assert not choose_nodes(KernelChoice({"n": 1.0}, {"n": 1.0}, ()))
    assert choose_nodes(KernelChoice({"n": 1.0}, {"n": 0.95}, ())) == {"n"}
    assert not choose_nodes(KernelChoice({"n": 1.0}, {"n": 0.95}, (), gain=0.1))
