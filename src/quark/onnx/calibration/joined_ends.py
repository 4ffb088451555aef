"""joined_ends: a Concat at the end of a model stays in float where one scale would cost one of its parts its values.

    boxes, 0 ... 640 --+
                       Concat --> output        one scale of 8 bits: a step of 2.5, and every score is 0 or 2.5
    scores, 0 ... 1  --+

What joins, and what moves the joined tensor on to the outputs or takes parts of it, computes nothing: in float it takes
no time that integers would save, and each part keeps the scale that it has before. A tensor that something computes
with as a whole is left as it is: there the integer kernel needs one scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.errors import NothingToQuantizeError
from quark.onnx.calibration.calibrate import model_session, repeatable
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant, live_inputs
from quark.onnx.graph.sessions import run_sample
from quark.onnx.placement.dual_pairs import source_name
from quark.onnx.placement.place import place

SAMPLES = 2
"""Samples on which ranges of parts are compared: these differ by hundreds where they differ in kind."""
_FEWEST_CODES = 64
"""Codes that a part needs of those of the joined tensor: with 6 bits of 8 it loses 12 dB."""
_PASSES_ON = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Concat")
_TAKES_PARTS = ("Slice", "Split", "Gather")
"""Chosen among op types that move data: those that keep every value, and those that exporters part outputs with."""


@dataclass(frozen=True)
class _JoinedEnd:
    """A Concat whose tensor is not computed with as a whole.

    Attributes:
        node: The Concat.
        after: It, what passes its tensor on, and what takes parts of that.
        codes: How many codes the joined tensor has.
    """

    node: ir.Node
    after: frozenset[ir.Node]
    codes: int


def leave_joined_ends(prepared: Prepared, settings: Settings) -> tuple[Prepared, Settings]:
    """The model with data to go on with, and the settings without the nodes that join parts of other ranges.

    Args:
        prepared: The float model, not changed. The first few samples of its data are run, and are stored where the
            graph ends in such a node.
        settings: With static activations; others have no scales to share.
    """
    model = prepared.model
    ends = list(joined_ends(model, settings))
    data = repeatable(prepared.data, model, settings) if ends else None
    if data is None:
        return prepared, settings
    first = list(itertools.islice(data, SAMPLES))
    return replace(prepared, data=data), _without_mixed(model, ends, first, settings)


def _without_mixed(model: ir.Model, ends: Sequence[_JoinedEnd], feeds: Sequence[Feed], settings: Settings) -> Settings:
    ranges = _ranges(model, ends, feeds, settings)
    names = {node.name or "" for end in ends if _costs_a_part(end, ranges) for node in end.after}
    if not names:
        return settings
    logger.info(
        "In float, as they join tensors of other ranges and nothing computes with the whole: %s.",
        ", ".join(sorted(names)),
    )
    specs = settings.specs
    return replace(settings, specs=replace(specs, exclude=(*specs.exclude, frozenset(names))))


def joined_ends(model: ir.Model, settings: Settings) -> Iterator[_JoinedEnd]:
    """The quantized Concats of a model whose tensor only outputs and takers of parts read."""
    # Placing takes longer than looking where a Concat leads, which in most models computes shapes.
    if settings.specs.weights_apart or not any(
        is_op(n, "Concat") and _nodes_after(n, frozenset()) for n in model.graph
    ):
        return
    copied = model.clone()
    try:
        placement = place(copied, settings)
    except NothingToQuantizeError:
        return
    named, quantized = {*settings.specs.nodes, *dict(settings.specs.overrides)}, frozenset(placement.nodes)
    for node in placement.nodes:
        if is_op(node, "Concat") and len(live_inputs(node)) > 1 and not {node.name, node.outputs[0].name} & named:
            after = _nodes_after(node, quantized)
            values = placement.quantized(value for node in after for value in node.outputs)
            if values and (spec := placement.activations[values[0]]).needs_calibration:
                yield _JoinedEnd(node, frozenset(after), 2**spec.dtype.bits)


def _nodes_after(node: ir.Node, quantized: frozenset[ir.Node]) -> set[ir.Node]:
    """A Concat and what passes its tensor on or takes parts of it; empty where integers compute with the whole."""
    found, waiting = {node}, [node]
    ends = False
    while waiting:
        for value in waiting.pop().outputs:
            ends = ends or value.is_graph_output()
            for reader in (use.node for use in value.uses()):
                if is_op(reader, *_TAKES_PARTS):
                    ends = True
                    found.add(reader)
                elif is_op(reader, *_PASSES_ON):
                    if reader not in found:
                        found.add(reader)
                        waiting.append(reader)
                elif reader in quantized:
                    return set()
    return found if ends else set()


def _ranges(
    model: ir.Model, ends: Sequence[_JoinedEnd], feeds: Sequence[Feed], settings: Settings
) -> Mapping[str, tuple[float, float]]:
    """The smallest and the largest value of each tensor that is joined, and 0."""
    joined = [value for end in ends for value in end.node.inputs if value is not None]
    found = {value.name or "": _range(constant(value)) for value in joined if is_constant(value)}
    names = list(dict.fromkeys(name for name in map(source_name, joined) if name not in found))
    padding = Padding.of(model)
    with model_session(model, names, settings) as session:
        for feed in feeds:
            made = [name for name in names if name not in feed]
            values = dict(zip(made, padding.at_real(feed, run_sample(session, made, feed)), strict=True)) | feed
            for name in names:
                low, high = _range(np.asarray(values[name]))
                known = found.get(name, (0.0, 0.0))
                found[name] = min(low, known[0]), max(high, known[1])
    return found


def _range(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[float, float]:
    finite = array[np.isfinite(array)]
    return min(0.0, float(finite.min(initial=0))), max(0.0, float(finite.max(initial=0)))


def _costs_a_part(end: _JoinedEnd, ranges: Mapping[str, tuple[float, float]]) -> bool:
    """True where one scale would leave too few codes to a part that is not all zero."""
    parts = [ranges[source_name(value)] for value in end.node.inputs if value is not None]
    step = (max(high for _, high in parts) - min(low for low, _ in parts)) / end.codes
    live = [ranges[source_name(value)] for value in live_inputs(end.node)]
    return any(0 < high - low < _FEWEST_CODES * step for low, high in live)
