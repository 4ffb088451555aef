"""A float and a quantized model side by side: their outputs, the damage of each layer, their speed.

One sample is in memory at a time; what is kept of it are the sums of `quark.core.metrics.Comparison`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from quark.base.log import logger
from quark.base.progress import progress
from quark.core.array import NumpyArray
from quark.core.metrics import ChannelFit, Comparison
from quark.errors import CalibrationError, ConfigError
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.padding import Padding, without_padding
from quark.onnx.calibration.data.readers import samples
from quark.onnx.evaluation.cpu_price import saturating_layers
from quark.onnx.graph.model_file import read
from quark.onnx.graph.output_parts import OutputPart, output_parts, parts_of
from quark.onnx.graph.proto_file import read_header
from quark.onnx.graph.sessions import ask_for, integer_kernels_are_exact, open_session, run_sample
from quark.onnx.operators import CLAMPS

DECODED = "_DequantizeLinear_Output"
OUTPUT = "_QuantizeLinear_Input"
"""After the name of an output: what its pair reads."""
PAIR = ("_QuantizeLinear", "_DequantizeLinear")
LATENCY_RUNS, LATENCY_SECONDS = 5, 1.0
_LOSSLESS = 50.0
"""dB from which on it does not matter how much was lost."""
RESCALED = 6.0
"""dB that factors of the channels must gain to be taken for rescaled ones."""


@dataclass(frozen=True)
class ComparedLayer:
    """One tensor that both models have.

    Attributes:
        node: Who makes it in the quantized model.
        op_type: Its op type.
        tensor: Its name in the float model.
        damage: The float values against the quantized ones, errors of the layers before included.
        fits: The same up to a factor of each channel, the channels being at axis 1 or at the last.
    """

    node: str
    op_type: str
    tensor: str
    damage: Comparison = field(default_factory=Comparison)
    fits: tuple[ChannelFit, ...] = field(default_factory=lambda: (ChannelFit(1), ChannelFit(-1)))

    def update(self, x: NumpyArray, y: NumpyArray) -> None:
        """Add the values of a sample."""
        self.damage.update(x, y)
        for fit in self.fits[: max(0, x.ndim - 1)]:  # of two axes, axis 1 is the last
            fit.update(x, y)

    @property
    def rescaled(self) -> bool:
        """True where the channels have other scales by intent (cross-layer equalization, SmoothQuant).

        That is so where factors of the channels explain three quarters of the difference: rounding and clipping leave
        nothing like it.
        """
        return self._fit.sqnr > self.damage.sqnr + RESCALED

    @property
    def sqnr(self) -> float:
        """In dB, after rescaling where the channels are rescaled; -inf where the quantized values are not finite."""
        if math.isnan(self.damage.noise):
            return -math.inf
        return self._fit.sqnr if self.rescaled else self.damage.sqnr

    @property
    def _fit(self) -> ChannelFit:
        return max(self.fits, key=lambda fit: fit.sqnr)


@dataclass(frozen=True)
class Report:
    """The result of `compare_models`.

    Attributes:
        samples: How many samples were read.
        outputs: An output of the model, or a part of it (`graph/output_parts.py`), as text -> its comparison.
        layers: Worst first.
        latency: Seconds for the first sample, median: of the float and of the quantized model.
        unlike: Outputs that cannot be compared: their shapes follow from the values (NonMaxSuppression), and differ.
    """

    samples: int
    outputs: dict[str, Comparison]
    layers: list[ComparedLayer]
    latency: tuple[float, float]
    unlike: tuple[str, ...] = ()


def compare_models(float_model: Path, quantized: Path, data: Any, limit: int | None = None, threads: int = 1) -> Report:
    """Run both models on the same data.

    Args:
        float_model: The float model.
        quantized: What was made of it.
        data: A reader, or an iterable of samples.
        limit: Most samples read; None for all.
        threads: Threads of each session.

    Raises:
        ConfigError: The models have other inputs or outputs.
        CalibrationError: No data, or a sample that does not fit.
        FormatError: A file is no ONNX model, or does not load in ONNX Runtime.

    Outputs come from the models as they run on this processor, and a line of the log says where its integer kernels
    saturate; layers from one more run of each, in which every tensor is an output.
    Layers that were rotated (QuaRot) hold other values by intent: their rows say nothing; those of the outputs do.
    """
    models = (read_header(float_model), read_header(quantized))
    names = _common_outputs(*models)
    plain = [open_session(path, threads=threads) for path in (float_model, quantized)]
    layers = _Layers(models, (float_model.parent, quantized.parent), threads)
    whole = read(float_model)
    padding = Padding.of(whole)
    outputs = {part: Comparison() for part in parts_of(names, output_parts(whole))}
    count, latency, unlike = 0, (0.0, 0.0), set[int]()
    for feed in progress(samples(without_padding(data, whole), model_inputs(models[0]), limit), "evaluation"):
        latency = latency if count else _latency(plain, feed)
        runs = [padding.at_real(feed, run_sample(session, names, feed)) for session in plain]
        arrays = [dict(zip(names, each, strict=True)) for each in runs]
        _update(
            outputs.values(), *([_part_of_output(part, each) for part in outputs] for each in arrays), unlike=unlike
        )
        layers.update(feed, padding)
        count += 1
    if not count:
        raise CalibrationError("There is no data: at least one sample is needed.")
    if note := saturating_layers(read(quantized)):
        logger.info(note)
    seen = [layer for layer in layers.compared if layer.damage.count and math.isfinite(layer.damage.signal)]
    compared, others = _apart(outputs, unlike)
    return Report(count, compared, sorted(seen, key=lambda layer: layer.sqnr), latency, others)


def _part_of_output(part: OutputPart, arrays: Mapping[str, Any]) -> Any:
    """A part of an output; what is no array, or has fewer axes, as it is."""
    array = arrays[part.tensor]
    return part.of(array) if isinstance(array, np.ndarray) and array.ndim > (part.axis or 0) else array


class _Layers:
    """The layers of a float and a quantized model, in sessions that give every tensor.

    Args:
        models: Both; they get more outputs.
        folders: Where their weights lie.
        threads: Threads of each session.
        in_float: Compute with decoded values, not in integer kernels.
    """

    def __init__(
        self, models: Sequence[onnx.ModelProto], folders: Sequence[Path | None], threads: int, in_float: bool = False
    ) -> None:
        matched = match_layers(*(model.graph for model in models))
        self._layers, self._unlike = [layer for _, _, layer in matched], set[int]()
        self._tensors = ([a for a, _, _ in matched], [b for _, b, _ in matched])
        self._sessions = [
            instrumented(*each, threads, in_float) for each in zip(models, folders, self._tensors, strict=True)
        ]

    def update(self, feed: Feed, padding: Padding | None = None) -> None:
        """Compare the layers on a sample, at its real positions."""
        if self._layers:
            runs = [run_sample(*each, feed) for each in zip(self._sessions, self._tensors, strict=True)]
            runs = runs if padding is None else [padding.at_real(feed, run) for run in runs]
            _update(self._layers, *runs, unlike=self._unlike)

    @property
    def compared(self) -> list[ComparedLayer]:
        """Those whose tensors had one shape in both models."""
        return [layer for layer in self._layers if id(layer) not in self._unlike]


def damaged_layers(
    model: onnx.ModelProto | Path,
    quantized: onnx.ModelProto | Path,
    feeds: Sequence[Feed],
    left: Callable[[], float] = lambda: math.inf,
) -> list[tuple[ComparedLayer, float]]:
    """The layers that lose something of what comes to them, most first, each with the SQNR in dB of its worst input.

    Args:
        model, quantized: A float model, and what was made of it.
        feeds: Samples.
        left: Gives the seconds that are left; with none, no sample after the first is run.
    """
    protos = [read_header(each) if isinstance(each, Path) else each for each in (model, quantized)]
    folders = [each.parent if isinstance(each, Path) else None for each in (model, quantized)]
    layers = _Layers(protos, folders, 1, in_float=not integer_kernels_are_exact())
    reads, given = _reads(protos[0].graph), {value.name for value in protos[0].graph.input}
    for _ in takewhile(lambda _: left() >= 0, map(layers.update, feeds)):
        pass
    known = {layer.tensor: layer for layer in layers.compared if layer.damage.signal}
    lost = []
    for name, layer in known.items():
        if reads[name] and reads[name] <= known.keys() | given:
            before = min((known[read].sqnr for read in reads[name] - given), default=_LOSSLESS)
            lost.append((layer, min(before, _LOSSLESS)))
    worst: dict[str, tuple[ComparedLayer, float]] = {}
    for layer, before in sorted(lost, key=lambda each: each[0].sqnr - each[1]):
        # Of several outputs of a node the one that loses most.
        if layer.sqnr < before:
            worst.setdefault(layer.node, (layer, before))
    return list(worst.values())


def _reads(graph: onnx.GraphProto) -> dict[str, set[str]]:
    """Tensor -> what the node that makes it reads, constants left out."""
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    return {name: set(node.input) - constants - {""} for node in graph.node for name in node.output}


def _common_outputs(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    for what, one, other in (
        ("inputs", list(map(str, model_inputs(before).values())), list(map(str, model_inputs(after).values()))),
        ("outputs", [v.name for v in before.graph.output], [v.name for v in after.graph.output]),
    ):
        if sorted(one) != sorted(other):
            raise ConfigError(
                f"The two models differ in their {what}: {', '.join(one)} (float) and {', '.join(other)} (quantized). "
                "Compare a quantized model with the float model that it was made from."
            )
    return [value.name for value in before.graph.output]


def match_layers(before: onnx.GraphProto, after: onnx.GraphProto) -> list[tuple[str, str, ComparedLayer]]:
    """Name in the float graph, name in the quantized graph, and the layer, of each tensor that both have.

    Of a quantized tensor it is the decoded one. Where a Relu or Clip was dropped because the quantized range has its
    effect, the decoded tensor is that after the Relu.
    """
    made = {name: node for node in after.node for name in node.output}
    decoded = {source_of(name, made): name for name, node in made.items() if node.name.endswith(PAIR)}
    dropped = _dropped_activations(before, {*made, *decoded})
    found = []
    for name in (name for node in before.node if node.op_type != "Constant" for name in node.output if name):
        there = name + DECODED if name + DECODED in made else decoded.get(name, name)
        if there in made:
            tensor, maker = dropped.get(name, name), (made.get(source_of(there, made)) or made[there])
            found.append((tensor, there, ComparedLayer(maker.name or maker.op_type, maker.op_type, tensor)))
    return found


def _dropped_activations(graph: onnx.GraphProto, present: Container[str]) -> dict[str, str]:
    """Tensor that a Relu or Clip alone reads, which the quantized graph lacks -> what that gives."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    alone = {name: nodes[0] for name, nodes in readers.items() if len(nodes) == 1}
    after = {name: node.output[0] for name, node in alone.items() if node.op_type in CLAMPS}
    return {name: given for name, given in after.items() if given not in present and given + DECODED not in present}


def source_of(name: str, made: Mapping[str, onnx.NodeProto]) -> str:
    """The tensor whose values a decoded one holds, whatever its names are; of one that is not decoded, itself.

    Args:
        name: Of the tensor.
        made: Tensor -> the node that gives it.
    """
    while name in made and made[name].name.endswith(PAIR):
        name = made[name].input[0]
    return name


def instrumented(
    model: onnx.ModelProto, folder: Path | None, tensors: Sequence[str], threads: int, in_float: bool = False
) -> onnxruntime.InferenceSession:
    """A session that can give the tensors too."""
    ask_for(model, tensors)
    return open_session(model, folder, threads, in_float=in_float)


def _update(
    comparisons: Iterable[Comparison | ComparedLayer],
    before: Sequence[NumpyArray],
    after: Sequence[NumpyArray],
    *,
    unlike: set[int],
) -> None:
    """Add a sample to each comparison; those whose two tensors differ in shape are noted in `unlike`, by id."""
    for comparison, x, y in zip(comparisons, before, after, strict=True):
        if isinstance(x, np.ndarray) and x.shape != np.shape(y):
            unlike.add(id(comparison))
        elif isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
            with np.errstate(invalid="ignore", over="ignore"):
                comparison.update(x, y)


def _latency(sessions: Sequence[onnxruntime.InferenceSession], feed: Feed) -> tuple[float, float]:
    """Median seconds of each session, run in turns so that a busy moment hits both."""
    times: tuple[list[float], ...] = tuple([] for _ in sessions)
    end = time.perf_counter() + LATENCY_SECONDS
    while len(times[0]) <= LATENCY_RUNS or (time.perf_counter() < end and len(times[0]) < 100):
        for session, seconds in zip(sessions, times, strict=True):
            start = time.perf_counter()
            run_sample(session, None, feed)
            seconds.append(time.perf_counter() - start)
    first, second = (float(np.median(seconds[1:])) for seconds in times)
    return first, second


def _apart(outputs: Mapping[OutputPart, Comparison], unlike: set[int]) -> tuple[dict[str, Comparison], tuple[str, ...]]:
    """The parts of outputs that can be compared, and the outputs that cannot."""
    others = tuple(dict.fromkeys(part.tensor for part, found in outputs.items() if id(found) in unlike))
    return {str(part): found for part, found in outputs.items() if part.tensor not in others}, others
