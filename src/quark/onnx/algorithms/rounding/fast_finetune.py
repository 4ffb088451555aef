"""AdaRound and AdaQuant of a model: its layers one after another, each given what the improved ones before it give."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.base.files import scratch_folder
from quark.base.log import logger
from quark.base.progress import report, status
from quark.core.array import NumpyArray, threads_for, to_numpy
from quark.core.scales import QParams
from quark.core.solvers.adaround import AdaQuant, AdaRound
from quark.core.solvers.reconstruct import Activation, Outcome, OutputGrid, Rows, Training, Unit, train
from quark.errors import ConfigError, NotSupportedError, QuarkError
from quark.onnx.algorithms.layer_sweep import Visit, sweep
from quark.onnx.algorithms.quantized_layers import QuantizedLayer, QuantizedLayers
from quark.onnx.algorithms.rounding.checks import Config, check, check_output_index, optimizer_device
from quark.onnx.algorithms.rounding.patches import product_of
from quark.onnx.algorithms.rounding.rows import Space, activation_of, gather
from quark.onnx.calibration.data.inputs import model_inputs
from quark.onnx.calibration.data.samples import MEMORY, Samples, required
from quark.onnx.calibration.float_outputs import FloatOutputs
from quark.onnx.config.algo_configs import AdaQuantConfig, AdaRoundConfig, CLEConfig, QuarotConfig, SmoothQuantConfig
from quark.onnx.graph.edit import dims
from quark.onnx.graph.model_file import infer_shapes, load, to_proto
from quark.onnx.graph.sessions import integer_kernels_are_exact, open_session
from quark.onnx.passes import run_passes

_ROWS_OF_A_BATCH = {AdaRoundConfig: 256, AdaQuantConfig: 128}
"""Most rows that a batch has, whatever its samples have: more positions of one image say little new.

Measured on ResNet-18: 128 rows cost AdaRound 0.2 dB, and AdaQuant, whose steps are small, nothing."""

LOSS = "squared error of a row of outputs"
"""Mean over rows of the squared error of all outputs, with the nearest rounding and with what was learned."""
RESCALES = (CLEConfig, SmoothQuantConfig, QuarotConfig)
ROWS: dict[int, Space] = {0: Space(None), 1: Space(1 << 27, 1 << 13), 2: Space(1 << 32)}
"""mem_opt_level -> what is kept of a layer: all positions; some of each sample, that is enough for a training; or most
of them in files."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of one layer.

    Attributes:
        name, op_type: Of the layer.
        before, after: Its loss on all its rows with the nearest rounding, and with the one it has now.
        iterations: Steps that were taken.
        kept: Whether what was learned is in the model.
        reason: Why not, if not.
        seconds: That it took.
    """

    name: str
    op_type: str
    before: float = 0.0
    after: float = 0.0
    iterations: int = 0
    kept: bool = False
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        loss = f"loss {self.before:.4g} -> {self.after:.4g} in {self.iterations} iterations" if self.iterations else ""
        return f"{self.name} ({self.op_type}): " + ", ".join(
            filter(None, (loss, self.reason and f"as it was: {self.reason}"))
        )


def finetune_layers(quantized: QuantizedLayers, config: Config) -> int:
    """Tune the weights of a model; return how many layers were trained. What became of each is told."""
    tuned = tune(quantized, config)
    kept = [entry for entry in tuned if entry.kept]
    left = [entry.name for entry in tuned if not entry.kept]
    logger.info(
        "%d of %d layers improved%s.", len(kept), len(tuned), f"; as they were: {', '.join(left)}" if left else ""
    )
    return sum(entry.iterations > 0 for entry in tuned)


def tune(quantized: QuantizedLayers, config: Config) -> list[Tuned]:
    """Tune the weights of a model.

    Returns:
        What became of every layer, in their order.

    Raises:
        QuarkError: The config asks for what is not possible, or the training of a layer fails, which is named.
    """
    check(config)
    check_output_index(config, quantized.reference.graph.outputs)
    device = optimizer_device(config)
    if config.ref_model_path is not None:
        quantized = _with_reference(quantized, config.ref_model_path)
    run = _Run(quantized, config, device)
    layers = run.chosen()
    memory = {0: 1 << 62, 1: MEMORY, 2: 0}[config.mem_opt_level]
    tuned = []
    mixes = config.drop_ratio < 1
    for visit in sweep(quantized, layers, run.data, config.data_size, memory, config.cache_dir, mixes):
        made = run.visit(visit)
        tuned.append(made)
        logger.log(logging.INFO if made.reason else logging.DEBUG, "%s", made)
        if made.iterations:
            report(made.name, made.before, made.after if made.kept else made.before, LOSS)
    for change in run.waiting:
        change()
    return tuned


class _Run:
    """One run over a model.

    Attributes:
        data: The samples that the layers are run on.
        waiting: Changes that are made when the run is over, where layers shall not see each other's.
    """

    def __init__(self, quantized: QuantizedLayers, config: Config, device: Any) -> None:
        self.quantized, self.config, self.device = quantized, config, device
        self.name = type(config).__name__.removesuffix("Config")
        self.data = required(quantized.data, config)
        if config.dynamic_batch:
            self.data = merged(self.data, min(config.data_size, len(self.data)), quantized.reference)
        self.waiting: list[Callable[[], None]] = []
        self.goal = EndToEnd(quantized, self.data, config) if config.selective_update else None

    def chosen(self) -> list[QuantizedLayer]:
        """The layers to tune, in order."""
        layers = [layer for layer in self.quantized.layers if layer.counterpart.op_type in self.config.target_op_type]
        if isinstance(self.config, AdaRoundConfig):
            wrong = next((layer for layer in layers if not layer.spec.has_zero_point), None)
            if wrong is not None:
                raise ConfigError(
                    f"AdaRound learns codes of integers; the weight of {wrong.name} is {wrong.spec.dtype}. "
                    "Possible: AdaQuant."
                )
        if self.config.select_max_mem_layer:
            layers = sorted(layers, key=_memory)[-1:]
            logger.info("%s: %s takes the most memory, and is tuned alone.", self.name, [x.name for x in layers])
        return layers

    def visit(self, visit: Visit) -> Tuned:
        """Train one layer, and give it what was learned if that is better."""
        layer, start = visit.layer, time.perf_counter()
        made = Tuned(layer.name, layer.counterpart.op_type)
        if layer.shared:
            return replace(made, reason="another node reads its weight or bias")
        try:
            with self._space() as space:
                outcome = self._train(visit, space)
        except NotSupportedError as error:
            return replace(made, reason=f"it is {error}")
        except QuarkError as error:
            raise type(error)(f"{self.name} of {layer.name}: {error}") from None
        made = replace(made, before=outcome.nearest, after=outcome.learned, iterations=outcome.iterations)
        made = replace(made, seconds=time.perf_counter() - start)
        if not outcome.gained:
            return replace(made, reason="nothing that was learned is better than the nearest rounding")
        return self._change(layer, outcome, made)

    def _change(self, layer: QuantizedLayer, outcome: Outcome, made: Tuned) -> Tuned:
        before = layer.weight, layer.offset

        def change() -> None:
            layer.weight = to_numpy(outcome.weight)
            if self.config.update_bias and outcome.bias is not None and before[1] is not None:
                bias = to_numpy(outcome.bias).reshape(before[1].shape)
                layer.offset = before[1] + bias if layer.counterpart.op_type == "MatMul" else bias / layer.factor

        if self.config.parallel:
            self.waiting.append(change)
            return replace(made, kept=True)
        change()
        if self.goal is None or self.goal.falls():
            return replace(made, kept=True)
        layer.weight = before[0]
        if before[1] is not None:
            layer.offset = before[1]
        return replace(made, after=made.before, reason="the output of the model comes no nearer")

    def _train(self, visit: Visit, space: Space) -> Outcome:
        config, layer = self.config, visit.layer
        weight, product = _tensor(layer.weight, self.device), product_of(layer.counterpart, layer.weight)
        groups, each, _ = product.matrix(layer.weight).shape
        activation = activation_of(layer.activation, groups * each)
        rows = gather(visit, product, activation, config.drop_ratio, space, config.fixed_seed)
        bias = _bias(layer, groups * each, config.update_bias)
        unit = Unit(
            product.matrix,
            product.native,
            product.flipped,
            None if bias is None else _tensor(bias, self.device),
            self._steps_after(layer, activation),
        )
        params = None if layer.spec.is_block or layer.spec.is_cast else _params(layer.params, self.device)
        learner: AdaRound | AdaQuant
        if isinstance(config, AdaRoundConfig):
            assert params is not None
            learner = AdaRound(weight, params, layer.spec, config.reg_param)
        else:
            learner = AdaQuant(weight, params, layer.spec)
        rows = _tensors(rows, config.pin_memory)
        training = self._training(layer, lambda: unit.loss(rows, learner.nearest) / (groups * each))

        def note(iteration: int, loss: float) -> None:
            self.data.check_time()
            logger.debug("%s: iteration %d of %d, loss %.4g", layer.name, iteration, training.iterations, loss)
            status(f"{layer.name}: iteration {iteration} of {training.iterations}, loss {loss:.4g}")

        with threads_for(weight, training.rows * training.batches * layer.weight.size):
            return train(unit, rows, learner, training, config.update_bias and bias is not None, note)

    def _training(self, layer: QuantizedLayer, error: Callable[[], float]) -> Training:
        config = self.config
        rate = config.learning_rate
        if isinstance(config, AdaQuantConfig) and config.relative_rate is not None and layer.spec.has_zero_point:
            rate = config.relative_rate * float(np.mean(layer.params.scale))
        if config.lr_adjust and error() > config.lr_adjust[0]:
            rate = config.lr_adjust[1]
        rows = _ROWS_OF_A_BATCH[type(config)]
        return Training(
            config.num_iterations, rate, config.batch_size, config.num_batches, rows, config.early_stop,
            config.warm_start, config.beta_range, config.drop_ratio, config.fixed_seed, config.log_period,
            # Weights of AdaRound settle by their regularizer; those of AdaQuant only by smaller steps.
            decay=not isinstance(config, AdaRoundConfig),
        )  # fmt: skip

    def _steps_after(self, layer: QuantizedLayer, activation: Activation | None) -> tuple[Activation | OutputGrid, ...]:
        steps: list[Activation | OutputGrid] = []
        if activation is not None:
            slope = activation.slope
            steps.append(replace(activation, slope=slope if isinstance(slope, float) else _tensor(slope, self.device)))
        if self.config.output_qdq and layer.output is not None:
            spec, params = layer.output
            steps.append(OutputGrid(_params(params, self.device), spec))
        return tuple(steps)

    @contextmanager
    def _space(self) -> Iterator[Space]:
        level = self.config.mem_opt_level
        parent = Path(self.config.cache_dir or tempfile.gettempdir())
        with scratch_folder(parent) if level == 2 else nullcontext() as folder:
            yield replace(ROWS[level], folder=folder)


class EndToEnd:
    """The mean L2 distance of one output of the quantized model from that of the float one."""

    def __init__(self, quantized: QuantizedLayers, data: Samples, config: Config) -> None:
        self.quantized = quantized
        output = quantized.reference.graph.outputs[config.output_index].name or ""
        self.expected = FloatOutputs(
            quantized.reference,
            [output],
            data,
            lambda model: nullcontext(open_session(to_proto(model), in_float=not integer_kernels_are_exact())),
            config.data_size,
        )
        self.best = self.distance()

    def distance(self) -> float:
        """The distance now."""
        pairs = (pair for (pair,) in self.expected.beside(self.quantized.decision.model))
        return float(np.mean([np.linalg.norm(got.astype(np.float64) - wanted) for wanted, got in pairs]))

    def falls(self) -> bool:
        """Measure the distance; return True where it is less than the least so far."""
        now = self.distance()
        better, self.best = now < self.best, min(now, self.best)
        return better


def _with_reference(quantized: QuantizedLayers, path: str) -> QuantizedLayers:
    """The layers with inputs and targets of another float model, which has layers of the same names.

    Raises:
        ConfigError: The names differ, or an algorithm has changed the layers of the float model that is quantized.
    """
    settings = quantized.decision.settings
    moved = [type(algorithm).__name__ for algorithm in settings.algorithms if isinstance(algorithm, RESCALES)]
    if moved:
        raise ConfigError(f"ref_model_path: {moved[0]} has rescaled the layers, so that no other model gives targets.")
    reference = load(path)
    infer_shapes(reference)
    run_passes(reference, settings.passes)
    makers = {value.name: node for node in reference.graph for value in node.outputs}
    layers = []
    for layer in quantized.layers:
        before, node = layer.counterpart, makers.get(layer.counterpart.outputs[0].name)
        if node is None or node.op_type != before.op_type or node.inputs[0].name != layer.data.name:  # type: ignore[union-attr]
            raise ConfigError(
                f"ref_model_path: {path} has no {before.op_type} that reads and gives what {layer.name} does."
            )
        layers.append(replace(layer, counterpart=node))
    return replace(quantized, reference=reference, layers=layers)


def merged(data: Samples, count: int, model: ir.Model) -> Samples:
    """The first `count` samples as one, along their first axis.

    Raises:
        ConfigError: Their shapes differ, or the model has a fixed batch size.
    """
    feeds = [data[position] for position in range(count)]
    try:
        whole = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    except ValueError as error:
        raise ConfigError(f"dynamic_batch=True: the samples do not form one batch: {error}") from None
    inputs = model_inputs(model)
    fixed = [str(entry) for name, entry in inputs.items() if not entry.fits(whole[name])]
    if fixed:
        raise ConfigError(f"dynamic_batch=True: the model takes batches of one size only: {fixed[0]}.")
    return Samples([whole], inputs)


def _bias(layer: QuantizedLayer, outputs: int, learned: bool) -> NumpyArray | None:
    """Return what is added to a product, (outputs,), or None; zeros where the Add after a MatMul may learn its bias."""
    offset, inputs = layer.offset, layer.counterpart.inputs
    if layer.counterpart.op_type == "MatMul":
        return np.zeros(outputs, np.float32) if learned and offset is not None and offset.size == outputs else None
    if not layer.factor:
        return None
    if offset is None:
        if len(inputs) > 2 and inputs[2] is not None:
            raise NotSupportedError("a layer whose bias is no constant")
        return None
    if offset.size not in (1, outputs):
        raise NotSupportedError("a Gemm whose bias differs from row to row")
    if learned and offset.size != outputs:
        raise NotSupportedError("a Gemm with one bias for all outputs, and update_bias=True")
    return np.asarray(np.broadcast_to(offset.reshape(-1) * layer.factor, (outputs,)), np.float32)


def _memory(layer: QuantizedLayer) -> int:
    """Bytes that training a layer takes, as far as its shapes tell: six arrays like the weight, input and output."""
    shapes = [dims(layer.data), dims(layer.counterpart.outputs[0])]
    sizes = [math.prod(size or 1 for size in shape) for shape in shapes if shape]
    return 4 * (6 * layer.weight.size + sum(sizes))


def _tensor(array: Any, device: Any) -> Any:
    import torch  # loaded by `optimizer_device`

    # A weight after a Transpose is a view whose rows are not whole; the solvers see tensors as flat.
    return torch.as_tensor(np.array(array, np.float32, order="C"), device=device)


def _params(params: QParams, device: Any) -> QParams:
    zero = None if params.zero_point is None else _tensor(params.zero_point, device)
    return QParams(_tensor(params.scale, device), zero)


def _tensors(rows: Rows, pinned: bool) -> Rows:
    """Rows of numpy arrays as tensors that share their memory, or in pinned memory."""
    import torch  # loaded by `optimizer_device`

    def convert(array: NumpyArray) -> Any:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pinned else tensor

    return replace(
        rows,
        inputs=convert(rows.inputs),
        targets=convert(rows.targets),
        floats=None if rows.floats is None else convert(rows.floats),
    )
