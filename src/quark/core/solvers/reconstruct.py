"""Reconstruction: a learner of one layer's weight is fed batches of rows until its output is the float layer's.

    Z = X W~^T + b         X (rows, groups * columns), W~ (groups, outputs of a group, columns)
    loss = mean over rows of || q(f(Z)) - Y ||^2        f: an activation, q: the output's own rounding, or neither

Every layer with a weight is such a product: a convolution's rows are the patches under its output positions. A batch
is some of the samples, and of each at most some of its rows, which are stored in random order: any run of them is a
random choice, and one of a convolution's thousands of positions costs what it is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quark.core.array import Array, namespace
from quark.core.quantize import dequantize, fake_quantize
from quark.core.scales import QParams
from quark.core.solvers.adaround import Adam
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, NonFiniteError

MEASURED_ROWS, MEASURED_VALUES, LEAST_MEASURED = 2048, 1 << 17, 256
"""Most rows that a loss is measured on; outputs in all that are enough; and the fewest rows.

A training measures six times, and 2048 rows cost as much as 8 to 16 of its steps. 2^17 outputs choose the same weights:
of ResNet-18 and the example models, bit for bit."""

WINDOWS = 5
"""How often in a training its mean loss is looked at, and the weight measured."""


@dataclass(frozen=True)
class Training:
    """How long, on what, and how fast.

    Attributes:
        iterations: Steps of Adam.
        rate: Its learning rate, at the start.
        samples: Samples of a batch.
        batches: Batches of an iteration, whose gradients are averaged.
        rows: Most rows of a batch.
        early_stop: End when the mean loss of a fifth of the iterations (of AdaRound: its regularizer) has not fallen.
        warm_start: Share of the iterations before the regularizer is felt.
        beta: Exponent of the regularizer after the warm start, and at the end.
        drop_ratio: Share of the inputs that come from the quantized model, the others from the float one.
        seed: Of everything random.
        period: Iterations between two calls of `note`.
        decay: Whether the rate falls to 0 in a straight line, so that the last steps do not shake what was learned.
    """

    iterations: int
    rate: float
    samples: int = 1
    batches: int = 1
    rows: int = 256
    early_stop: bool = False
    warm_start: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)
    drop_ratio: float = 1.0
    seed: int = 0
    period: int = 100
    decay: bool = False

    def rate_at(self, iteration: int) -> float:
        """The learning rate of a step."""
        return self.rate * (1 - iteration / self.iterations) if self.decay else self.rate

    def beta_at(self, iteration: int) -> float | None:
        """The exponent, or None while the start is warm."""
        start = self.warm_start * self.iterations
        if iteration < start:
            return None
        first, last = self.beta
        return last + 0.5 * (first - last) * (1 + math.cos(math.pi * (iteration - start) / (self.iterations - start)))


@dataclass(frozen=True)
class Activation:
    """Clip, Relu, LeakyRelu and PRelu in one: y = clip(z, low, high), where negative z counts `slope` times."""

    low: float = -math.inf
    high: float = math.inf
    slope: Array | float = 1.0

    def __call__(self, z: Array) -> Array:
        return self._sloped(z).clip(self.low, self.high)

    def derivative(self, z: Array) -> Array:
        """dy/dz, 0 at the ends."""
        y = self._sloped(z)
        inside = y > self.low
        if self.high < math.inf:
            inside &= y < self.high
        return inside if self._is_clip() else namespace(z).where(z < 0, self.slope, 1.0) * inside

    def _sloped(self, z: Array) -> Array:
        return z if self._is_clip() else namespace(z).where(z < 0, z * self.slope, z)

    def _is_clip(self) -> bool:
        return isinstance(self.slope, float) and self.slope == 1.0


@dataclass(frozen=True)
class OutputGrid:
    """Rounding of the output: passed by the gradient within the range, and by nothing beyond."""

    params: QParams
    spec: TensorSpec

    def __call__(self, y: Array) -> Array:
        return fake_quantize(y, self.params, self.spec)

    def derivative(self, y: Array) -> Array:
        """1 within the range, 0 beyond."""
        if not self.spec.has_zero_point:
            return y * 0 + 1
        low, high = (
            dequantize(y * 0 + end, self.params, self.spec) for end in (self.spec.dtype.min, self.spec.dtype.max)
        )
        return (y >= low) & (y <= high)


@dataclass(frozen=True)
class Rows:
    """The data that a layer is trained on.

    Attributes:
        inputs: X~, (rows, groups * columns).
        targets: f(Y), (rows, outputs).
        starts: Where the rows of each sample start, and the end: samples + 1 numbers.
        floats: X, where some of the inputs come from the float model; same shape as inputs.
    """

    inputs: Array
    targets: Array
    starts: Sequence[int]
    floats: Array | None = None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.starts) - 1

    @property
    def measured_each(self) -> int:
        """The distance of the rows that a loss is measured on."""
        enough = max(MEASURED_VALUES // self.targets.shape[1], LEAST_MEASURED)
        return -(-len(self.inputs) // min(enough, MEASURED_ROWS))

    def pick(self, training: Training, random: np.random.Generator) -> list[slice]:
        """The rows of one iteration."""
        each = max(1, training.rows // training.samples)
        picked = []
        for _ in range(training.batches):
            for sample in random.permutation(self.samples)[: training.samples]:
                start, stop = self.starts[sample : sample + 2]
                if stop - start > each:
                    start += int(random.integers(stop - start - each + 1))
                picked.append(slice(start, min(stop, start + each)))
        return picked


class Learner(Protocol):
    """AdaRound or AdaQuant."""

    value: Array
    nearest: Array

    @property
    def done(self) -> bool:
        """True where nothing is left to learn."""

    def step(self, gradient: Array, rate: float, beta: float | None) -> None:
        """Learn from dL/dW~."""

    def penalty(self, beta: float) -> float | None:
        """The regularizer, if there is one."""

    def rounded(self) -> Array:
        """The result."""


@dataclass
class Unit:
    """A layer and what follows it, on rows.

    Attributes:
        matrix: The weight as (groups, outputs of a group, columns); a view where it can be one.
        native: The inverse of `matrix`.
        flipped: Whether the weight lies in memory as (columns, outputs).
        bias: (outputs,) or None.
        after: What follows the product, in order.
    """

    matrix: Callable[[Array], Array]
    native: Callable[[Array], Array]
    flipped: bool = False
    bias: Array | None = None
    after: tuple[Activation | OutputGrid, ...] = ()

    def product(self, x: Array, weight: Array) -> Array:
        """Z of rows x (r, groups * columns), shape (r, outputs)."""
        groups, _, columns = weight.shape
        if groups == 1:
            z = x @ weight[0].T
        else:
            parts = x.view(-1, groups, columns).transpose(0, 1)
            z = (parts @ weight.transpose(1, 2)).transpose(0, 1).reshape(len(x), -1)
        return z if self.bias is None else z.add_(self.bias)

    def pull(self, x: Array, error: Array, shape: Sequence[int]) -> Array:
        """The gradient of the weight, (groups, outputs, columns) = `shape`, from that of Z."""
        groups, outputs, columns = shape
        if groups == 1:
            return ((x.T @ error).T if self.flipped else error.T @ x)[None]
        parts = x.view(-1, groups, columns)
        if outputs == 1:
            return (error[:, :, None] * parts).sum(0)[:, None]
        return error.view(-1, groups, outputs).permute(1, 2, 0) @ parts.transpose(0, 1)

    def forward(self, x: Array, weight: Array) -> tuple[Array, Array | None]:
        """The output, and its derivative by Z; None for 1."""
        y, slope = self.product(x, weight), None
        for step in self.after:
            derivative = step.derivative(y)
            slope = derivative if slope is None else slope * derivative
            y = step(y)
        return y, slope

    def loss(self, rows: Rows, weight: Array) -> float:
        """Mean of the squared error over the rows, or over some of them at even distances."""
        each = rows.measured_each
        y = self.product(_on(rows.inputs[::each], weight), self.matrix(weight))
        for step in self.after:
            y = step(y)
        return float((y - _on(rows.targets[::each], weight)).square_().sum() / len(y))


@dataclass
class Outcome:
    """The result of a training.

    Attributes:
        weight: The best weight found, on its grid; that of nearest codes where none is better.
        bias: That goes with it.
        nearest, learned: Loss before and after.
        iterations: How many ran.
    """

    weight: Array
    bias: Array | None
    nearest: float
    learned: float
    iterations: int = 0

    @property
    def gained(self) -> bool:
        """True where learning helped."""
        return self.learned < self.nearest


def train(
    unit: Unit,
    rows: Rows,
    learner: Learner,
    training: Training,
    learns_bias: bool = False,
    note: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Train the learner, and the unit's bias if it `learns_bias`.

    The weight is rounded and measured at every fifth of the training; the best one counts. Training ends
    where nothing is left to learn.

    Raises:
        CalibrationError: Fewer samples than a batch has, or the loss grows beyond what the output zero would give.
        NonFiniteError: The loss is NaN or Inf.
    """
    if rows.samples < training.samples:
        raise CalibrationError(f"batch_size={training.samples} needs as many samples; there are {rows.samples}.")
    random, window = np.random.default_rng(training.seed), max(1, training.iterations // WINDOWS)
    nearest = unit.loss(rows, learner.nearest)
    result = Outcome(learner.nearest, _copy(unit.bias), nearest, nearest)
    measured = rows.targets[:: rows.measured_each]
    energy = float(measured.square().sum()) / len(measured)  # the loss of the output zero
    watch, bias, total = _Watch(training.early_stop, nearest, energy), None, 0.0
    if learns_bias:
        unit.bias = _copy(unit.bias)
        bias = Adam(unit.bias)
    for iteration in range(training.iterations):
        x, target = _batch(rows, training, random, learner.value)
        matrix = unit.matrix(learner.value)
        error, slope = unit.forward(x, matrix)
        error -= target
        loss = (error.reshape(-1) @ error.reshape(-1)) / len(x)
        error *= 2 / len(x)
        if slope is not None:
            error *= slope
        beta = training.beta_at(iteration)
        learner.step(unit.native(unit.pull(x, error, matrix.shape)).contiguous(), training.rate_at(iteration), beta)
        if bias is not None:
            bias.step(training.rate_at(iteration), error.sum(0))
        total += loss
        result.iterations = iteration + 1
        if note is not None and iteration % training.period == 0:
            note(iteration, float(loss))
        last = learner.done or iteration + 1 == training.iterations
        if last or (iteration + 1) % window == 0:
            watch.check(float(total) / window)
            weight = learner.rounded()
            if (lost := unit.loss(rows, weight)) < result.learned:
                result.weight, result.bias, result.learned = _copy(weight), _copy(unit.bias), lost
            if last or (beta is not None and watch.ends(float(total) / window, learner.penalty(beta))):
                break
            total = 0.0
    return result


def _copy(x: Array | None) -> Array | None:
    return None if x is None else x.clone()


@dataclass
class _Watch:
    """Looks at the mean loss of each part of the training."""

    early_stop: bool
    nearest: float
    energy: float
    best: float = math.inf

    def check(self, loss: float) -> None:
        """Raise an error where the training leads nowhere."""
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss is {loss}: a lower learning_rate may help, or the data holds NaN or Inf.")
        # A layer that should give nothing but zeros has no measure of its own: what is no gain is not kept.
        if 0 < 2 * self.energy < loss and loss > 10 * self.nearest:
            raise CalibrationError(
                f"The training diverges: loss {loss:.3g}, without it {self.nearest:.3g}. Lower the learning_rate."
            )

    def ends(self, loss: float, penalty: float | None) -> bool:
        """Return True where an early stop was asked for, and nothing is gained any more."""
        measure = loss if penalty is None else penalty
        worse, self.best = measure >= self.best, min(self.best, measure)
        return self.early_stop and worse


def _batch(rows: Rows, training: Training, random: np.random.Generator, near: Array) -> tuple[Array, Array]:
    """Inputs and targets of one iteration, on the device of `near`."""
    picked = rows.pick(training, random)

    def gather(x: Array) -> Array:
        return _on(x[picked[0]] if len(picked) == 1 else namespace(x).cat([x[part] for part in picked]), near)

    inputs = gather(rows.inputs)
    if rows.floats is not None:
        keep = random.random(tuple(inputs.shape), np.float32) < training.drop_ratio
        xp = namespace(inputs)
        inputs = xp.where(_on(xp.as_tensor(keep), near), inputs, gather(rows.floats))
    return inputs, gather(rows.targets)


def _on(x: Array, near: Array) -> Array:
    return x.to(near.device, non_blocking=True)
