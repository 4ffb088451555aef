"""front_ends: what a model computes of its inputs before its first layers stays in float where codes would lose it.

    sound --> frames --> DFT --> re^2 + im^2 --> mel filters --> Log --> layers
    image, 0 ... 65535 --> Sub, Div, Clip --> layers

One scale gives a spectrum 255 equal steps, and most of its values are less than one of them: what the logarithm, or a
root, makes of these is lost. So is a picture of which a Clip takes a small part.

    kept = 10 log10( var(f(x)) / mean((f(q(x)) - f(x))^2) )      q rounds to the codes of one scale over all of x

A front end is found by its form: operators that keep orders of magnitude, from float inputs of the model to the
logarithm or root f; or arithmetic with constants, from an input to what else reads it. It stays in float by its ranges:
where `kept` is low on the first samples. Without samples the form decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.onnx.calibration.calibrate import model_session, repeatable
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.joined_ends import leave_joined_ends
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.model_file import constant, is_constant, live_inputs
from quark.onnx.graph.sessions import run_sample
from quark.onnx.operators import LAYERS, RULES
from quark.onnx.placement.kernels import keeps_orders

SAMPLES = 4
"""Samples on which it is looked for what codes keep."""
_LEAST, _LEAST_WITHOUT_LAYERS = 20.0, 30.0
"""dB: below it, the noise has more than a tenth of the size of what a front end gives.

Without layers, it takes no time that integers save."""
_SPECTRA = ("STFT", "DFT", "Concat", "Log")
"""Op types of a front end beside those that keep orders of magnitude."""
_ARITHMETIC = ("Sub", "Add", "Mul", "Div", "Min", "Max", "Clip", "Cast")


@dataclass(frozen=True)
class _FrontEnd:
    """A part of a graph that computes of its inputs alone.

    Attributes:
        nodes: All of it.
        rounded: The tensor that is rounded: what the logarithm or root reads, or an input of the model.
        results: What `kept` is of: tensors, or the logarithm or root.
    """

    nodes: frozenset[ir.Node]
    rounded: ir.Value
    results: tuple[ir.Value, ...]

    @property
    def curve(self) -> ir.Node | None:
        """The logarithm or root; None where results are of arithmetic."""
        node = self.results[0].producer()
        return None if self.rounded.is_graph_input() else node

    @property
    def least(self) -> float:
        """In dB, the least that codes must keep of it."""
        return _LEAST if any(is_op(node, *LAYERS) for node in self.nodes) else _LEAST_WITHOUT_LAYERS


def leave_ends(prepared: Prepared, settings: Settings) -> tuple[Prepared, Settings]:
    """The model with data to go on with, and the settings without the nodes at both ends that codes would lose.

    Args:
        prepared: The float model, not changed. The first few samples of its data are run, and are stored, where the
            graph has such ends.
        settings: With static activations; others have no scales to share.
    """
    if settings.ends_decided:
        return prepared, settings
    prepared, settings = leave_joined_ends(prepared, replace(settings, ends_decided=True))
    ends, codes = list(front_ends(prepared.model)), _codes(settings)
    named = {*settings.specs.nodes, *dict(settings.specs.overrides)}
    ends = [end for end in ends if not {node.name for node in end.nodes} & named] if codes else []
    if not ends:
        return prepared, settings
    data = repeatable(prepared.data, prepared.model, settings)
    names = set[str]()
    kept = [None] * len(ends) if data is None else _kept(prepared.model, ends, data, codes, settings)
    for end, sqnr in zip(ends, kept, strict=True):
        if sqnr is None or sqnr < end.least:
            own = {node.name or "" for node in end.nodes}
            _tell(end, sorted(own - names), sqnr, codes)
            names |= own
    specs = settings.specs
    left = replace(settings, specs=replace(specs, exclude=(*specs.exclude, frozenset(names)))) if names else settings
    return replace(prepared, data=data), left


def _tell(end: _FrontEnd, names: Sequence[str], sqnr: float | None, codes: int) -> None:
    what = f"the {end.curve.op_type} {end.curve.name}" if end.curve else f"what is computed of {end.rounded.name}"
    why = "no samples show its range" if sqnr is None else f"{codes} codes would keep {sqnr:.1f} dB of it"
    if names:
        logger.info("In float, as %s is a front end and %s: %s.", what, why, ", ".join(names))


def _codes(settings: Settings) -> int:
    """How many codes a spectrum has: a product with rounded weights is off by their steps, and its square twice."""
    layer = settings.specs.layer
    if settings.specs.weights_apart or layer.input is None or not layer.input.has_zero_point or layer.input.dynamic:
        return 0
    bits = [layer.input.dtype.bits, *([2 * layer.weight.dtype.bits] if layer.weight is not None else [])]
    return int(2 ** min(bits))


def front_ends(model: ir.Model) -> Iterator[_FrontEnd]:
    """The parts of a graph that compute spectra of its inputs, and those that do arithmetic with constants on them."""
    for curve in filter(_is_curve, model.graph):
        spectrum, before = curve.inputs[0], _before(curve)
        if spectrum is not None and before:
            yield _FrontEnd(frozenset(before), spectrum, (curve.outputs[0],))
    for value in model.graph.inputs:
        if value.dtype is ir.DataType.FLOAT and not is_constant(value):
            nodes, results = _arithmetic_of(value)
            if results and any(not is_op(node, "Cast") and not RULES[node.op_type].moves(node) for node in nodes):
                yield _FrontEnd(frozenset(nodes), value, tuple(results))


def _is_curve(node: ir.Node) -> bool:
    """Return True where a node is a logarithm or a root: it is steepest where its input is smallest."""
    exponent = _exponent(node)
    return is_op(node, "Log", "Sqrt") or (exponent is not None and 0 < exponent < 1)


def _exponent(node: ir.Node) -> float | None:
    array = constant(node.inputs[1]) if is_op(node, "Pow") and is_constant(node.inputs[1]) else None
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _before(curve: ir.Node) -> set[ir.Node]:
    """A curve and what is lost before it; empty where something that reaches it does not keep orders of magnitude.

    A square root gives back what was squared, so what is before the squares loses no more than the result may.
    """
    whole = _walk(curve, past_squares=True)
    return whole if not whole or not is_op(curve, "Sqrt") else _walk(curve, past_squares=False)


def _walk(curve: ir.Node, past_squares: bool) -> set[ir.Node]:
    """A curve and all before it, up to inputs of the model; empty where that holds a node of another kind."""
    found, waiting = {curve}, [curve.inputs[0]]
    while waiting:
        value = waiting.pop()
        if value is None or is_constant(value) or value.dtype not in (None, ir.DataType.FLOAT):
            continue
        node = value.producer()
        if value.is_graph_input() or node in found:
            continue
        if node is None or not (keeps_orders(node) or is_op(node, *_SPECTRA)):
            return set()
        found.add(node)
        if past_squares or not _squares(node):
            waiting.extend(node.inputs)
    return found


def _squares(node: ir.Node) -> bool:
    same = is_op(node, "Mul") and node.inputs[0] is node.inputs[1]
    return same or is_op(node, "ReduceSumSquare") or _exponent(node) == 2


def _arithmetic_of(value: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes that compute with constants alone of an input, and the tensors of these that other nodes read."""
    nodes, results, waiting = list[ir.Node](), list[ir.Value](), [value]
    while waiting:
        value = waiting.pop()
        readers = [use.node for use in value.uses()]
        own = [node for node in readers if _is_arithmetic(node, value)]
        if (len(own) < len(readers) or value.is_graph_output()) and value.producer() is not None:
            results.append(value)
        nodes += own
        waiting += [output for node in own for output in node.outputs]
    return nodes, results


def _is_arithmetic(node: ir.Node, value: ir.Value) -> bool:
    moves = node.op_type in RULES and RULES[node.op_type].moves(node)
    return (is_op(node, *_ARITHMETIC) or moves) and live_inputs(node) == [value]


def _kept(
    model: ir.Model, ends: Sequence[_FrontEnd], data: Iterable[Feed], codes: int, settings: Settings
) -> list[float | None]:
    """In dB, what codes keep of what each front end gives; None where no sample shows it."""
    feeds = list(itertools.islice(data, SAMPLES))
    names = dict.fromkeys(value.name or "" for end in ends for value in (end.rounded, *end.results))
    asked = [name for name in names if feeds and name not in feeds[0]]
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    with model_session(model, asked, settings, once=True) as session:

        def run(names: list[str], feed: Feed) -> Feed:
            return dict(zip(names, run_sample(session, names, feed, options), strict=True))

        before = [run(asked, feed) | feed for feed in feeds]
        return [_kept_of(end, feeds, before, codes, run) for end in ends] if feeds else [None] * len(ends)


def _kept_of(
    end: _FrontEnd, feeds: Sequence[Feed], before: Sequence[Feed], codes: int, run: Callable[[list[str], Feed], Feed]
) -> float:
    """In dB, what codes keep of what one front end gives.

    Args:
        end: The front end.
        feeds: The samples.
        before: The tensors of it for each.
        codes: Of one scale.
        run: (names of tensors, a sample) -> these tensors.
    """
    rounded = _rounded([np.asarray(arrays[end.rounded.name or ""]) for arrays in before], codes)
    results = [value.name or "" for value in end.results]
    if end.curve is not None:
        after = [{results[0]: _computed(end.curve, array)} for array in rounded]
    else:
        after = [run(results, feed | {end.rounded.name or "": x}) for feed, x in zip(feeds, rounded, strict=True)]
    return min(_sqnr([b[name] for b in before], [a[name] for a in after]) for name in results)


def _rounded(arrays: Sequence[NumpyArray], codes: int) -> list[NumpyArray]:
    """Arrays as the codes of one scale over all of them give them back."""
    low = min(0.0, *(float(array.min(initial=0)) for array in arrays))
    step = (max(0.0, *(float(array.max(initial=0)) for array in arrays)) - low) / (codes - 1)
    if not (math.isfinite(step) and step > 0):
        return list(arrays)
    return [(np.round((array - low) / step) * step + low).astype(array.dtype) for array in arrays]


def _computed(curve: ir.Node, array: NumpyArray) -> NumpyArray:
    """The output of a logarithm or root for an array."""
    with np.errstate(all="ignore"):
        exponent = _exponent(curve)
        if exponent is not None:
            return np.asarray(np.power(array, exponent))
        return np.asarray(np.log(array) if is_op(curve, "Log") else np.sqrt(array))


def _sqnr(before: Sequence[NumpyArray], after: Sequence[NumpyArray]) -> float:
    """In dB, of what varies; -inf where what was finite is not."""
    x, y = (np.concatenate([array.ravel() for array in arrays]).astype(np.float64) for arrays in (before, after))
    finite = np.isfinite(x)
    x, y = x[finite], y[finite]
    signal, noise = (x.var(), float(np.mean((y - x) ** 2))) if x.size else (0.0, 0.0)
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf
