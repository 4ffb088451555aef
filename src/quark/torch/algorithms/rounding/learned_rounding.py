"""Rounding and clipping of weights while they are learned: many layers in one matrix, so that a step of all of them is
one of the matrix.

    W'(V, a, b) = Q_[a low, b high](W + scale V)      V in [-1/2, 1/2],  a, b in [1/2, 1]
    step            V -= lr sign(dL/dV),  a, b likewise

Inside the range y = scale q with round() passed, so dy/dscale = (y - W) / scale; beyond it y is the end of the range:

    dL/dhigh = sum over the part of  g (above + inside (y - W) / (high - low))
    dL/dlow  = sum over the part of  g (below - inside (y - W) / (high - low))

On a device each step is a kernel launch, and those of small layers take longer to launch than to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from quark.core.array import dtype_name
from quark.core.blocks.block_types import BlockType
from quark.core.dtypes import MICRO_EXPONENT
from quark.core.granularity import PerChannel, PerGroup
from quark.core.quantize import blockwise, quantize_elements, quantize_scales, range_of, second_level
from quark.core.scales import QParams, qparams_from_range
from quark.core.spec import TensorSpec
from quark.torch.algorithms.base import Block
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer
from quark.torch.layers import QuantLayer
from quark.torch.layers.linear import QuantLinear
from quark.torch.layers.low_rank import branch_of
from quark.torch.model.blocks.forwards import forward_instead

_LOWEST_SHARE = 0.5
"""Least share of the range that clipping may keep."""


TOGETHER = 1 << 20
"""Weights, at most, of layers that are learned in one matrix: of more, a step takes longer than to launch it."""


class Readers:
    """Layers that read one tensor, and are multiplied with it at once; or one layer.

    Args:
        layers: By full name; all of one number of inputs, one spec and one dtype.

    Attributes:
        weight: What they compute with, (outputs of all, inputs), while rounding is learned; takes the gradient.
    """

    weight: torch.Tensor

    def __init__(self, layers: Mapping[str, QuantLayer]) -> None:
        self.names, self.layers, self.forwards = [*layers], [*layers.values()], ExitStack()
        self.parameters = [cast(nn.Parameter, layer.weight) for layer in self.layers]
        self.outputs = [len(parameter) for parameter in self.parameters]
        self.weight = self.parameters[0]
        biases = [cast("torch.Tensor | None", layer.bias) for layer in self.layers]
        self.bias = torch.cat([x.detach() for x in biases if x is not None]) if biases[0] is not None else None

    def attach(self) -> None:
        """Let the layers compute with `weight`."""
        for layer, part in zip(self.layers, torch.split(self.weight.detach(), self.outputs), strict=True):
            del layer._parameters["weight"]
            layer.__dict__["weight"] = self.weight if len(self.layers) == 1 else part
        if len(self.layers) > 1:
            self.take_forwards(lambda x: F.linear(x, self.weight, self.bias))

    def detach(self) -> None:
        """Give the layers what they had."""
        for layer, parameter in zip(self.layers, self.parameters, strict=True):
            layer.__dict__.pop("weight", None)
            layer.register_parameter("weight", parameter)
        self.give_forwards_back()

    def take_forwards(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let each layer give its part of a product, (..., outputs of all)."""
        parts = _Parts(self, product)
        for index, layer in enumerate(self.layers):
            self.forwards.enter_context(forward_instead(layer, partial(parts.of, index)))

    def give_forwards_back(self) -> None:
        """Let each layer give what it gave."""
        self.forwards.close()


class _Parts:
    """The outputs of several layers for one tensor, computed at once when the first of them is asked."""

    def __init__(self, readers: Readers, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.readers, self.product = readers, product
        self.given: dict[int, torch.Tensor] = {}
        self.x: torch.Tensor | None = None
        self.state: tuple[int, int, bool] | None = None

    def of(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer of a number."""
        state = (x._version, self.readers.weight._version, torch.is_grad_enabled())
        if self.x is not x or self.state != state or index not in self.given:
            parts = torch.split(self.product(x), self.readers.outputs, -1)
            self.x, self.state, self.given = x, state, dict(enumerate(parts))
        given = self.given.pop(index)
        if not self.given:
            self.x = None  # all are asked, and nothing is kept
        return given


class LearnedRounding:
    """Weights of some layers while their rounding and clipping are learned; in the block view of their split.

    Args:
        readers: Of one spec and one dtype, whose weights have rows of one length, by `row_of`; or one layer.

    Attributes:
        weight: W, float32.
        offset: V, in steps.
        ends: low and high of each part, (2, *shape of the stored scale).
        share: a and b, likewise.
        values: W', float32; `moved` is what was rounded.
    """

    def __init__(self, readers: Sequence[Readers]) -> None:
        self.readers = readers
        self.layers = [layer for some in readers for layer in some.layers]
        self.parameters = [parameter for some in readers for parameter in some.parameters]
        self.spec: TensorSpec = weight_quantizer(self.layers[0]).spec
        self.split, self.dtype = self.spec.split, dtype_name(self.parameters[0])
        alone = len(self.layers) == 1
        row = None if alone else row_of(self.parameters[0], self.spec)
        cut = [p.detach() if row is None else p.detach().reshape(-1, row) for p in self.parameters]
        self.counts = [len(part) for part in cut]
        matrix = cut[0] if alone else torch.cat(cut)
        self.shape = tuple(matrix.shape)
        self.ends = torch.stack(range_of(matrix, self.spec))
        self.outward = self.ends.sign()
        first = qparams_from_range(self.ends[0], self.ends[1], self.spec, self.dtype)
        self.second = second_level(first, matrix, self.spec).second
        self.weight = self.split.blocks(matrix.float())
        self.offset, self.share = torch.zeros_like(self.weight), torch.ones_like(self.ends)
        self.shown, self.gradient = torch.empty_like(matrix), torch.empty(self.shape, device=matrix.device)
        self.gradients = [part.view(some.weight.shape) for some, part in self._leaves()]
        self.show()

    def attach(self) -> None:
        """Let the layers compute with the learned weights."""
        for some in self.readers:
            some.attach()

    def detach(self) -> None:
        """Give the layers their own weights back."""
        for some in self.readers:
            some.detach()

    def step(self, rate: float, clip_rate: float) -> None:
        """One step against the sign of the gradient that lies on the weights of the readers."""
        pulls = [some.weight.grad for some in self.readers]
        reached = [(to, pull) for to, pull in zip(self.gradients, pulls, strict=True) if pull is not None]
        if not reached:
            return  # experts that the picked batches did not reach
        torch._foreach_copy_([to for to, _ in reached], [pull for _, pull in reached])
        for some, to, pull in zip(self.readers, self.gradients, pulls, strict=True):
            some.weight.grad = None
            if pull is None:
                to.zero_()
        gradient = self.split.blocks(self.gradient)
        if clip_rate:
            self._clip(gradient, clip_rate)
        self.offset.sub_(gradient.sign(), alpha=rate).clamp_(-0.5, 0.5)
        self.show()

    def show(self) -> None:
        """Let the layers compute with the values of now."""
        self.clipped = self.ends * self.share
        scale, zero = blockwise(self._params(), self.spec, self.shape)
        self.moved = torch.addcmul(self.weight, scale, self.offset)
        self.values = quantize_elements(self.moved, scale, zero, self.spec)
        self.shown.copy_(self.split.unblock(self.values, self.shape))

    def freeze(self) -> None:
        """Write the values of now into the layers, which have their own weights."""
        params, first = self._params(), 0
        for layer, parameter, count in zip(self.layers, self.parameters, self.counts, strict=True):
            rows = slice(first, first + count)
            own = params
            if len(self.layers) > 1:  # in memory of its own
                shape, both = self.split.scale_shape(tuple(parameter.shape)), (params.scale, params.zero_point)
                scale, zero = (None if x is None else x[rows].reshape(shape).clone() for x in both)
                own = QParams(cast(torch.Tensor, scale), zero)
            freeze_weight(layer, self.shown[rows].view(parameter.shape), own)
            first += count

    def _leaves(self) -> Iterator[tuple[Readers, torch.Tensor]]:
        """Give readers their weights; each with the rows of the gradient that are theirs."""
        counts, first = iter(self.counts), 0
        for some in self.readers:
            rows = slice(first, first + sum(next(counts) for _ in some.layers))
            shape = (sum(some.outputs), *some.parameters[0].shape[1:])
            some.weight = self.shown[rows].detach().view(shape).requires_grad_()
            yield some, self.gradient[rows]
            first = rows.stop

    def _clip(self, gradient: torch.Tensor, rate: float) -> None:
        """A step of the range."""
        low, high = self.clipped.unbind()
        factors = gradient.new_empty(3, *gradient.shape)
        below, above, inside = factors.unbind()
        torch.lt(self.moved, self.split.to_blocks(low, self.shape), out=below)
        torch.gt(self.moved, self.split.to_blocks(high, self.shape), out=above)
        torch.sub(self.values, self.weight, out=inside)
        inside.addcmul_(inside, below + above, value=-1)
        factors *= gradient
        axes = [axis + 1 for axis in self.split.axes(len(self.shape))]
        sums = (factors.sum(axes) if axes else factors).reshape(3, *low.shape)
        width = (high - low).clip(1e-12)
        sums[0].addcdiv_(sums[2], width, value=-1)
        sums[1].addcdiv_(sums[2], width)
        if self.spec.symmetric or not self.spec.has_zero_point:
            way = sums[:2].mul_(self.ends).sum(0, keepdim=True).sign()
            self.share.sub_(way, alpha=rate)
        else:
            self.share.addcmul_(sums[:2].sign(), self.outward, value=-rate)
        self.share.clamp_(_LOWEST_SHARE, 1.0)

    def _params(self) -> QParams:
        first = qparams_from_range(self.clipped[0], self.clipped[1], self.spec, self.dtype)
        return quantize_scales(first, self.second, self.spec)


def row_of(weight: torch.Tensor, spec: TensorSpec) -> int | None:
    """How long the rows are into which a weight is cut so that what a row becomes depends on that row alone, and that
    are split like the weight; None where there are none, or scales have a second level.
    """
    split = spec.split
    if spec.scale_spec is not None or spec.dtype.name in MICRO_EXPONENT or isinstance(spec.dtype, BlockType):
        return None
    if isinstance(split, PerGroup) and split.axis in (-1, 1) and split.size > 0:
        return split.size if weight.shape[-1] % split.size == 0 else None
    whole = split == PerChannel(0) or (isinstance(split, PerGroup) and split.axis in (-1, 1))
    return weight.shape[-1] if whole and weight.ndim == 2 else None


def readers_of(block: Block, layers: Mapping[str, QuantLayer]) -> list[Readers]:
    """Layers of a block, by full name, those together that read one tensor and may be multiplied at once."""
    groups = _each_once([[name for name in map(block.full, group) if name in layers] for group in block.groups])
    joined = [Readers({name: layers[name] for name in names}) for names in groups if _join(names, layers)]
    together = {some.names[0]: some for some in joined} if joined and _fit(joined, block) else {}
    found: list[Readers] = []
    for names in filter(None, groups):
        one = together.get(names[0])
        found += [Readers({name: layers[name]}) for name in names] if one is None else [one]
    return found


def _each_once(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Groups of names, each name once, and one that was in several groups in one of its own."""
    counts = Counter(name for names in groups for name in names)
    return [[name for name in names if counts[name] == 1] for names in groups] + [
        [name] for name, count in counts.items() if count > 1
    ]


def _fit(readers: Sequence[Readers], block: Block) -> bool:
    """Return True where a block runs with layers that give parts of one tensor: not if it writes on such a part, or
    reshapes it without a copy.
    """
    call = block.calls[0].loaded()
    for some in readers:
        forwards = [layer.forward for layer in some.layers]
        some.take_forwards(partial(_side_by_side, forwards))
    try:
        with torch.enable_grad():
            call.with_hidden(call.hidden.detach().requires_grad_()).run(block.module)
    except RuntimeError:
        return False
    finally:
        for some in readers:
            some.give_forwards_back()
    return True


def _side_by_side(forwards: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(x) for forward in forwards], -1)


def _join(names: Sequence[str], layers: Mapping[str, QuantLayer]) -> bool:
    """Return True where layers compute nothing but a product with a weight, which could be one for all."""
    own = [layers[name] for name in names]
    weights = [cast(torch.Tensor, layer.weight) for layer in own]
    if len(own) < 2 or sum(map(torch.Tensor.numel, weights)) > TOGETHER or _kind(own[0])[1] is None:
        return False
    plain = (
        type(layer) is QuantLinear and "forward" not in layer.__dict__ and branch_of(layer) is None for layer in own
    )
    return all(plain) and len({(_kind(layer), layer.bias is None) for layer in own}) == 1


def _kind(layer: QuantLayer) -> tuple[Any, ...]:
    """Return the common properties of layers that may share a matrix; the second is None where none may."""
    spec, weight = weight_quantizer(layer).spec, cast(torch.Tensor, layer.weight)
    return spec, row_of(weight, spec), weight.dtype, weight.device


def in_matrices(readers: Sequence[Readers]) -> list[LearnedRounding]:
    """The rounding of layers, of as many in one matrix as may be."""
    kinds: dict[Any, list[list[Readers]]] = {}
    for index, some in enumerate(readers):
        kind = _kind(some.layers[0])
        bundles = kinds.setdefault(index if kind[1] is None else kind, [[]])
        if sum(p.numel() for others in [*bundles[-1], some] for p in others.parameters) > TOGETHER and bundles[-1]:
            bundles.append([])
        bundles[-1].append(some)
    return [LearnedRounding(bundle) for bundles in kinds.values() for bundle in bundles]
