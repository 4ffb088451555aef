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
from quark.core.quantize import dequantize, elementwise, fake_quantize, quantize
from quark.core.rounding import RoundType
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import ConfigError

GAMMA, ZETA = -0.1, 1.1
STRETCH = ZETA - GAMMA
EDGE = 0.5 / STRETCH
"""The size of sigmoid(a) - 1/2 from which on h is clipped."""

SETTLED = 20.0
"""The size of `a` of a weight with one code to go to, where h is 0 and stays so."""


class Adam:
    """Kingma and Ba 2015 (arXiv:1412.6980), in one pass over memory; the step may change from call to call."""

    def __init__(self, *parameters: Array) -> None:
        self.optimizer = namespace(parameters[0]).optim.Adam(list(parameters), fused=True)

    def step(self, rate: float, *gradients: Array) -> None:
        """Move every parameter against its gradient."""
        (group,) = self.optimizer.param_groups
        group["lr"] = rate
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


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
        self.alpha = -xp.log(STRETCH / (share - GAMMA) - 1)
        self.alpha[span <= 0] = -SETTLED
        self.middle, self.span = low.add_(span, alpha=0.5), span.mul_(STRETCH)
        self.adam = Adam(self.alpha)
        self.views = tuple(map(_parts, (self.alpha, self.span, self.middle, self.value)))
        self.buffers = [xp.empty_like(self.views[0][0]) for _ in range(3)]

    def step(self, gradient: Array, rate: float, beta: float | None) -> None:
        """Learn from dL/dW~, which is overwritten; `beta` None leaves the regularizer out."""
        xp = namespace(gradient)
        alphas, spans, middles, values = self.views
        for push, alpha, span in zip(_parts(gradient), alphas, spans, strict=True):
            c, slope, pull = (buffer[: len(push)] for buffer in self.buffers)
            xp.mul(_centred(alpha, c), c, out=slope)
            push *= span
            if beta is not None and self.reg > 0:
                # 1.2 times 2 reg beta |2.4 c|^(beta - 1), from the logarithm of c^2: cheaper than a power.
                factor = math.log2(2 * STRETCH * self.reg * beta) + (beta - 1) * math.log2(2 * STRETCH)
                xp.log2(slope, out=pull).mul_((beta - 1) / 2).add_(factor).exp2_()
                push -= pull.copysign_(c)
            # 0 where h is clipped.
            push *= xp.threshold_(slope.neg_().add_(0.25), 0.25 - EDGE**2, 0.0)
        self.adam.step(rate, gradient)
        for alpha, span, middle, value in zip(alphas, spans, middles, values, strict=True):
            xp.addcmul(middle, span, _centred(alpha, self.buffers[0][: len(alpha)]).clamp_(-EDGE, EDGE), out=value)

    def penalty(self, beta: float) -> float | None:
        """The regularizer, if there is one: 0 where every weight has decided."""
        if not self.reg:
            return None
        total = 0.0
        for alpha in self.views[0]:
            distance = _centred(alpha, self.buffers[0][: len(alpha)]).abs_().clamp_(max=EDGE).div_(EDGE)
            total += float((1 - distance**beta).sum())
        return self.reg * total

    def rounded(self) -> Array:
        """The weight with every element on its grid."""
        side = namespace(self.alpha).where(self.alpha >= 0, EDGE, -EDGE)
        return fake_quantize(side.mul_(self.span).add_(self.middle), self.params, self.spec)


class AdaQuant:
    """A weight while it is learned through the rounding.

    Args:
        weight: Any shape, float32; not changed.
        params, spec: What it is quantized to, of any type; scale and zero point stay as they are.

    Attributes:
        value: W~ of now, shape of the weight.
        nearest: What it would be without learning.
    """

    def __init__(self, weight: Array, params: QParams | None, spec: TensorSpec) -> None:
        self.params, self.spec, self.weight = params, spec, weight.clone()
        self.nearest = fake_quantize(weight, params, spec)
        self.value = self.nearest.clone()
        self.adam = Adam(self.weight)
        self.limits: tuple[Array, Array] | None = None
        if spec.has_zero_point:
            assert params is not None
            scale, _ = elementwise(params, spec, tuple(weight.shape))
            ends = (dequantize(weight * 0 + end, params, spec) for end in (spec.dtype.min, spec.dtype.max))
            self.limits = tuple(end + side * scale for end, side in zip(ends, (-0.5, 0.5), strict=True))

    def step(self, gradient: Array, rate: float, beta: float | None = None) -> None:
        """Learn from dL/dW~, which is overwritten."""
        if self.limits is not None:
            for push, weight, low, high in zip(*map(_parts, (gradient, self.weight, *self.limits)), strict=True):
                push.masked_fill_((weight < low) | (weight > high), 0.0)
        self.adam.step(rate, gradient)
        fake_quantize(self.weight, self.params, self.spec, out=self.value)

    def penalty(self, beta: float) -> None:
        """No regularizer."""

    def rounded(self) -> Array:
        """The weight on its grid."""
        return self.value


def _parts(x: Array) -> Sequence[Array]:
    """Views of x that fit the cache."""
    parts: Sequence[Array] = x.view(-1).split(chunk_bytes_for(x) // 4)
    return parts


def _centred(alpha: Array, out: Array) -> Array:
    """Sigmoid(a) - 1/2."""
    return namespace(alpha).sigmoid(alpha, out=out).sub_(0.5)
