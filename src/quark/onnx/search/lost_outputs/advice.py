"""advice: which nodes in float bring a lost model back, tried before it is given.

The nodes that lose most are left in float with all that makes or reads the tensors that they lose it in: a tensor has
codes as long as one of these is quantized. What is lost then names the next ones, a few times over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from quark.base.log import logger, severity
from quark.errors import QuarkError
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.evaluation.compare_models import damaged_layers
from quark.onnx.graph.model_file import is_constant, to_proto
from quark.onnx.search.lost_outputs.verdict import Damage

BLAMED = 3
"""Nodes that an error names for what they lose, and that are excluded at once."""
TRIES = 4
"""Quantizations that are tried."""
LOOKED = 8
"""Samples on which it is looked for what nodes lose."""

Retry = Callable[[frozenset[str]], tuple[onnx.ModelProto, Damage | None]]
"""Quantizes without some nodes: the model, and what is left of its outputs."""


@dataclass(frozen=True)
class Advice:
    """What may help.

    Attributes:
        blamed: Names of the nodes that lose most, worst first.
        losses: What comes to each, and what it gives, in words.
        nodes: Nodes that bring the outputs back, if they stay in float; or that were tried in vain.
        tried: What is left with these in float; None where nothing was tried.
    """

    blamed: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tried: Damage | None = None

    @property
    def blame(self) -> str:
        """Where most is lost, a sentence with a space behind; nothing where no node is blamed."""
        shown = "; ".join(f"{node} ({loss})" for node, loss in zip(self.blamed, self.losses, strict=True))
        vain = "" if self.tried is None or not self.tried.lost else (
            f"Excluding {len(self.nodes)} nodes that lose most was tried and does not help ({self.tried}). "
        )  # fmt: skip
        return f"{f'Most is lost at {shown}. ' if shown else ''}{vain}"

    @property
    def exclusion(self) -> str:
        """What to exclude, with a comma behind; nothing where that was not tried, or does not help."""
        if self.tried is None or self.tried.lost:
            return ""
        return f"exclude {', '.join(self.nodes)} (tried: {self.tried}), "


def exclusion_that_helps(
    model: ir.Model, quantized: onnx.ModelProto | Path, feeds: Sequence[Feed], retry: Retry | None
) -> Advice:
    """Find the nodes that lose most, and those without which the outputs are not lost.

    Args:
        model: The float model, with the names that a user can exclude.
        quantized: What was made of it.
        feeds: Samples.
        retry: What quantizes without some nodes; None to try nothing.
    """
    source, chosen, advice = to_proto(model), list[str](), Advice()
    feeds = feeds[:: -(-len(feeds) // LOOKED)]
    for _ in range(TRIES):
        # It adds outputs to what it is given.
        copied = onnx.ModelProto()
        copied.CopyFrom(source)
        layers = damaged_layers(copied, quantized, feeds)
        names = _makers(model, [layer.tensor for layer, _ in layers])
        if not advice.blamed:
            blamed = {names[layer.tensor]: (layer, before) for layer, before in reversed(layers[:BLAMED])}
            losses = [f"{before:.1f} dB -> {layer.sqnr:.1f}" for layer, before in reversed(blamed.values())]
            advice = Advice(tuple(reversed(blamed)), tuple(losses))
        worst = [layer.tensor for layer, _ in layers if _around(model, [layer.tensor]) - set(chosen)][:BLAMED]
        if retry is None or not worst:
            return advice
        chosen += sorted(_around(model, worst) - set(chosen))
        try:
            with severity(2):
                quantized, left = retry(frozenset(chosen))
        except QuarkError as error:
            logger.debug(f"Nothing is left to try: {error}")
            return advice
        if left is None:
            return advice
        advice = Advice(advice.blamed, advice.losses, tuple(chosen), left)
        if not left.lost:
            return advice
    return advice


def _makers(model: ir.Model, tensors: Iterable[str]) -> dict[str, str]:
    """Tensor -> the node of the user's model that makes it."""
    wanted = set(tensors)
    return {value.name: node.name or "" for node in model.graph for value in node.outputs if value.name in wanted}


def _around(model: ir.Model, tensors: Sequence[str]) -> set[str]:
    """The nodes that make some tensors, and all that make or read these and what those nodes read."""
    made = [value for node in model.graph for value in node.outputs if value.name in tensors]
    read = [value for each in made for value in _inputs(each) if value is not None and not is_constant(value)]
    nodes = set[ir.Node]().union(*(_neighbours(value) for value in (*made, *read)))
    return {node.name or "" for node in nodes if node.graph is model.graph}


def _inputs(value: ir.Value) -> Sequence[ir.Value | None]:
    node = value.producer()
    return () if node is None else node.inputs


def _neighbours(value: ir.Value) -> set[ir.Node]:
    """The node that makes a tensor, and those that read it."""
    producer = value.producer()
    return {use.node for use in value.uses()} | ({producer} if producer is not None else set())
