"""SpinQuant: rotations of the residual stream (R1) and of value heads (R2) that are learned (Liu et al. 2024).

    minimise   mean over tokens of KL( p(x) || p_Q(x; R1, R2) )       p of the float model, p_Q of the quantized one
    over       orthogonal matrices, from the Hadamard ones that are folded before; steps of cayley.py, rate falling to 0
    rounding   counts as the identity in gradients (arXiv:2405.16406, section 3.2)

Weights and inputs are rounded as they will be, so a step sees the loss of the scheme. What was learned is kept where it
is better than the Hadamard matrices on batches that no step has seen. The paper's loss is the cross-entropy of the
next token; the divergence from the float model needs no labels and is what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.base.log import logger
from quark.base.progress import progress, status
from quark.errors import ConfigError, NonFiniteError
from quark.torch.algorithms.keep_better import rounded
from quark.torch.algorithms.rotation.block import BlockPlan
from quark.torch.algorithms.rotation.cayley import MatrixRotation, cayley_step, in_blocks, keeping_mean
from quark.torch.calibration.divergence import divergence, log_probabilities
from quark.torch.config.algo_configs import RotationConfig
from quark.torch.layers import QuantLayer
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.residual_stream import Residual

SEEN = 0.875
"""Share of the calibration batches that steps see; the others are for validation."""
STREAM = ""
"""Name of R1 among the matrices; that of an R2 is its block and the number of its value path."""


@dataclass
class Learned:
    """The learned rotations.

    Attributes:
        matrices: Name -> matrix, float64, as it is applied after the Hadamard matrix.
        before, after: Divergence on the validation batches, in nats, with the Hadamard matrices and with these.
    """

    matrices: dict[str, torch.Tensor]
    before: float
    after: float

    def stream(self) -> MatrixRotation | None:
        """R1, where there is one."""
        return MatrixRotation(self.matrices[STREAM]) if STREAM in self.matrices else None

    def plan(self, block: str, plan: BlockPlan) -> BlockPlan:
        """Return the plan of the changes that are left to a block whose Hadamard rotations, of that plan, are done."""
        heads = tuple(
            (path, rows, MatrixRotation(self.matrices[_head_name(block, index)]))
            for index, (path, rows, _) in enumerate(plan.heads)
        )
        return BlockPlan(self.stream(), plan.residual, heads, {}, (False, None))


def _head_name(block: str, index: int) -> str:
    """The name of the R2 of a value path."""
    return f"{block}.{index}"


def learn_rotations(
    model: nn.Module,
    layers: Mapping[str, QuantLayer],
    parts: Mapping[str, Residual],
    plans: Mapping[str, BlockPlan],
    stream: tuple[int, bool] | None,
    config: RotationConfig,
    data: Sequence[Any],
) -> Learned | None:
    """Learn rotations of a model whose Hadamard rotations are folded; None where they are no better than those.

    Args:
        model: Not changed.
        layers: Full name -> quantized layer; their quantizers are off.
        parts: Name of a part of the model, "" for what is around the blocks -> the stream in it.
        plans: Block -> what was rotated there.
        stream: Size of R1, and whether it keeps the mean; None without R1.
        config: With the settings of the steps.
        data: Calibration batches, two at least.

    Raises:
        ConfigError: Too few batches. NotSupportedError: The model gives no logits.
        NonFiniteError: A loss, or the gradient of a rotation, holds NaN or Inf; known when all steps are done.
    """
    if len(data) < 2:
        raise ConfigError(
            f"RotationConfig(trainable=True) needs two calibration batches or more, one for validation; "
            f"{len(data)} given."
        )
    turned = _Turned(model, layers, parts, plans, stream)
    count = min(len(data) - 1, max(1, round(SEEN * len(data))))
    seen, validation = data[:count], data[count:]
    order, losses = torch.Generator().manual_seed(0), list[torch.Tensor]()  # read when all are there
    with evaluating(model), turned.rounding():
        first = turned.mean_loss(validation)
        for step in progress(range(config.train_steps), "steps", config.train_steps):
            picked = torch.randperm(count, generator=order)[: config.train_batch_size].tolist()
            loss = turned.step([seen[index] for index in picked], config.train_lr * (1 - step / config.train_steps))
            status(partial(_divergence_text, loss))
            losses.append(loss)
        before, after, *seen_losses = torch.stack([first, turned.mean_loss(validation), *losses]).tolist()
    if not all(map(math.isfinite, seen_losses)):
        raise NonFiniteError("RotationConfig(trainable=True): the loss or the gradient of a rotation holds NaN or Inf.")
    logger.info(
        "Learned rotations: divergence %.4g with Hadamard matrices, %.4g with learned ones: %s.",
        before,
        after,
        "kept" if _is_better(after, before) else "Hadamard matrices are kept",
    )
    return Learned(turned.applied(), before, after) if _is_better(after, before) else None


def _divergence_text(loss: torch.Tensor) -> str:
    return f"divergence {float(loss):.4g}"


def _is_better(after: float, before: float) -> bool:
    return after < before


@dataclass
class _Change:
    """The product of a parameter with a matrix, on the device of the parameter: of its last axis, or of its rows."""

    matrix: str
    rows: torch.Tensor | slice | None = None

    def apply(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.to(x.device)
        if self.rows is None:
            return in_blocks(x, matrix)
        if isinstance(self.rows, slice):
            return in_blocks(x.t(), matrix).t() if x.ndim > 1 else in_blocks(x, matrix)
        part = x[self.rows]
        part = in_blocks(part.t(), matrix).t() if x.ndim > 1 else in_blocks(part, matrix)
        return x.index_copy(0, self.rows, part)


@dataclass
class _Turned:
    """A model whose parameters are functions of rotations.

    Attributes:
        model, layers, parts, plans, stream: As `learn_rotations` gets them.
        matrices: Name -> R, float64.
        changes: Full name of a parameter -> what is done to it, in order.
        values: Its values, float32.
    """

    model: nn.Module
    layers: Mapping[str, QuantLayer]
    parts: Mapping[str, Residual]
    plans: Mapping[str, BlockPlan]
    stream: tuple[int, bool] | None
    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    changes: dict[str, list[_Change]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = input_device(self.model)
        if self.stream is not None:
            size, keep_mean = self.stream
            self._add(STREAM, size - keep_mean)
            for part, residual in self.parts.items():
                self._add_stream(part, residual)
        for block, plan in self.plans.items():
            for index, (path, heads, rotation) in enumerate(plan.heads):
                name = _head_name(block, index)
                self._add(name, rotation.size)  # type: ignore[attr-defined]
                value: Any = self.model.get_submodule(f"{block}.{path.value}")
                self._change(
                    f"{block}.{path.value}", _Change(name, torch.cat(heads).to(value.weight.device, non_blocking=True))
                )
                self._change(f"{block}.{path.output}", _Change(name), bias=False)
        found = self.model.named_parameters(remove_duplicate=False)
        self.values = {name: parameter.detach().float() for name, parameter in found}

    def _add(self, name: str, size: int) -> None:
        self.matrices[name] = torch.eye(size, dtype=torch.float64, device=self.device)

    def _add_stream(self, part: str, residual: Residual) -> None:
        def full(leaf: str) -> str:
            return f"{part}.{leaf}" if part else leaf

        for writer in residual.writers:
            embeds = isinstance(self.model.get_submodule(full(writer)), nn.Embedding)
            self._change(full(writer), _Change(STREAM, None if embeds else slice(None)))
        readers = [reader for norm in residual.norms for reader in norm.readers]
        for reader in dict.fromkeys([*readers, *residual.readers]):
            self._change(full(reader), _Change(STREAM), bias=False)
        for norm in residual.norms:
            if getattr(self.model.get_submodule(full(norm.name)), "bias", None) is not None:
                self.changes.setdefault(f"{full(norm.name)}.bias", []).append(_Change(STREAM))

    def _change(self, layer: str, change: _Change, bias: bool = True) -> None:
        self.changes.setdefault(f"{layer}.weight", []).append(change)
        if bias and getattr(self.model.get_submodule(layer), "bias", None) is not None:
            self.changes.setdefault(f"{layer}.bias", []).append(change)

    def applied(self) -> dict[str, torch.Tensor]:
        """The matrices as they are applied: R1 in the form that keeps the mean, where it must."""
        return {name: self._as_applied(name, matrix) for name, matrix in self.matrices.items()}

    def _as_applied(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        return keeping_mean(matrix) if name == STREAM and self.stream and self.stream[1] else matrix

    def parameters(self, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All parameters, rotated, weights rounded; gradients reach the matrices."""
        turned = dict(self.values)
        applied = {name: self._as_applied(name, matrix).float() for name, matrix in matrices.items()}
        for name, changes in self.changes.items():
            for change in changes:
                turned[name] = change.apply(turned[name], applied[change.matrix])
        for name, layer in self.layers.items():
            for role in ("weight", "bias"):
                if getattr(layer.spec, role) is not None and f"{name}.{role}" in turned:
                    turned[f"{name}.{role}"] = _passed(turned[f"{name}.{role}"], getattr(layer.spec, role))
        return turned

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Within: layers round what they read and give, and gradients pass, unless `float_logits` is computed."""
        self.rounds = True
        with ExitStack() as hooks:
            for layer in self.layers.values():
                if layer.spec.input is not None:
                    hooks.enter_context(layer.register_forward_pre_hook(self._hook(layer.spec.input)))
                if layer.spec.output is not None:
                    hooks.enter_context(layer.register_forward_hook(self._hook(layer.spec.output)))
            yield

    def _hook(self, spec: Any) -> Callable[..., Any]:
        def change(module: nn.Module, args: tuple[Any, ...], *output: Any) -> Any:
            x = output[0] if output else args[0]
            y = _passed(x, spec) if self.rounds else x
            return y if output else (y, *args[1:])

        return change

    def _log_probabilities(self, batch: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, dict(parameters), args, kwargs, tie_weights=False)

        return log_probabilities(forward_batch(call, batch, self.device), type(self.model).__name__)  # type: ignore[arg-type]

    def loss(self, batch: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The divergence on one batch, in nats for each token."""
        self.rounds = False
        with torch.no_grad():
            expected = self._log_probabilities(batch, self.values)
        self.rounds = True
        found = self._log_probabilities(batch, parameters)
        return divergence(expected, found)

    def mean_loss(self, batches: Sequence[Any]) -> torch.Tensor:
        """The mean divergence with the matrices of now."""
        with torch.no_grad():
            parameters = self.parameters(self.matrices)
            return torch.stack([self.loss(batch, parameters) for batch in batches]).mean()

    def step(self, batches: Sequence[Any], rate: float) -> torch.Tensor:
        """One step of all matrices; the loss before it, NaN where a gradient is not finite."""
        with torch.enable_grad():
            leaves = {name: matrix.clone().requires_grad_() for name, matrix in self.matrices.items()}
            parameters = self.parameters(leaves)
            ends = [x for x in parameters.values() if x.requires_grad]
            # Batch by batch down to the parameters, then once through the rotations.
            cut = {n: x.detach().requires_grad_() if x.requires_grad else x for n, x in parameters.items()}
            losses = []
            for batch in batches:
                loss = self.loss(batch, cut) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            pulled = [cut[n].grad for n, x in parameters.items() if x.requires_grad]
            pairs = [(end, pull) for end, pull in zip(ends, pulled, strict=True) if pull is not None]
            gradients = torch.autograd.grad([e for e, _ in pairs], list(leaves.values()), [p for _, p in pairs])
        for (name, matrix), gradient in zip(self.matrices.items(), gradients, strict=True):
            self.matrices[name] = cayley_step(matrix, gradient, rate)
        # A sum that holds what is not finite is not finite, and 0 times it is NaN.
        return torch.stack(losses).sum() + sum(gradient.sum() * 0 for gradient in gradients)


def _passed(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """X as it will be rounded; its gradient passes."""
    return x + (rounded(x.detach(), spec) - x.detach())
