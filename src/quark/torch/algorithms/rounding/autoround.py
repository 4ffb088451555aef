"""AutoRound: rounding and clipping learned by signed gradient descent, block by block.

    W'(V, a, b) = Q_[a low, b high](W + scale V)      V in [-1/2, 1/2],  a, b in [1/2, 1]
    minimise    mean of E G E^T,   E = block(X~; W') - block_float(X)
    step        V -= lr sign(dL/dV),  a, b likewise; lr falls linearly to 0: `learned_rounding.py`

Cheng et al. 2023 (arXiv:2309.05516). The gradient passes round() unchanged. X~ is what the quantized blocks before
give, X what the float model feeds. G is the identity there; with `fisher` it is sum g g^T of the scores g of what the
block gives (`output_scores.py`), which makes the error, to second order, what it does to the model's distribution.

What the last step has is kept: the loss of a step is that of few batches, and its least value tells which of them were
easy. The errors that are reported are of the same batches before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import nn

from quark.base.progress import progress, report, status
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import no_tokens
from quark.torch.algorithms.layer_weights import weight_quantizer
from quark.torch.algorithms.rounding.learned_rounding import LearnedRounding, in_matrices, readers_of
from quark.torch.algorithms.rounding.output_scores import ByScores
from quark.torch.calibration.experts import expert_of
from quark.torch.layers import QuantLayer
from quark.torch.layers.base import hook_input
from quark.torch.layers.fake_quant import Mode
from quark.torch.model.batches import to_device
from quark.torch.model.blocks import Call, JoinedCalls, Unchanged, takes_joined

_REPORTED = 8
"""Batches, at most, whose error is reported."""
TOGETHER = 4096
"""Tokens, at most, of batches that run in one call: more would only take memory."""
_SQUARE_ERROR = "mean square error of the block"
_FISHER_ERROR = "mean square error of the block, by Fisher information"


class AutoRound(ByScores):
    """Learned rounding of a block's linear layers together; see `AutoRoundConfig`."""

    tokens_per_channel = 16  # of four times as many, learned weights were no better
    needs_float = True
    rounds = True
    sums = False

    def enter(self, block: Block) -> None:
        names = sorted({leaf for group in block.groups for leaf in group})
        chosen = self.config.inside_layer_modules
        layers = {block.full(leaf): block.layer(leaf) for leaf in names if not chosen or leaf in chosen}
        layers = {name: layer for name, layer in layers.items() if not weight_quantizer(layer).spec.is_cast}
        for name, layer in layers.items():
            if weight_quantizer(layer).mode is Mode.frozen:
                raise ConfigError(f"{name} was solved before AutoRound; name one solver in algo_config.")
        if layers:
            self._learn(block, layers)

    def _learn(self, block: Block, layers: Mapping[str, QuantLayer]) -> None:
        with reached(layers) as rows:
            targets = block.run(block.float_calls)
        idle = {expert_of(name) for name in layers if rows[name] == 0}
        layers = {name: layer for name, layer in layers.items() if rows[name]}
        block.left |= {*filter(None, idle)}
        if not layers:
            return
        if not all(isinstance(target, torch.Tensor) for target in targets):
            kind = type(targets[0]).__name__
            raise StructureError(f"{block.name or 'The model'} returns a {kind}; AutoRound learns from one tensor.")
        moments = None if self.scores is None else self.scores.of_block(block)
        loss = BlockLoss(block.module, block.calls, targets, moments)
        weights = in_matrices(readers_of(block, layers))
        try:
            first, last = self._descend(loss, weights, len(targets))
        except NotImplementedError as error:  # of an operator without a backward, as flex_attention on a CPU
            raise StructureError(
                f"No gradient comes through {block.name or 'the model'}, which AutoRound needs: {error} Possible: gptq."
            ) from error
        for weight in weights:
            weight.freeze()
        report(block.name, first, last, _SQUARE_ERROR if moments is None else _FISHER_ERROR)

    def _descend(self, loss: BlockLoss, weights: Sequence[LearnedRounding], batches: int) -> tuple[float, float]:
        """Take the steps; the loss before and after."""
        config, order = self.config, torch.Generator().manual_seed(0)
        reported = range(min(_REPORTED, batches))
        learned = [some.weight for weight in weights for some in weight.readers]
        for weight in weights:
            weight.attach()
        try:
            before = loss.mean(reported)
            for step in progress(range(config.iters), "steps", config.iters):
                picked = torch.randperm(batches, generator=order)[: config.batch_size].tolist()
                now = loss.learn(picked, learned)
                status(partial(_loss_text, now, before))
                fall = 1 - step / config.iters
                for weight in weights:
                    weight.step(config.lr * fall, config.minmax_lr * fall if config.enable_minmax_tuning else 0.0)
            after = loss.mean(reported)
        finally:
            for weight in weights:
                weight.detach()
        first, last = torch.stack([before, after]).tolist()
        return first, last


@dataclass
class Loss:
    """The loss of a step, which nothing waits for but who reads it.

    Attributes:
        parts: Errors and what they pull, whose products are it; both (tokens, channels).
    """

    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __float__(self) -> float:
        return sum(float((error * pull).sum()) for error, pull in self.parts)


def _loss_text(now: Loss, before: torch.Tensor) -> str:
    """How a step goes."""
    return f"loss {float(now):.4g}, at first {float(before):.4g}"


@dataclass
class BlockLoss:
    """How far what a block gives is from what it should give.

    Attributes:
        module: The block.
        calls: Its arguments, one for each batch.
        targets: What it should give; they wait where the calls do.
        moments: G, (channels, channels), of any size; None: the identity.
    """

    module: nn.Module
    calls: Sequence[Call]
    targets: Sequence[torch.Tensor]
    moments: torch.Tensor | None

    def __post_init__(self) -> None:
        joined = JoinedCalls(self.calls)
        self.joined = joined if takes_joined(self.module, joined) else None
        learned = [layer for layer in self.module.modules() if isinstance(layer, QuantLayer)]
        self.unchanged = Unchanged(self.module, self.calls, learned)
        if self.moments is not None:
            size = self.moments.diagonal().mean()
            plain = torch.eye(len(self.moments), device=self.moments.device)  # outputs that nothing reads
            self.moments = torch.where(size > 0, self.moments / size, plain)

    def learn(self, picked: Sequence[int], learned: Sequence[torch.Tensor]) -> Loss:
        """The loss of the picked batches; leaves the gradient of half of it on the learned values, and there alone.

        That is E G of the loss E G E^T, so autograd begins at what the block gives; steps go by its sign.
        """
        total, loss = sum(len(self.targets[index]) for index in picked), Loss()
        for some, call, target in self._together(picked):
            with torch.enable_grad(), self.unchanged.of(call.hidden, some):
                given = call.run(self.module)
            error = self._error(given.detach(), target)
            pull = self._weighed(error, len(target) / total / error.numel())
            torch.autograd.backward([given], [pull.view(given.shape).to(given.dtype)], inputs=list(learned))
            loss.parts.append((error, pull))
        return loss

    def mean(self, picked: Sequence[int]) -> torch.Tensor:
        """The mean loss of the picked batches, on their device."""
        with torch.no_grad():
            errors = [self._error(self.calls[index].run(self.module), self._target(index)) for index in picked]
            return torch.stack([(error * self._weighed(error, 1.0)).mean() for error in errors]).mean()

    def _together(self, picked: Sequence[int]) -> Iterator[tuple[Sequence[int], Call, torch.Tensor]]:
        """The batches, of few tokens several in one call where the block takes them so: larger products are faster."""
        several = max(1, TOGETHER // self.targets[picked[0]].shape[:-1].numel()) if self.joined else 1
        for first in range(0, len(picked), several):
            some = picked[first : first + several]
            joined = self.joined.of(some) if self.joined and len(some) > 1 else None
            if joined is None:
                yield from (([index], self.calls[index].loaded(), self._target(index)) for index in some)
            else:
                yield some, joined, torch.cat([self._target(index) for index in some])

    def _target(self, index: int) -> torch.Tensor:
        target, device = self.targets[index], self.calls[index].device
        return target if device is None else cast(torch.Tensor, to_device(target, device))

    def _error(self, given: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """E, (tokens, channels), float32."""
        return given.float().sub(target).flatten(0, -2)

    def _weighed(self, error: torch.Tensor, factor: float) -> torch.Tensor:
        """E G, times a factor."""
        if self.moments is None:
            return error * factor
        # beta=0: the first operand is not read.
        return torch.addmm(error, error, self.moments, beta=0, alpha=factor)


@contextmanager
def reached(layers: Mapping[str, QuantLayer]) -> Iterator[dict[str, int]]:
    """Within: forwards run, and the tokens of each layer are counted. Experts may get none; they have nothing to learn.

    Raises CalibrationError for other layers that no token reached in any of them; names them.
    """
    rows = dict.fromkeys(layers, 0)

    def count(name: str, _: nn.Module, inputs: torch.Tensor) -> None:
        # Of sorted rows, those of 0 are of tokens that the router sends elsewhere.
        rows[name] += inputs.shape[:-1].numel() if expert_of(name) is None else int(inputs.any(-1).sum())

    with ExitStack() as hooks:
        for name in layers:
            hooks.enter_context(hook_input(layers[name], partial(count, name)))
        yield rows
    idle = [name for name, count_of in rows.items() if count_of == 0 and expert_of(name) is None]
    if idle:
        raise CalibrationError(no_tokens(", ".join(idle[:6]) + (", ..." if len(idle) > 6 else "")))
