"""Sources of noise: every quantized tensor of a decision, with what quantizing it alone adds where it stands.

    activation v       n = Q(v) - v
    constant w of f    n = f(x, Q(w)) - f(x, w), at the output of its node

What only moves the values of a quantized tensor (Transpose, MaxPool) leaves them on their grid: it adds no noise.

x, v: of the float model. The float model is built twice. `observed` gives v, and f(x, Q(w)) beside f(x, w); `injected`
reads n as an input of its own after each source, and adds it:

    v' = v + n                                          the outputs under any sum of noises, in one run of one session

Nothing about a source changes the graph, so no trial quantizes a model or loads one. All noises of a sample are stored,
as codes: n = scale * code, of 8 bits, or of a float16 where a few values are far larger than the others, as those are
that a range cuts off. Half a step of 8 bits is 48 dB below the noise of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.core.array import NumpyArray
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.onnx.algorithms.quantized_layers import decoded
from quark.onnx.calibration.calibrate import model_session, sliced_session
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.padding import Padding
from quark.onnx.calibration.qparams import CAST
from quark.onnx.calibration.sliced_session import SlicedSession
from quark.onnx.config.settings import Settings
from quark.onnx.decide import Decision
from quark.onnx.graph.edit import replace_output
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.sessions import run_sample
from quark.onnx.operators import rule_of
from quark.onnx.placement.dual_pairs import source_name
from quark.onnx.placement.placement import Placement
from quark.onnx.qdq.activations import ActivationWriter
from quark.onnx_ops.graph_writer import GraphWriter, add_constant, free_name

NONE = np.zeros(1, np.float32)
"""No noise, whatever the shape of the tensor."""
EVEN = 4.0
"""Largest magnitude of a noise, in its root mean square, of which 8 bits hold all values; that of rounding is 1.7."""


@dataclass(frozen=True)
class Noise:
    """The noise that quantizing adds to one tensor, in a quarter or a half of the bytes.

    Attributes:
        codes: int8 or float16, in the shape of the tensor.
        scale: Of the codes.
    """

    codes: NumpyArray
    scale: np.float32

    @classmethod
    def of(cls, array: NumpyArray) -> Noise:
        """Hold a float32 array. One that is not finite stays so."""
        flat = array.reshape(-1)
        peak = np.float32(np.abs(flat).max(initial=0))
        if not np.isfinite(peak):
            return cls(array, np.float32(1))
        if not peak:
            return cls(np.zeros(array.shape, np.int8), np.float32(0))
        if peak <= EVEN * math.sqrt(float(flat @ flat) / flat.size):
            return cls(np.rint(array * (127 / peak)).astype(np.int8), peak / np.float32(127))
        return cls((array / peak).astype(np.float16), peak)

    def times(self, factor: float) -> NumpyArray:
        """A multiple of it, as float32."""
        return np.multiply(self.codes, np.float32(factor) * self.scale, dtype=np.float32)


@dataclass(frozen=True)
class NoiseSource:
    """One quantized tensor.

    Attributes:
        name: Of the activation, or of the constant.
        node: Name of the node that reads the constant; "" of an activation.
        holders: The quantized nodes that all have to be in float before it is not quantized any more.
    """

    name: str
    node: str
    holders: frozenset[str]


@dataclass(frozen=True)
class _Site:
    """Where the noise of a source is added.

    Attributes:
        input: Name of the input that is added.
        before: Name of the float tensor.
        after: Name of the same tensor with the constant quantized; "" of an activation, which is quantized here.
        spec, params: Of the activation.
    """

    input: str
    before: str
    after: str = ""
    spec: TensorSpec | None = None
    params: QParams = CAST

    @property
    def reads(self) -> list[str]:
        """The tensors of `observed` that the noise is of."""
        return [self.before, *([self.after] if self.after else ())]

    def noise(self, seen: Mapping[str, NumpyArray], given: Mapping[str, QParams]) -> Noise:
        """Return what quantizing adds to the tensor, of what `observed` gave, under the qparams of `given`."""
        x = np.asarray(seen[self.before], np.float32)
        params = given.get(self.before, self.params)
        y = decoded(x, params, self.spec) if self.spec is not None else seen[self.after]
        return Noise.of(np.asarray(y - x, np.float32))


class NoiseModel:
    """The float model, with the noise of each source as it is seen and as it is injected.

    Args:
        decision: What is quantized; nothing is folded or written. Its model becomes the one that is injected.

    Attributes:
        sources: In the order of the graph.

    Raises:
        NotSupportedError: Inputs of layers are quantized as they come, so that there are no scales to look at.
    """

    def __init__(self, decision: Decision) -> None:
        placement = decision.placement
        if placement.dynamic:
            raise NotSupportedError("The noise of dynamic quantization is not measured: possible: static scales.")
        self._settings = decision.settings
        self._observed, self._injected = decision.model.clone(), decision.model
        self._outputs = [value.name or "" for value in self._injected.graph.outputs]
        self._inject_writer = GraphWriter(self._injected)
        self._taken = {value.name for value in self._injected.graph.inputs}
        order = {node: position for position, node in enumerate(self._injected.graph)}
        copies = dict(zip(self._injected.graph, self._observed.graph, strict=True))
        # The nodes that read constants keep what they write until all activations have their input.
        written = {node: list(node.outputs) for node, _ in placement.weights}
        found = list(self._activations(decision, order))
        for (node, index), spec in placement.weights.items():
            sites = self._constant_sites(
                node, index, copies[node], written[node], decision.qparams.weights[node, index], spec
            )
            weight, name = node.inputs[index], node.name or ""
            found.append(
                (order[node], NoiseSource((weight.name if weight else None) or "", name, frozenset([name])), sites)
            )
        found.sort(key=lambda entry: entry[0])
        self.sources = [source for _, source, _ in found]
        self._sites = [sites for _, _, sites in found]

    def _activations(
        self, decision: Decision, order: Mapping[ir.Node, int]
    ) -> Iterator[tuple[int, NoiseSource, list[_Site]]]:
        """(position of its producer, source, sites) of each activation; each gets its input."""
        placement, quantized = decision.placement, set(decision.placement.nodes)
        readers = ActivationWriter(self._inject_writer, decision.settings, placement, {})
        reads = {value: readers.reads(value) for value in placement.activations}
        reads = {value: (uses, is_output) for value, (uses, is_output) in reads.items() if uses or is_output}
        holders: dict[ir.Value, set[str]] = {}
        for value, (uses, _) in reads.items():
            producer = value.producer()
            around = {node for node, _ in uses} | ({producer} if producer is not None else set())
            holders.setdefault(_origin(value, placement, reads), set()).update(
                node.name or "" for node in around & quantized
            )
        for value, names in holders.items():
            uses, is_output = reads[value]
            # Before the input is added: an output of the graph gives its name away.
            name, producer, spec = source_name(value), value.producer(), placement.activations[value]
            params = CAST if spec.is_cast or spec.is_block else decision.qparams.activations[placement.root(value)]
            site = _Site(self._inject(value, uses, is_output), name, spec=spec, params=params)
            position = -1 if producer is None else order[producer]
            yield position, NoiseSource(name, "", frozenset(names)), [site]

    def _constant_sites(
        self, node: ir.Node, index: int, copied: ir.Node, outputs: list[ir.Value], params: QParams, spec: TensorSpec
    ) -> list[_Site]:
        """Compute the node a second time, with the constant quantized; add the difference after the node."""
        graph = self._observed.graph
        weight = copied.inputs[index]
        array = decoded(np.asarray(constant(weight), np.float32), params, spec)
        inputs = list(copied.inputs)
        inputs[index] = add_constant(graph, free_name(f"{copied.name}_{index}_quantized", graph.initializers), array)
        again = ir.node(
            copied.op_type, inputs, dict(copied.attributes), domain=copied.domain, num_outputs=len(outputs),
            name=f"{copied.name}_{index}_quantized",
        )  # fmt: skip
        sites = []
        for position, (output, copy) in enumerate(zip(outputs, again.outputs, strict=True)):
            copy.name = f"{copied.name}_{index}_quantized_{position}"
            uses = [(use.node, use.idx) for use in output.uses()]
            if not output.name or not (uses or output.is_graph_output()):
                continue
            before = copied.outputs[position].name or ""
            sites.append(_Site(self._inject(output, uses, output.is_graph_output()), before, copy.name))
        graph.insert_after(copied, [again])
        return sites

    def _inject(self, value: ir.Value, uses: Sequence[tuple[ir.Node, int]], is_output: bool) -> str:
        """Add an input to what these nodes read of a tensor; its name."""
        graph, writer = self._injected.graph, self._inject_writer
        noise = ir.val(free_name(f"{value.name}_noise", self._taken), ir.DataType.FLOAT)
        self._taken.add(noise.name)
        graph.inputs.append(noise)
        result = writer.node("Add", [value, noise], f"{noise.name}_Add")
        writer.insert_after(value.producer())
        result.type, result.shape = value.type, value.shape
        for node, index in uses:
            node.replace_input_with(index, result)
        if is_output:
            name = value.name
            value.name, result.name = f"{name}_before_noise", name
            replace_output(graph, value, result)
        return noise.name or ""

    @contextmanager
    def open(self) -> Iterator[NoiseRun]:
        """Sessions of both models."""
        self._injected.graph.sort()
        wanted = list(dict.fromkeys(n for sites in self._sites for s in sites for n in (s.before, s.after) if n))
        inputs = {value.name for value in self._observed.graph.inputs}
        wanted = [name for name in wanted if name not in inputs]
        with model_session(self._injected, [], self._settings) as injected:
            yield NoiseRun(self._sites, self._observed, injected, wanted, self._outputs, self._settings)


def _origin(value: ir.Value, placement: Placement, quantized: Container[ir.Value]) -> ir.Value:
    """The quantized tensor whose values, on the same grid, another holds: quantized once more, they stay."""
    producer = value.producer()
    if producer is None or producer not in placement.nodes or not rule_of(producer.op_type).moves(producer):
        return value
    source = producer.inputs[0]
    if source is None or source not in quantized or placement.root(source) is not placement.root(value):
        return value
    same = placement.activations[source] == placement.activations[value]
    return _origin(source, placement, quantized) if same else value


class NoiseRun:
    """Runs one sample after another; see `NoiseModel.open`.

    Args:
        sites: Of each source.
        observed: The model that gives what noises are made of; it runs in slices.
        injected: The session.
        wanted: What the first gives.
        outputs: Names of those that count.
        settings: The execution providers.
    """

    def __init__(
        self,
        sites: Sequence[Sequence[_Site]],
        observed: ir.Model,
        injected: onnxruntime.InferenceSession,
        wanted: Sequence[str],
        outputs: Sequence[str],
        settings: Settings,
    ) -> None:
        self._sites, self._observed, self._injected = sites, observed, injected
        self._wanted, self._outputs, self._settings = wanted, outputs, settings
        self._padding = Padding.of(observed)
        self._silent = {site.input: NONE for each in sites for site in each}
        self._sliced: SlicedSession | None = None

    def look(self, feed: Feed, given: Mapping[str, QParams] | None = None) -> list[dict[str, Noise]]:
        """The noise of each source for a sample: input -> what is added.

        Args:
            feed: The sample.
            given: Activation -> other qparams than those that were decided; only these are looked at then.
        """
        if self._sliced is None:
            self._sliced = sliced_session(self._observed, self._wanted, feed, self._settings)
        found: list[dict[str, Noise]] = [{} for _ in self._sites]
        left = list(self._looked_at(given))
        seen: dict[str, NumpyArray] = dict(feed)
        for part in self._sliced.run(feed) if self._wanted else [{}]:
            seen |= part
            later = []
            for index, site in left:
                if seen.keys() >= set(site.reads):
                    found[index][site.input] = site.noise(seen, given or {})
                else:
                    later.append((index, site))
            left, needed = later, {name for _, site in later for name in site.reads}
            seen = {name: array for name, array in seen.items() if name in needed}
            part.clear()
        return found

    def _looked_at(self, given: Mapping[str, QParams] | None) -> Iterator[tuple[int, _Site]]:
        """The sites with the position of their source: all, or those of the activations that qparams are given for."""
        for index, sites in enumerate(self._sites):
            for site in sites:
                if given is None or (site.before in given and not site.after):
                    yield index, site

    def outputs(
        self, feed: Feed, noises: Sequence[Mapping[str, Noise]], factors: Sequence[float] | NumpyArray
    ) -> list[NumpyArray]:
        """The outputs with a sum of noises, at real positions."""
        added: dict[str, NumpyArray] = dict(self._silent)
        for factor, noise in zip(factors, noises, strict=True):
            for name, one in noise.items():
                added[name] = one.times(factor) if added[name] is NONE else added[name] + one.times(factor)
        found = run_sample(self._injected, self._outputs, {**feed, **added})
        return self._padding.at_real(feed, [np.asarray(x) for x in found])
