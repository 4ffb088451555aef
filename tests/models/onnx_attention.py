"""Blocks of attention whose masks come by every road that exporters take, and with every number that they write."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models.onnx_zoo import Array, Builder

LENGTH, WIDTH, HEADS = 12, 32, 4
SIZE = WIDTH // HEADS
VALUES = (-1e2, -1e4, -65504.0, -1e9, -3.4028234663852886e38, -math.inf)
"""Of Swin, BERT, float16, TensorFlow and T5, the most negative float, and what is none."""


class Block(Builder):
    """A builder that knows how its opset takes axes."""

    opset = 17

    def over(self, op_type: str, x: str, axes: list[int], output: str, since: int) -> str:
        """A node with axes: an input since this opset, an attribute before."""
        if self.opset < since:
            return self.node(op_type, [x], output, axes=axes)
        return self.node(op_type, [x, self.integers(f"{output}_axes", axes)], output)


Road = Callable[[Block, str, float], str]
"""From the scores (n, heads, length, length) to what the softmax reads, for the number of the mask."""


def _causal(value: float) -> Array:
    return np.triu(np.full((1, 1, LENGTH, LENGTH), value), 1) if math.isfinite(value) else _where_above(value)


def _where_above(value: float) -> Array:
    return np.where(np.triu(np.ones((1, 1, LENGTH, LENGTH)), 1) > 0, value, 0.0)


def _kept(b: Block) -> str:
    """1 where `attention_mask` (n, length) keeps a position, float32, as (n, 1, 1, length)."""
    rows = b.over("Unsqueeze", "attention_mask", [1, 2], "kept_rows", 13)
    return b.node("Cast", [rows], "kept", to=TensorProto.FLOAT)


def _padded(b: Block) -> str:
    return b.node("Equal", [_kept(b), b.constant("nothing", np.array(0.0))], "padded")


def _number(b: Block, value: float, name: str = "number") -> str:
    return b.constant(name, np.array(value))


def constant(b: Block, scores: str, value: float) -> str:
    return b.node("Add", [scores, b.constant("causal", _causal(value))], "masked")


def constant_with_bias(b: Block, scores: str, value: float) -> str:
    """Relative positions and the mask in one constant, as T5 has them."""
    bias = b.random.normal(size=(1, HEADS, LENGTH, LENGTH))
    return b.node("Add", [scores, b.constant("causal", bias + _causal(value))], "masked")


def given(b: Block, scores: str, value: float) -> str:
    """An input of the model, (n, 1, 1, length)."""
    return b.node("Add", [scores, "mask"], "masked")


def computed(b: Block, scores: str, value: float) -> str:
    """(1 - m) * number."""
    gone = b.node("Sub", [_number(b, 1.0, "one"), _kept(b)], "gone")
    return b.node("Add", [scores, b.node("Mul", [gone, _number(b, value)], "added")], "masked")


def subtracted(b: Block, scores: str, value: float) -> str:
    """s m - (1 - m) * -number."""
    kept = _kept(b)
    gone = b.node("Sub", [_number(b, 1.0, "one"), kept], "gone")
    gone = b.node("Mul", [gone, _number(b, -value)], "taken")
    return b.node("Sub", [b.node("Mul", [scores, kept], "kept_scores"), gone], "masked")


def filled(b: Block, scores: str, value: float) -> str:
    return b.node("Where", [_padded(b), _number(b, value), scores], "masked")


def filled_and_added(b: Block, scores: str, value: float) -> str:
    mask = b.node("Where", [_padded(b), _number(b, value), _number(b, 0.0, "zero")], "added")
    return b.node("Add", [mask, scores], "masked")


def chained(b: Block, scores: str, value: float) -> str:
    """A bias of positions, a causal mask and one of padding, the masks added up first and bounded as in OPT."""
    bias = b.constant("bias", b.random.normal(size=(1, HEADS, LENGTH, LENGTH)))
    half = value / 2 if abs(value) > 1e30 else value
    pad = b.node("Where", [_padded(b), _number(b, half), _number(b, 0.0, "zero")], "pad")
    both = b.node("Add", [b.constant("causal", _causal(half)), pad], "both")
    total = b.node("Add", [b.node("Add", [scores, bias], "biased"), both], "total")
    return b.node("Max", [total, _number(b, max(value, -3.4e38), "lowest")], "masked")


def cast(b: Block, scores: str, value: float) -> str:
    """Made as float64, and moved before it is added."""
    b.initializers.append(numpy_helper.from_array(_causal(value)[0, 0], "causal64"))
    mask = b.node("Cast", ["causal64"], "causal32", to=TensorProto.FLOAT)
    mask = b.over("Unsqueeze", mask, [0, 1], "causal", 13)
    return b.node("Add", [scores, mask], "masked")


def scaled(b: Block, scores: str, value: float) -> str:
    """Divided after the mask, and moved."""
    total = b.node("Add", [scores, b.constant("causal", _causal(value))], "total")
    total = b.node("Div", [total, b.constant("temperature", np.array(0.8))], "divided")
    b.integers("flat_shape", [-1, HEADS * LENGTH, LENGTH])
    return b.node("Reshape", [total, "flat_shape"], "masked")


def sliced(b: Block, scores: str, value: float) -> str:
    """A stored mask for longer texts, of which a part is taken, and filled in."""
    big = np.tril(np.ones((1, 1, 2 * LENGTH, 2 * LENGTH), bool))
    b.initializers.append(numpy_helper.from_array(big, "buffer"))
    names = [b.integers(n, v) for n, v in (("starts", [0, 0]), ("ends", [LENGTH, LENGTH]), ("axes", [2, 3]))]
    part = b.node("Slice", ["buffer", *names], "part")
    return b.node("Where", [part, scores, _number(b, value)], "masked")


def slopes(b: Block, scores: str, value: float) -> str:
    """ALiBi: what is far off is as good as masked, the last slope reaching the number."""
    steep = np.array([1.0, 1e-1, 1e-2, 1e-2]).reshape(1, HEADS, 1, 1) * min(-value, 1e4) / LENGTH
    distance = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))
    return b.node("Add", [scores, b.constant("alibi", -steep * distance)], "masked")


_ADDED = (constant, constant_with_bias, given, computed, subtracted, filled_and_added, chained, cast, scaled, slopes)
ROADS: dict[str, Road] = {road.__name__: road for road in (*_ADDED, filled, sliced)}
MULTIPLIED = ("computed", "subtracted")
"""0 times -inf would be NaN."""


def _softmax(b: Block, x: str) -> str:
    return b.node("Softmax", [x], "weights", axis=-1)


def _written_out(b: Block, x: str) -> str:
    powers = b.node("Exp", [b.node("Sub", [x, b.over("ReduceMax", x, [-1], "most", 18)], "below")], "powers")
    total = b.over("ReduceSum", powers, [-1], "sum", 13)
    return b.node("Div", [powers, total], "weights")


def _logarithm(b: Block, x: str) -> str:
    return b.node("Exp", [b.node("LogSoftmax", [x], "logs", axis=-1)], "weights")


SOFTMAXES = {"Softmax": _softmax, "written out": _written_out, "LogSoftmax": _logarithm}


def attention(road: str, value: float, softmax: str = "Softmax", opset: int = 17) -> onnx.ModelProto:
    """x (n, length, width) and a mask to y (n, length, width): one block of self-attention and its output layer.

    Args:
        road: Of `ROADS`.
        value: The number of the mask.
        softmax: Of `SOFTMAXES`.
        opset: Of the model.
    """
    b = Block()
    b.opset = opset

    def linear(x: str, name: str) -> str:
        weight = b.constant(f"{name}_w", b.random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)))
        bias = b.constant(f"{name}_b", b.random.normal(0, 0.1, WIDTH))
        return b.node("Add", [b.node("MatMul", [x, weight], f"{name}_product"), bias], name)

    def heads(name: str, perm: tuple[int, ...]) -> str:
        return b.node("Transpose", [b.node("Reshape", [linear("x", name), "split"], f"{name}s")], f"{name}h", perm=perm)

    b.integers("split", [0, LENGTH, HEADS, SIZE])
    b.integers("joined", [0, LENGTH, WIDTH])
    query, key, value_heads = (heads(n, p) for n, p in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))))
    scores = b.node("MatMul", [query, key], "products")
    scores = b.node("Mul", [scores, b.constant("scale", np.array(SIZE**-0.5))], "scores")
    weights = SOFTMAXES[softmax](b, ROADS[road](b, scores, value))
    if road == "scaled":
        weights = b.node("Reshape", [weights, b.integers("heads", [-1, HEADS, LENGTH, LENGTH])], "weights4")
    mixed = b.node("Transpose", [b.node("MatMul", [weights, value_heads], "mixed")], "turned", perm=(0, 2, 1, 3))
    out = linear(b.node("Reshape", [mixed, "joined"], "rows_again"), "out")
    b.node("Identity", [out], "y")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", LENGTH, WIDTH])]
    read = {name for node in b.nodes for name in node.input}
    if "attention_mask" in read:
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["n", LENGTH]))
    if "mask" in read:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", 1, 1, LENGTH]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", LENGTH, WIDTH])]
    graph = helper.make_graph(b.nodes, "attention", inputs, outputs, b.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def attention_feeds(model: onnx.ModelProto, value: float, count: int = 8, seed: int = 0) -> list[dict[str, Array]]:
    """Samples of two texts each; the second one ends early."""
    random, names = np.random.default_rng(seed), {entry.name for entry in model.graph.input}
    feeds = []
    for _ in range(count):
        feed = {"x": random.normal(size=(2, LENGTH, WIDTH)).astype(np.float32)}
        kept = np.ones((2, LENGTH), np.int64)
        kept[1, random.integers(4, LENGTH - 1) :] = 0
        if "attention_mask" in names:
            feed["attention_mask"] = kept
        if "mask" in names:
            feed["mask"] = np.where(kept[:, None, None] > 0, 0, value).astype(np.float32)
        feeds.append(feed)
    return feeds
