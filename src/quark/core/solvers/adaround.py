"""AdaRound and AdaQuant: the weight of one layer, learned so that its output is that of the float layer.

    minimise   mean over rows of || f(X~ W~^T + b) - Y ||^2      X~: what the layer really gets, Y: the float output
    gradient   2/rows (f'(Z) (f(Z) - Y))^T X~,  Z = X~ W~^T + b

    AdaRound   W~ = low + (high - low) h,  h = clip(1.2 sigmoid(a) - 0.1, 0, 1)    low <= W <= high: nearest codes
               + reg sum(1 - |2 h - 1|^beta) after the warm start, beta falling by half a cosine
               a starts where W~ = W; at the end a >= 0 rounds up
    AdaQuant   W~ = Q(W); the gradient passes round() unchanged, and is 0 where W is beyond the range

Nagel et al. 2020 (arXiv:2004.10568), Hubara et al. 2020 (arXiv:2006.10518); both with Adam. Gradients are written out:
no tape, and everything elementwise walks over the weight in chunks that stay in the cache. Arrays are torch tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quark.core.array import Array, chunk_bytes_for, namespace
from quark.core.quantize import FakeQuantizer, dequantize, elementwise, fake_quantize, quantize
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import ConfigError

GAMMA, ZETA = -0.1, 1.1
_STRETCH = ZETA - GAMMA
_EDGE = 0.5 / _STRETCH
"""The size of sigmoid(a) - 1/2 from which on h is clipped."""

_SETTLED = 20.0
"""The size of `a` of a weight with one code to go to, where h is 0 and stays so."""

_FARTHEST = 3.2
"""Rates that a step of Adam moves a parameter at most: (1 - beta1) / sqrt(1 - beta2), a little more than 3.16."""

LOOK, WORTH = 20, 0.75
"""Steps between two looks at what is undecided, and the share of it from which on leaving the rest is worth a copy."""


class Adam:
    """Kingma and Ba 2015 (arXiv:1412.6980), in one pass over memory; the rate may change from step to step.

    The kernel of torch's own optimizer, whose class would load its compiler first, for longer than a small layer takes.
    """

    def __init__(self, *parameters: Array) -> None:
        xp = namespace(parameters[0])
        self.parameters = list(parameters)
        self.means, self.squares = ([xp.zeros_like(x) for x in parameters] for _ in range(2))
        self.steps = [xp.zeros((), device=x.device) for x in parameters]

    def step(self, rate: float, *gradients: Array) -> None:
        """Move every parameter against its gradient."""
        for step in self.steps:
            step.add_(1)
        namespace(gradients[0])._fused_adam_(
            self.parameters, list(gradients), self.means, self.squares, [], self.steps, lr=rate, beta1=0.9, beta2=0.999,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def narrow(self, parameter: Array, chosen: Array) -> None:
        """Go on with some elements, `parameter`, of the one parameter there is."""
        self.parameters = [parameter]
        self.means, self.squares = [self.means[0][chosen]], [self.squares[0][chosen]]


class AdaRound:
    """A weight while it is learned whether each element rounds up or down.

    With c = sigmoid(a) - 1/2 the formulas are W~ = middle + 1.2 (high - low) clip(c, -1/2.4, 1/2.4) and
    dh/da = 1.2 (1/4 - c^2).

    Args:
        weight: Any shape, float32.
        params, spec: Its integers; scale and zero point stay as they are.
        reg: Factor on the regularizer.

    Attributes:
        value: W~ of now, shape of the weight.
        nearest: What it would be without learning.

    Raises:
        ConfigError: The spec is of a float or block type, whose neighbours are not a step apart.
    """

    def __init__(self, weight: Array, params: QParams, spec: TensorSpec, reg: float = 0.01) -> None:
        if not spec.has_zero_point:
            raise ConfigError(f"AdaRound learns codes of integers; the weight is {spec.dtype}. Possible: AdaQuant.")
        xp = namespace(weight)
        self.params, self.spec, self.reg = params, spec, reg
        self.nearest = fake_quantize(weight, params, spec)
        codes = quantize(weight, params, replace(spec, rounding=RoundType.floor))
        low = dequantize(codes, params, spec)
        span = dequantize(xp.clip(codes + 1, spec.dtype.min, spec.dtype.max), params, spec) - low
        share = xp.clip((weight - low) / xp.where(span > 0, span, 1.0), 0.0, 1.0)
        self.value = low + span * share
        self.alpha = -xp.log(_STRETCH / (share - GAMMA) - 1).view(-1)
        self.alpha[span.view(-1) <= 0] = -_SETTLED
        self.middle, self.span = low.add_(span, alpha=0.5).view(-1), span.mul_(_STRETCH).view(-1)
        self.adam, self.steps, self.undecided = Adam(self.alpha), 0, self.alpha.numel()
        self.chosen: Array | None = None
        self._cut()

    @property
    def done(self) -> bool:
        """True where every weight has decided, but for one in a thousand, which the sign of its `a` decides."""
        return self.undecided <= self.value.numel() // 1000

    def step(self, gradient: Array, rate: float, beta: float | None) -> None:
        """Learn from dL/dW~, which is overwritten; `beta` None leaves the regularizer out."""
        xp, flat = namespace(gradient), gradient.view(-1)
        push = flat if self.chosen is None else flat[self.chosen]
        regular = beta is not None and self.reg > 0
        if beta is not None and regular:
            # 1.2 times 2 reg beta |2.4 c|^(beta - 1), from the logarithm of c^2: cheaper than a power.
            power = (beta - 1) / 2
            factor = math.log2(2 * _STRETCH * self.reg * beta) + (beta - 1) * math.log2(2 * _STRETCH)
        for part, (alpha, span, _, c, slope, pull) in zip(_cache_views(push), self.parts, strict=True):
            xp.sigmoid(alpha, out=c).sub_(0.5)
            xp.mul(c, c, out=slope)
            part.mul_(span)
            if regular:
                part.sub_(xp.log2(slope, out=pull).mul_(power).add_(factor).exp2_().copysign_(c))
            # 0 where h is clipped.
            part.mul_(xp.threshold_(slope.neg_().add_(0.25), 0.25 - _EDGE**2, 0.0))
        self.adam.step(rate, push)
        value = self.value.view(-1) if self.chosen is None else push
        for part, (alpha, span, middle, c, _, _) in zip(_cache_views(value), self.parts, strict=True):
            xp.addcmul(middle, span, xp.sigmoid(alpha, out=c).sub_(0.5).clamp_(-_EDGE, _EDGE), out=part)
        if self.chosen is not None:
            self.value.view(-1).index_copy_(0, self.chosen, value)
        self.steps += 1
        if self.steps % LOOK == 0:
            self._leave_the_decided()

    def _leave_the_decided(self) -> None:
        """Go on with those only whose h is not clipped, once they are fewer: the others have no gradient."""
        left = (self.alpha.sigmoid().sub_(0.5).abs_() < _EDGE).nonzero().view(-1)
        self.undecided = len(left)
        if not 0 < self.undecided < WORTH * len(self.alpha):
            return
        self.chosen = left if self.chosen is None else self.chosen[left]
        self.alpha, self.span, self.middle = self.alpha[left], self.span[left], self.middle[left]
        self.adam.narrow(self.alpha, left)
        self._cut()

    def _cut(self) -> None:
        """Views that fit the cache: of a, span and middle, and of three buffers."""
        views = [_cache_views(x) for x in (self.alpha, self.span, self.middle)]
        buffers = [namespace(self.alpha).empty_like(views[0][0]) for _ in range(3)]
        self.parts = [(*parts, *(buffer[: len(parts[0])] for buffer in buffers)) for parts in zip(*views, strict=True)]

    def penalty(self, beta: float) -> float | None:
        """The regularizer, if there is one: 0 where every weight has decided."""
        if not self.reg:
            return None
        distance = self.alpha.sigmoid().sub_(0.5).abs_().clamp_(max=_EDGE).div_(_EDGE)
        return self.reg * float((1 - distance**beta).sum())

    def rounded(self) -> Array:
        """The weight with every element on its grid."""
        side = namespace(self.alpha).where(self.alpha >= 0, _EDGE, -_EDGE)
        decided = side.mul_(self.span).add_(self.middle)
        if self.chosen is None:
            weight = decided.view(self.value.shape)
        else:
            weight = self.value.clone()
            weight.view(-1).index_copy_(0, self.chosen, decided)
        return fake_quantize(weight, self.params, self.spec)


class AdaQuant:
    """A weight while it is learned through the rounding.

    Args:
        weight: Any shape, float32; not changed.
        params, spec: What it is quantized to, of any type; scale and zero point stay as they are.

    Attributes:
        value: W~ of now, shape of the weight.
        nearest: What it would be without learning.
        done: Always False: every step of the training is taken.
    """

    done = False

    def __init__(self, weight: Array, params: QParams | None, spec: TensorSpec) -> None:
        self.params, self.spec, self.weight = params, spec, weight.clone()
        self.nearest = fake_quantize(weight, params, spec)
        self.value = self.nearest.clone()
        self.adam, self.fake_quantize = Adam(self.weight), FakeQuantizer(params, spec, tuple(weight.shape))
        self.ends: tuple[Array, ...] | None = None
        if spec.has_zero_point:
            assert params is not None
            scale, _ = elementwise(params, spec, tuple(weight.shape))
            ends = (dequantize(weight * 0 + end, params, spec) for end in (spec.dtype.min, spec.dtype.max))
            self.ends = tuple(end + side * scale for end, side in zip(ends, (-0.5, 0.5), strict=True))
        self.room = 0.0

    def step(self, gradient: Array, rate: float, beta: float | None = None) -> None:
        """Learn from dL/dW~, which is overwritten."""
        if self.ends is not None and self.room <= 0:
            self.room = self._stop_beyond(gradient)
        self.room -= _FARTHEST * rate
        self.adam.step(rate, gradient)
        self.fake_quantize(self.weight, self.value)

    def _stop_beyond(self, gradient: Array) -> float:
        """Leave out weights beyond the range; return how far the nearest of the others is from its end."""
        assert self.ends is not None
        room = math.inf
        for push, weight, low, high in zip(*map(_cache_views, (gradient, self.weight, *self.ends)), strict=True):
            nearest = namespace(weight).minimum(weight - low, high - weight)
            push.masked_fill_(nearest < 0, 0.0)
            room = min(room, float(nearest.min()))
        return room

    def penalty(self, beta: float) -> None:
        """No regularizer."""

    def rounded(self) -> Array:
        """The weight on its grid."""
        return self.value


def _cache_views(x: Array) -> Sequence[Array]:
    """Views of x that fit the cache."""
    parts: Sequence[Array] = x.view(-1).split(chunk_bytes_for(x) // 4)
    return parts
