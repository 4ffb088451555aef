"""AutoRound: rounding and clipping learned by signed gradient descent, block by block.

    W'(V, a, b) = Q_[a low, b high](W + scale V)      V in [-1/2, 1/2],  a, b in [1/2, 1]
    minimise    || block(X~; W') - block_float(X) ||^2
    step        V -= lr sign(dL/dV),  a, b likewise; lr falls linearly to 0; the best step is kept

Cheng et al. 2023 (arXiv:2309.05516). The gradient passes round() unchanged. X~ is what the quantized blocks before
give, X what the float model feeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.core.array import dtype_name
from quark.core.quantize import elementwise, quantize_elements, quantize_scales, range_of, second_level
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, ConfigError, StructureError
from quark.progress import progress, report, status
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import no_tokens
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import Mode

LOWEST_SHARE = 0.5
"""Least share of the range that clipping may keep."""
BLOCK_ERROR = "mean square error of the block on the batches of a step"
"""What is learned from: of the first step, which is the nearest rounding, and of the best one."""


class AutoRound(Algorithm):
    """Learned rounding of a block's linear layers together; see `AutoRoundConfig`."""

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
            self._learn(block, [LearnedWeight(name, layer) for name, layer in layers.items()])

    def _learn(self, block: Block, weights: list[LearnedWeight]) -> None:
        with reached(weights):
            targets = [call.run(block.module) for call in block.float_calls]
        if not all(isinstance(target, torch.Tensor) for target in targets):
            kind = type(targets[0]).__name__
            raise StructureError(f"{block.name or 'The model'} returns a {kind}; AutoRound learns from one tensor.")
        size = min(self.config.batch_size, len(targets))
        order = torch.Generator().manual_seed(0)
        first, best = 0.0, float("inf")
        for weight in weights:
            weight.attach()
        try:
            for step in progress(range(self.config.iters), "steps", self.config.iters):
                picked = torch.randperm(len(targets), generator=order)[:size].tolist()
                loss = self._loss(block, targets, picked, [weight.shown for weight in weights])
                first = loss if step == 0 else first
                if loss < best:
                    best = loss
                    for weight in weights:
                        weight.remember()
                status(f"loss {loss:.4g}, at first {first:.4g}, least {best:.4g}")
                fall = 1 - step / self.config.iters
                for weight in weights:
                    clip = self.config.minmax_lr * fall if self.config.enable_minmax_tuning else 0.0
                    weight.step(self.config.lr * fall, clip)
        finally:
            for weight in weights:
                weight.detach()
        for weight in weights:
            weight.freeze()
        report(block.name, first, best, BLOCK_ERROR)

    @staticmethod
    def _loss(
        block: Block, targets: Sequence[torch.Tensor], picked: Sequence[int], learned: Sequence[torch.Tensor]
    ) -> float:
        """Mean square error of the picked batches; leaves its gradient on the learned values, and there alone."""
        total = 0.0
        with torch.enable_grad():
            for index in picked:
                error = block.calls[index].run(block.module).float() - targets[index].float()
                loss = error.square().mean() / len(picked)
                loss.backward(inputs=list(learned))  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        return total


class LearnedWeight:
    """A layer's weight while its rounding and clipping are learned.

    Attributes:
        shown: The weight that the layer computes with.
        offset: V, in steps, shape of the weight.
        low_share, high_share: a and b, shape of the scale.
    """

    def __init__(self, name: str, layer: QuantLayer) -> None:
        self.name, self.layer = name, layer
        self.spec: TensorSpec = weight_quantizer(layer).spec
        self.parameter = cast(nn.Parameter, layer.weight)
        self.weight = self.parameter.detach().float()
        self.low, self.high = range_of(self.parameter.detach(), self.spec)
        self.dtype = dtype_name(self.parameter)
        first = qparams_from_range(self.low, self.high, self.spec, self.dtype)
        self.second = second_level(first, self.parameter.detach(), self.spec).second
        self.offset = torch.zeros_like(self.weight)
        self.low_share, self.high_share = torch.ones_like(self.low), torch.ones_like(self.high)
        self.best = (self.offset, self.low_share, self.high_share)

    def attach(self) -> None:
        """Let the layer compute with the learned weight."""
        del self.layer._parameters["weight"]
        self._show()

    def detach(self) -> None:
        """Give the layer its own weight back."""
        self.layer.__dict__.pop("weight", None)
        self.layer.register_parameter("weight", self.parameter)

    def remember(self) -> None:
        """Keep the values of now as the best ones."""
        self.best = (self.offset.clone(), self.low_share.clone(), self.high_share.clone())

    def step(self, rate: float, clip_rate: float) -> None:
        """One step against the sign of the gradient.

        Inside the range, y = scale q with round() passed: dy/dV = scale, dy/dscale = (y - W) / scale. Beyond it,
        y is the end of the range itself.
        """
        if self.shown.grad is None:
            return  # an expert that the picked batches did not reach
        gradient = self.shown.grad.float()
        if clip_rate:
            low, high = (self._spread(side) for side in (self.low * self.low_share, self.high * self.high_share))
            moved = self.weight + self.scale * self.offset
            above, below = moved > high, moved < low
            inside = torch.where(above | below, 0.0, gradient * (self.values - self.weight)) / (high - low).clip(1e-12)
            by_high = inside * self._spread(self.high) + torch.where(above, gradient, 0.0) * self._spread(self.high)
            by_low = -inside * self._spread(self.low) + torch.where(below, gradient, 0.0) * self._spread(self.low)
            if self.spec.symmetric or not self.spec.has_zero_point:
                by_high = by_low = by_high + by_low
            for share, by in (("low_share", by_low), ("high_share", by_high)):
                total = self.spec.split.sums(by)
                setattr(self, share, (getattr(self, share) - clip_rate * total.sign()).clamp(LOWEST_SHARE, 1.0))
        self.offset = (self.offset - rate * gradient.sign()).clamp(-0.5, 0.5)
        self._show()

    def freeze(self) -> None:
        """Write the best values found into the layer."""
        self.offset, self.low_share, self.high_share = self.best
        params = self._params()
        freeze_weight(self.layer, self._quantized(params).to(self.parameter.dtype), params)

    def _show(self) -> None:
        """Let the layer compute with the values of now."""
        params = self._params()
        self.values = self._quantized(params)
        self.shown = self.values.to(self.parameter.dtype).requires_grad_()
        self.layer.__dict__["weight"] = self.shown

    def _params(self) -> QParams:
        first = qparams_from_range(self.low * self.low_share, self.high * self.high_share, self.spec, self.dtype)
        return quantize_scales(first, self.second, self.spec)

    def _quantized(self, params: QParams) -> torch.Tensor:
        self.scale, zero = elementwise(params, self.spec, tuple(self.weight.shape))
        return quantize_elements(self.weight + self.scale * self.offset, self.scale, zero, self.spec)

    def _spread(self, part: torch.Tensor) -> torch.Tensor:
        """A value of each part, for each element."""
        spread: torch.Tensor = self.spec.split.to_elements(part, tuple(self.weight.shape))
        return spread


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
