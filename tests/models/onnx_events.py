"""Small detectors of rare events, and data in which few samples hold one.

A template in noise is an event. `spoiled`: beside the features that tell stands one that is thousands of times as large
and tells nothing, so that 8 bits for all leave the others no code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tests.models.onnx_zoo import Array, Builder

Decide = Callable[[Array], Array]


@dataclass(frozen=True)
class EventCase:
    """A detector.

    Attributes:
        model: The float model.
        feeds: Its data.
        decide: An output -> the decisions that are taken by it, as truth values or labels.
    """

    model: onnx.ModelProto
    feeds: list[dict[str, Array]]
    decide: Decide


KINDS = ("probability", "logit", "classes", "labels", "map", "joined", "regression", "flags")


def event_case(kind: str, seed: int, spoiled: bool, count: int = 120) -> EventCase:
    """A detector of a kind, with an event in about one sample of 20 to 60."""
    random = np.random.default_rng(seed)
    b = Builder(seed)
    size = 24
    template = random.normal(size=size)
    template /= np.linalg.norm(template)
    rate = random.uniform(1 / 60, 1 / 20)
    events = random.random(count) < rate
    events[random.integers(count // 2, count)] = True
    events[:2] = False
    shape = (count, 12, size) if kind == "map" else (count, 1, size)
    x = random.normal(0, 0.3, shape)
    x[events, random.integers(0, shape[1], events.sum())] += 6 * template
    features = np.stack([template, *random.normal(0, 0.2, (7, size))], 1)
    if spoiled:
        features[:, -1] *= random.uniform(2e3, 2e4)
    hidden = b.node("Relu", [b.node("MatMul", ["x", b.constant("w1", features)], "f")], "h")
    read = np.zeros((8, 1))
    read[0] = 4.0
    score = b.node(
        "Add", [b.node("MatMul", [hidden, b.constant("w2", read)], "s"), b.constant("t", np.array([-12.0]))], "logit"
    )
    outputs, decide = _end(b, kind, score, hidden)
    rows = shape[1]
    model = b.model({"x": ["n", rows, size]}, {outputs: _shape(kind, rows)})
    if kind in ("labels", "flags"):
        model.graph.output[0].type.tensor_type.elem_type = {"labels": 7, "flags": 9}[kind]
    return EventCase(model, [{"x": one[None].astype(np.float32)} for one in x], decide)


def _shape(kind: str, rows: int) -> list[Any]:
    last = {"classes": 4, "joined": 5}.get(kind, 1)
    return ["n", rows] if kind == "labels" else ["n", rows, last]


def _end(b: Builder, kind: str, score: str, hidden: str) -> tuple[str, Decide]:
    """What is made of the logit of an event."""
    if kind in ("probability", "map"):
        return b.node("Sigmoid", [score], "y"), lambda y: y > 0.5
    if kind == "logit":
        return b.node("Identity", [score], "y"), lambda y: y > 0
    if kind == "flags":
        return b.node("Greater", [score, b.constant("zero", np.array(0.0))], "y"), lambda y: y
    if kind == "regression":
        return b.node("Relu", [score], "y"), lambda y: y > 2
    others = b.constant("w3", np.concatenate([np.zeros((8, 1)), b.random.normal(0, 0.05, (8, 2))], 1)[:, :3])
    if kind in ("classes", "labels"):
        rest = b.node("MatMul", [hidden, others], "others") if kind == "none" else b.node(
            "Mul", [score, b.constant("against", np.array([-1.0, -0.6, -0.3]))], "others"
        )  # fmt: skip
        joined = b.node("Softmax", [b.node("Concat", [score, rest], "all", axis=-1)], "p", axis=-1)
        if kind == "labels":
            return b.node("ArgMax", [joined], "y", axis=-1, keepdims=0), lambda y: y
        return b.node("Identity", [joined], "y"), lambda y: y.argmax(-1)
    boxes = b.node(
        "Relu", [b.node("MatMul", [hidden, b.constant("w4", b.random.uniform(20, 200, (8, 4)))], "b")], "box"
    )
    scores = b.node("Sigmoid", [score], "score")
    return b.node("Concat", [boxes, scores], "y", axis=-1), lambda y: y[..., 4:] > 0.5
