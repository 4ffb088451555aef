"""One model for all trials: what a decision says of each tensor is fed, so that a trial is a run and loads nothing.

    activation x    y = s (q - z),  q = clip(rint(x / s) + z, low, high)
                      = DQ(Q(clip(x, s (low - z), s (high - z))))        Q/DQ of int16, whose ends no code passes
    constant w      the float values that its codes stand for

s, z, both bounds and the constants are inputs of the float model, as far as trials differ in them. A bound is a
multiple of s, which rounding leaves where it is, so that cutting off before it gives the code that cutting off after
it does. Codes from 0 to 65535 are moved by 2^15, and z with them.

The model runs in parts, cut where quantized tensors cross. What crosses under the first decision is kept: a trial
begins with the first part that it changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.core.dtypes import DTYPES
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.onnx.algorithms.quantized_layers import decoded
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.sliced_session import cut, cut_proto, tensor_bytes
from quark.onnx.config.settings import Settings
from quark.onnx.decide import Decision, decide, write
from quark.onnx.graph.edit import replace_output
from quark.onnx.graph.model_file import constant, opset, split_weights, to_proto
from quark.onnx.graph.sessions import ask_for, failing_on, open_session
from quark.onnx.operators import QDQ
from quark.onnx.placement.placement import Operand
from quark.onnx.qdq.activations import ActivationWriter
from quark.onnx.qdq.constants import bias_codes, bias_scale, bias_type
from quark.onnx.qdq.qdq_nodes import CONTRIB
from quark.onnx.qdq.write_qdq import drop_unused_constants
from quark.onnx.search.evaluator import Evaluator, OutputDistance, Scorer, one_number
from quark.onnx_ops.graph_writer import GraphWriter, free_name

PARTS = 12
"""About how many: each begins with a copy of what crosses, and what runs together is fused."""
_KEPT_BYTES = 1 << 27
"""Of tensors that cross under the first decision."""
HALF = 1 << 15
CODES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
_CLIP_OPSET = 11
"""From which on bounds are inputs."""


def _switchable(model: ir.Model, settings: Settings) -> bool:
    """Return True where decisions under settings, as they are written, change nothing of a model but its tensors."""
    special = settings.qdq.dual_pairs or settings.qdq.quantize_fp16 or settings.qdq.matmul_nbits is not None
    return not special and opset(model) >= _CLIP_OPSET


@dataclass(frozen=True)
class Number:
    """Scale and zero point of an activation, with the ends of its codes."""

    scale: float
    zero: int
    low: int
    high: int

    @property
    def code_type(self) -> ir.DataType | None:
        """The type that holds these codes and no others; None where there is none of its own."""
        return next((kind for kind in CODES if (kind.min, kind.max) == (self.low, self.high)), None)

    def arrays(self) -> list[NumpyArray]:
        """Smallest and largest value, scale and zero point of the int16 codes."""
        ends = [np.float32(self.scale * (code - self.zero)) for code in (self.low, self.high)]
        moved = HALF if self.high >= HALF else 0
        return [*map(np.asarray, ends), np.asarray(self.scale, np.float32), np.asarray(self.zero - moved, np.int16)]


@dataclass(frozen=True)
class Codes:
    """All that the codes of a constant depend on, beside its values.

    Attributes:
        params: Scale and zero point, to the bit.
        spec: Of the constant; of the weight beside it where it is a bias.
        data_scale: What the node of a bias reads has it; None of a constant with a scale of its own.
    """

    params: tuple[bytes, bytes]
    spec: TensorSpec
    data_scale: float | None = None


Key = ir.Value | Operand
"""An activation, or where a constant is read."""
State = dict[Key, Number | Codes]
"""The decision on each tensor."""


def _state_of(decision: Decision) -> State | None:
    """Return what a decision says of each tensor; None where something of it has no form here."""
    placement, qparams = decision.placement, decision.qparams
    if placement.dynamic:
        return None
    state: State = {}
    for value, spec in placement.activations.items():
        if not _is_linear(spec) or spec.dtype.bits > 16 or np.ndim(qparams.activations[placement.root(value)].scale):
            return None
        params, kind = qparams.activations[placement.root(value)], DTYPES[spec.dtype.name]
        zero = 0 if params.zero_point is None else int(params.zero_point)
        state[value] = Number(float(params.scale), zero, int(kind.min), int(kind.max))
    for operand, spec in placement.weights.items():
        if not _is_linear(spec):
            return None
        state[operand] = Codes(_bits(qparams.weights[operand]), spec)
    for operand, (weight, data) in _biases(decision).items():
        state[operand] = Codes(_bits(qparams.weights[weight]), placement.weights[weight], float(data.scale))
    return state


def _is_linear(spec: TensorSpec) -> bool:
    return spec.has_zero_point and not (spec.is_cast or spec.is_block or spec.float_zero_point)


def _bits(params: QParams) -> tuple[bytes, bytes]:
    zero = b"" if params.zero_point is None else np.asarray(params.zero_point).tobytes()
    return np.asarray(params.scale).tobytes(), zero


def _biases(decision: Decision) -> dict[Operand, tuple[Operand, QParams]]:
    """Each bias whose scale follows from others -> the weight, and the scale of what its node reads."""
    placement, qparams = decision.placement, decision.qparams
    found = {}
    for operand, weight in placement.weights_of_biases.items():
        data = weight[0].inputs[0]
        params = None if data is None else qparams.activations.get(placement.root(data))
        if data in placement.activations and params is not None and weight in qparams.weights:
            found[operand] = weight, params
    return found


@dataclass(frozen=True)
class Part:
    """Consecutive nodes.

    Attributes:
        session: Of them.
        feeds: The tensors of decisions that it reads -> the names of their inputs.
        reads: What it reads of the inputs of the model, and of the parts before.
        gives: What later parts read, or the output.
    """

    session: onnxruntime.InferenceSession
    feeds: dict[Key, list[str]]
    reads: list[str]
    gives: list[str]


class _SwitchedModel:
    """A float model that computes what the quantized ones of decisions do.

    Args:
        decision: The first; nothing is folded or written, and its model is not changed.
        state: What it says.
        others: What others say of the same tensors: those that differ are inputs.
        output: Name of the output that is wanted.
        data: The samples.
    """

    def __init__(self, decision: Decision, state: State, others: Sequence[State], output: str, data: Samples) -> None:
        self._first, self._nodes, self._output, self._data = state, set(decision.placement.nodes), output, data
        self._fixed = {key: one for key, one in state.items() if all(other[key] == one for other in others)}
        made = _Inputs(decision, self._fixed)
        self._inputs = made.names
        wanted = [value for value in made.model.graph.outputs if value.name == output]
        made.model.graph.outputs.clear()
        made.model.graph.outputs.extend(wanted)
        # Of the float model: inference knows no Q/DQ of com.microsoft.
        sizes = tensor_bytes(split_weights(decision.model)[0], list(made.quantized.values()), data[0])
        crossing = {name: sizes.get(source, 0) for name, source in made.quantized.items()}
        self._parts = self._cut(made.model, crossing)
        self._kept: dict[tuple[int, int], dict[str, onnxruntime.OrtValue]] = {}
        self._left, self._lock = _KEPT_BYTES, Lock()
        self._arrays: dict[Key, dict[Number | Codes, list[onnxruntime.OrtValue]]] = {}

    def fits(self, decision: Decision, state: State) -> bool:
        """Return True where another decision on the model differs in numbers alone, and in those that are inputs."""
        if state.keys() != self._first.keys() or set(decision.placement.nodes) != self._nodes:
            return False
        return all(state[key] == one for key, one in self._fixed.items())

    def run(self, decision: Decision, state: State, count: int, threads: int = 1) -> Iterator[list[NumpyArray]]:
        """The output under a decision, for one sample after another.

        Args:
            decision: One that fits.
            state: What it says.
            count: How many samples, from the first.
            threads: How many of them at once.
        """
        changed = {key for key, one in state.items() if one != self._first[key]}
        start = next((i for i, part in enumerate(self._parts) if not changed.isdisjoint(part.feeds)), len(self._parts))
        feeds = [self._feeds(part, decision, state) for part in self._parts]
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, count, threads):
                some = range(first, min(first + threads, count))
                yield from ([output] for output in pool.map(partial(self._run_sample, start, feeds), some))
        self._forget(state)

    def _run_sample(self, start: int, feeds: Sequence[Mapping[str, onnxruntime.OrtValue]], sample: int) -> NumpyArray:
        """The output for a sample; `start` is the first part that a decision changes, `feeds` what it says to each."""
        feed = self._data[sample]
        begin = max((i for i in range(1, start + 1) if (i, sample) in self._kept), default=0)
        values = dict(self._kept[begin, sample]) if begin else {name: _ort_value(x) for name, x in feed.items()}
        with failing_on(feed):
            for index in range(begin, len(self._parts)):
                part = self._parts[index]
                given = {name: values[name] for name in part.reads} | dict(feeds[index])
                values |= dict(zip(part.gives, part.session.run_with_ort_values(part.gives, given), strict=True))
                if index < start:
                    self._keep(index + 1, sample, values)
        return np.asarray(values[self._output].numpy())

    def _keep(self, index: int, sample: int, values: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Keep what the parts from one on read, as far as it was not changed; only as much as there is room for."""
        needed = {name for part in self._parts[index:] for name in part.reads} | {self._output}
        kept = {name: array for name, array in values.items() if name in needed}
        size = sum(value.tensor_size_in_bytes() for value in kept.values())
        with self._lock:
            if size <= self._left and (index, sample) not in self._kept:
                self._left -= size
                self._kept[index, sample] = kept

    def _feeds(self, part: Part, decision: Decision, state: State) -> dict[str, onnxruntime.OrtValue]:
        """Return the inputs of a part that a decision gives."""
        found: dict[str, onnxruntime.OrtValue] = {}
        with self._lock:
            for key, names in part.feeds.items():
                arrays, one = self._arrays.setdefault(key, {}), state[key]
                if one not in arrays:
                    arrays[one] = [
                        *map(_ort_value, one.arrays() if isinstance(one, Number) else [_decoded(decision, key)])
                    ]
                found |= dict(zip(names, arrays[one], strict=True))
        return found

    def _forget(self, state: State) -> None:
        """Drop constants that are neither those of the first decision nor of this one."""
        with self._lock:
            for key, arrays in self._arrays.items():
                for one in [one for one in arrays if one not in (self._first[key], state[key])]:
                    del arrays[one]

    def _cut(self, model: ir.Model, sizes: Mapping[str, int]) -> list[Part]:
        """The parts of a model, of which tensors of these bytes may cross from one to another."""
        proto, weights = split_weights(model)
        later, parts = {self._output}, list[Part]()
        for part in reversed(cut_proto(proto, model, cut(model, sizes, max(1, sum(sizes.values()) // PARTS)))):
            made = [name for node in part.graph.node for name in node.output]
            gives = [name for name in made if name in later]
            if gives:  # else it is for other outputs
                parts.insert(0, self._part(part, gives, weights))
                later = later.difference(made).union(parts[0].reads)
        return parts

    def _part(self, part: onnx.ModelProto, gives: list[str], weights: Mapping[str, NumpyArray]) -> Part:
        """A part that gives these tensors."""
        ask_for(part, gives)
        constants = {tensor.name for tensor in part.graph.initializer}
        own = {name: array for name, array in weights.items() if name in constants}
        session = open_session(part, threads=1, in_float=True, weights=own)  # samples run beside each other instead
        inputs = [entry.name for entry in part.graph.input]
        keys = {name: key for key, names in self._inputs.items() for name in names}
        feeds = {keys[name]: self._inputs[keys[name]] for name in inputs if name in keys}
        return Part(session, feeds, [name for name in inputs if name not in keys], gives)


class _Inputs:
    """Gives a copy of a float model the inputs through which decisions reach it.

    Args:
        decision: Which tensors there are.
        fixed: Those that stay as they are.

    Attributes:
        model: The copy.
        names: Activation, or where a constant is read -> the names of its inputs.
        quantized: Name of what comes out of Q/DQ -> the tensor that goes in.
    """

    def __init__(self, decision: Decision, fixed: State) -> None:
        self.model = decision.model.clone()
        self.names: dict[Key, list[str]] = {}
        self.quantized: dict[str, str] = {}
        self._writer = GraphWriter(self.model)
        self._taken = {value.name for node in self.model.graph for value in node.outputs}
        self._taken |= {value.name for value in (*self.model.graph.inputs, *self.model.graph.initializers.values())}
        counterparts = dict(zip(decision.model.graph, self.model.graph, strict=True))
        copies = dict(zip(decision.model.graph.inputs, self.model.graph.inputs, strict=True))
        for node, copied in counterparts.items():
            copies |= zip(node.outputs, copied.outputs, strict=True)
        placement = decision.placement
        for node, index in (*placement.weights, *_biases(decision)):
            values = _decoded(decision, (node, index)) if (node, index) in fixed else None
            copied, shape = counterparts[node], constant(node.inputs[index]).shape
            value = self._value(f"{copied.name}_{index}_decoded", ir.DataType.FLOAT, shape, values)
            copied.replace_input_with(index, value)
            self._add((node, index), [value])
        readers = ActivationWriter(GraphWriter(decision.model), decision.settings, placement, {})
        for value in placement.activations:
            uses, is_output = readers.reads(value)
            if uses or is_output:
                own = [(counterparts[node], index) for node, index in uses]
                self._add(value, self._add_pair(copies[value], fixed.get(value), own, is_output))
        drop_unused_constants(self.model.graph)
        self.model.graph.sort()

    def _add(self, key: Key, found: Sequence[ir.Value]) -> None:
        names = [value.name or "" for value in found if value.is_graph_input()]
        if names:
            self.names[key] = names

    def _value(self, name: str, kind: ir.DataType, shape: Sequence[int], array: NumpyArray | None) -> ir.Value:
        """A constant, or an input where there is no array."""
        if array is not None:
            return self._writer.constant(name, np.asarray(array, kind.numpy()))
        value = ir.val(free_name(name, self._taken), kind, ir.Shape(shape))
        self._taken.add(value.name)
        self.model.graph.inputs.append(value)
        return value

    def _add_pair(
        self, value: ir.Value, number: Number | Codes | None, uses: Sequence[Operand], is_output: bool
    ) -> list[ir.Value]:
        """Q/DQ between a tensor and those who read it; what they read beside it."""
        name, arrays = value.name or "", number.arrays() if isinstance(number, Number) else [None] * 4
        kinds = dict.fromkeys(("low", "high", "scale"), ir.DataType.FLOAT) | {"zero_point": ir.DataType.INT16}
        low, high, scale, zero = (
            self._value(f"{name}_{role}", kind, (), array)
            for (role, kind), array in zip(kinds.items(), arrays, strict=True)
        )
        x = value
        if isinstance(number, Number) and number.code_type is not None:
            zero = self._value(f"{name}_zero", number.code_type, (), np.asarray(number.zero))
        else:
            x = self._writer.node("Clip", [x, low, high], f"{name}_Clip")
        for op_type in QDQ:
            x = self._writer.node(op_type, [x, scale, zero], f"{name}_{op_type}", domain=CONTRIB)
        self._writer.insert_after(value.producer())
        x.type, x.shape = value.type, value.shape
        for node, index in uses:
            node.replace_input_with(index, x)
        if is_output:
            value.name, x.name = f"{x.name}_before", name
            replace_output(self.model.graph, value, x)
        self.quantized[x.name or ""] = name
        return [low, high, scale, zero]


def _ort_value(array: NumpyArray) -> onnxruntime.OrtValue:
    """An array as sessions take it without a copy."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def _decoded(decision: Decision, operand: Key) -> NumpyArray:
    """The float values that the codes of a constant stand for."""
    assert not isinstance(operand, ir.Value)
    node, index = operand
    array = np.asarray(constant(node.inputs[index]), np.float32)
    if operand in decision.placement.weights:
        return decoded(array, decision.qparams.weights[operand], decision.placement.weights[operand])
    weight, data = _biases(decision)[operand]
    dtype = bias_type(decision.settings)
    bias, scale = bias_scale(array, decision.qparams.weights[weight].scale, data.scale, dtype)
    return np.asarray(bias_codes(bias, scale, dtype) * scale, np.float32)


# Trials --------------------------------------------------------------------------------------------------------------


@dataclass
class SwitchedOutputs:
    """The outputs of quantized models, of one that all share where numbers alone differ; else it is quantized.

    All share one pass of calibration and one run of the float model.

    Attributes:
        prepared: The float model, never changed, and its samples; all are calibrated on. Its statistics in memory are
            read, and completed.
        output: Name of the output that is compared.
        threads: Threads of each trial.
    """

    prepared: Prepared
    output: str
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    switched: _SwitchedModel | None = None

    def share(self, settings: Sequence[Settings]) -> None:
        """Build the model that trials share, if they can.

        Args:
            settings: Of which the trials will take some tensors as the first has them, and the others as another has.
        """
        if not all(_switchable(self.prepared.model, each) for each in settings):
            return
        first, *others = [self._decide(each) for each in settings]
        states = [_state_of(other) for other in others]
        state = _state_of(first)
        if state is not None and all(other is not None and other.keys() == state.keys() for other in states):
            found = [other for other in states if other is not None]
            self.switched = _SwitchedModel(first, state, found, self.output, self.prepared.data)

    def __call__(self, settings: Settings, count: int) -> Iterator[list[NumpyArray]] | None:
        """The output for each of the first samples; None where a model has to be quantized."""
        if self.switched is None:
            return None
        decision = self._decide(settings)
        state = _state_of(decision)
        fits = state is not None and self.switched.fits(decision, state)
        return self.switched.run(decision, state, count, self.threads) if state is not None and fits else None

    def evaluator(self, distance: OutputDistance, count: int | None = None) -> Evaluator:
        """Return what scores settings by a distance, over the first samples; None for all."""
        expected = FloatOutputs(self.prepared.model, [self.output], self.prepared.data, self._open_session, count)
        return Evaluator(self.prepared, Scorer(expected, one_number(distance)), _quantized_model, shortcut=self)

    def _decide(self, settings: Settings) -> Decision:
        return decide(self.prepared, settings, fold=False)

    def _open_session(self, model: ir.Model) -> AbstractContextManager[onnxruntime.InferenceSession]:
        return nullcontext(open_session(to_proto(model), threads=self.threads, in_float=True))


def _quantized_model(prepared: Prepared, settings: Settings) -> ir.Model:
    write(decide(prepared, settings))
    return prepared.model
