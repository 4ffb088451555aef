"""AutoRound: rounding and clipping learned by signed gradient descent, block by block.

    W'(V, a, b) = Q_[a low, b high](W + scale V)      V in [-1/2, 1/2],  a, b in [1/2, 1]
    minimise    mean of E G E^T,   E = block(X~; W') - block_float(X)
    step        V -= lr sign(dL/dV),  a, b likewise; lr falls linearly to 0

Cheng et al. 2023 (arXiv:2309.05516). The gradient passes round() unchanged. X~ is what the quantized blocks before
give, X what the float model feeds. G is the identity there; with `fisher` it is sum g g^T of the scores g of what the
block gives (`output_scores.py`), which makes the error, to second order, what it does to the model's distribution.

What the last step has is kept: the loss of a step is that of few batches, and its least value tells which of them were
easy. The errors that are reported are of the same batches before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.core.array import dtype_name
from quark.core.quantize import blockwise, quantize_elements, quantize_scales, range_of, second_level
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.progress import progress, report, status
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.input_group import no_tokens
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer
from quark.torch.algorithms.rounding.output_scores import ByScores
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import Mode
from quark.torch.model.batches import hidden_width, tokens_in
from quark.torch.model.blocks import Call, joined_call, takes_joined

LOWEST_SHARE = 0.5
"""Least share of the range that clipping may keep."""
REPORTED = 8
"""Batches, at most, whose error is reported."""
TOGETHER = 4096
"""Tokens, at most, of batches that run in one call: more would only take memory."""
SCORED = 16
"""Tokens for each channel whose scores make G: of four times as many, learned weights were no better."""
SQUARE_ERROR = "mean square error of the block"
FISHER_ERROR = "mean square error of the block, by Fisher information"


class AutoRound(ByScores):
    """Learned rounding of a block's linear layers together; see `AutoRoundConfig`."""

    needs_float = True
    rounds = True
    sums = False

    def scored(self, model: nn.Module, data: Sequence[Any]) -> Sequence[Any]:
        """The first batches, as many as the moments of so wide an output need."""
        tokens = accumulate(tokens_in([batch]) for batch in data)
        enough = SCORED * hidden_width(model) or float("inf")
        return data[: next((index for index, count in enumerate(tokens, 1) if count >= enough), len(data))]

    def enter(self, block: Block) -> None:
        names = sorted({leaf for group in block.groups for leaf in group})
        chosen = self.config.inside_layer_modules
        layers = {block.full(leaf): block.layer(leaf) for leaf in names if not chosen or leaf in chosen}
        layers = {name: layer for name, layer in layers.items() if not weight_quantizer(layer).spec.is_cast}
        for name, layer in layers.items():
            if weight_quantizer(layer).mode is Mode.frozen:
                raise ConfigError(f"{name} was solved before AutoRound; name one solver in algo_config.")
        if layers:
            self._learn(block, [LearnedWeight(name, layer) for name, layer in layers.items()])

    def _learn(self, block: Block, weights: list[LearnedWeight]) -> None:
        config, order = self.config, torch.Generator().manual_seed(0)
        with reached(weights):
            targets = [call.run(block.module) for call in block.float_calls]
        if not all(isinstance(target, torch.Tensor) for target in targets):
            kind = type(targets[0]).__name__
            raise StructureError(f"{block.name or 'The model'} returns a {kind}; AutoRound learns from one tensor.")
        moments = None if self.scores is None else self.scores.of_block(block)
        loss = BlockLoss(block.module, block.calls, targets, moments)
        size = min(config.batch_size, len(targets))
        reported = range(min(REPORTED, len(targets)))
        for weight in weights:
            weight.attach()
        try:
            before = loss.mean(reported)
            for step in progress(range(config.iters), "steps", config.iters):
                picked = torch.randperm(len(targets), generator=order)[:size].tolist()
                now = loss.learn(picked, [weight.shown for weight in weights])
                status(f"loss {now:.4g}, at first {before:.4g}")
                fall = 1 - step / config.iters
                for weight in weights:
                    weight.step(config.lr * fall, config.minmax_lr * fall if config.enable_minmax_tuning else 0.0)
            after = loss.mean(reported)
        finally:
            for weight in weights:
                weight.detach()
        for weight in weights:
            weight.freeze()
        report(block.name, before, after, SQUARE_ERROR if moments is None else FISHER_ERROR)


@dataclass
class BlockLoss:
    """How far what a block gives is from what it should give.

    Attributes:
        module: The block.
        calls: Its arguments, one for each batch.
        targets: What it should give.
        moments: G, (channels, channels), of any size; None: the identity.
    """

    module: nn.Module
    calls: Sequence[Call]
    targets: Sequence[torch.Tensor]
    moments: torch.Tensor | None

    def __post_init__(self) -> None:
        self.joins = len(self.calls) > 1 and takes_joined(self.module, self.calls[:2])
        if self.moments is not None:
            size = self.moments.diagonal().mean()
            self.moments = self.moments / size if float(size) > 0 else None

    def learn(self, picked: Sequence[int], learned: Sequence[torch.Tensor]) -> float:
        """The loss of the picked batches; leaves its gradient on the learned values, and there alone."""
        total = 0.0
        with torch.enable_grad():
            for call, target in self._together(picked):
                loss = self._of(call, target) * (len(target) / sum(len(self.targets[index]) for index in picked))
                loss.backward(inputs=list(learned))  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        return total

    def mean(self, picked: Sequence[int]) -> float:
        """The mean loss of the picked batches."""
        with torch.no_grad():
            return float(torch.stack([self._of(self.calls[index], self.targets[index]) for index in picked]).mean())

    def _together(self, picked: Sequence[int]) -> Iterator[tuple[Call, torch.Tensor]]:
        """The batches, of few tokens several in one call where the block takes them so: larger products are faster."""
        several = max(1, TOGETHER // self.targets[picked[0]].shape[:-1].numel()) if self.joins else 1
        for first in range(0, len(picked), several):
            some = picked[first : first + several]
            joined = joined_call([self.calls[index] for index in some])
            if joined is None:
                yield from ((self.calls[index], self.targets[index]) for index in some)
            else:
                yield joined, torch.cat([self.targets[index] for index in some])

    def _of(self, call: Call, target: torch.Tensor) -> torch.Tensor:
        error = call.run(self.module).float() - target.float()
        return (error * (error if self.moments is None else error @ self.moments)).mean()


class LearnedWeight:
    """A layer's weight while its rounding and clipping are learned; in the block view of its split.

    Attributes:
        shown: The weight that the layer computes with.
        offset: V, in steps.
        low_share, high_share: a and b, shape of the stored scale.
    """

    def __init__(self, name: str, layer: QuantLayer) -> None:
        self.name, self.layer = name, layer
        self.spec: TensorSpec = weight_quantizer(layer).spec
        self.split = self.spec.split
        self.parameter = cast(nn.Parameter, layer.weight)
        self.shape = tuple(self.parameter.shape)
        self.low, self.high = range_of(self.parameter.detach(), self.spec)
        self.dtype = dtype_name(self.parameter)
        first = qparams_from_range(self.low, self.high, self.spec, self.dtype)
        self.second = second_level(first, self.parameter.detach(), self.spec).second
        self.weight = self.split.blocks(self.parameter.detach().float())
        self.offset = torch.zeros_like(self.weight)
        self.low_share, self.high_share = torch.ones_like(self.low), torch.ones_like(self.high)

    def attach(self) -> None:
        """Let the layer compute with the learned weight."""
        del self.layer._parameters["weight"]
        self._show()

    def detach(self) -> None:
        """Give the layer its own weight back."""
        self.layer.__dict__.pop("weight", None)
        self.layer.register_parameter("weight", self.parameter)

    def step(self, rate: float, clip_rate: float) -> None:
        """One step against the sign of the gradient."""
        if self.shown.grad is None:
            return  # an expert that the picked batches did not reach
        gradient = self.split.blocks(self.shown.grad.float())
        if clip_rate:
            self._clip(gradient, clip_rate)
        self.offset.sub_(gradient.sign(), alpha=rate).clamp_(-0.5, 0.5)
        self._show()

    def _clip(self, gradient: torch.Tensor, rate: float) -> None:
        """A step of the range.

        Inside, y = scale q with round() passed: dy/dscale = (y - W) / scale. Beyond it, y is the end of the range
        itself.
        """
        low, high = self.low * self.low_share, self.high * self.high_share
        above = self.moved > self.split.to_blocks(high, self.shape)
        below = self.moved < self.split.to_blocks(low, self.shape)
        of_scale = (gradient * (self.values - self.weight)).masked_fill_(above | below, 0.0)
        inside = self._sums(of_scale) / (high - low).clip(1e-12)
        by_high = (self._sums(gradient * above) + inside) * self.high
        by_low = (self._sums(gradient * below) - inside) * self.low
        if self.spec.symmetric or not self.spec.has_zero_point:
            by_high = by_low = by_high + by_low
        self.low_share.sub_(by_low.sign(), alpha=rate).clamp_(LOWEST_SHARE, 1.0)
        self.high_share.sub_(by_high.sign(), alpha=rate).clamp_(LOWEST_SHARE, 1.0)

    def freeze(self) -> None:
        """Write the values of now into the layer."""
        freeze_weight(self.layer, self._shown_values(), self._params())

    def _show(self) -> None:
        """Let the layer compute with the values of now."""
        scale, zero = blockwise(self._params(), self.spec, self.shape)
        self.moved = torch.addcmul(self.weight, scale, self.offset)
        self.values = quantize_elements(self.moved, scale, zero, self.spec)
        self.shown = self._shown_values().requires_grad_()
        self.layer.__dict__["weight"] = self.shown

    def _shown_values(self) -> torch.Tensor:
        values: torch.Tensor = self.split.unblock(self.values, self.shape)
        return values.to(self.parameter.dtype).detach()

    def _params(self) -> QParams:
        first = qparams_from_range(self.low * self.low_share, self.high * self.high_share, self.spec, self.dtype)
        return quantize_scales(first, self.second, self.spec)

    def _sums(self, blocks: torch.Tensor) -> torch.Tensor:
        """The sum of each part, shape of the stored scale."""
        axes = self.split.axes(len(self.shape))
        return (blocks.sum(axes) if axes else blocks).reshape(self.low.shape)


@contextmanager
def reached(weights: Sequence[LearnedWeight]) -> Iterator[None]:
    """Within: forwards run. Raises CalibrationError for layers that no token reached in any of them; names them."""
    rows = dict.fromkeys(map(id, weights), 0)

    def count(weight: LearnedWeight) -> RemovableHandle:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows[id(weight)] += args[0].shape[:-1].numel()

        return weight.layer.register_forward_pre_hook(add)

    with ExitStack() as hooks:
        for weight in weights:
            hooks.enter_context(count(weight))
        yield
    idle = [weight.name for weight in weights if rows[id(weight)] == 0]
    if idle:
        raise CalibrationError(no_tokens(", ".join(idle[:6]) + (", ..." if len(idle) > 6 else "")))
