"""SVDQuant: a low-rank branch in the precision of the model takes the outliers; what is left is quantized.

    s = max|X|^alpha / max|W|^(1 - alpha)              of each input channel; alpha is searched
    L2 L1 diag(s) = nearest matrix of rank r to W diag(s)
    R = W - L2 L1                                      y = Q(X) Q(R)^T + X (L2 L1)^T
    error         || X R^T - Q(X) Q(R)^T ||^2          by which alpha is chosen
    refined       L2 L1 C = nearest matrix of rank r to (W - Q(R)) C,  X^T X = C C^T; kept while the error falls

Li et al. 2024 (arXiv:2411.05007). The refinement is that of the authors' own program, with the inputs' second moments
as the norm, under which the best branch for a given Q(R) is known (Zhang et al. 2024, arXiv:2410.06040).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import torch
from torch import nn

from quark.base.progress import status
from quark.core.array import on_cpu
from quark.core.checks import check, naming
from quark.core.quantize import fake_quantize
from quark.core.solvers.gptq import damped
from quark.core.solvers.low_rank import CLOSE, NEAR, ROUGH, nearest_of_each
from quark.core.spec import TensorSpec, by_row
from quark.errors import CalibrationError, ConfigError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup, flat
from quark.torch.algorithms.layer_weights import float_weight, weight_quantizer, weight_spec
from quark.torch.algorithms.rounding.column_problem import as_read
from quark.torch.algorithms.rounding.gptq import GPTQ
from quark.torch.algorithms.rounding.grids import dynamic_group
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.config.algo_configs import GPTQConfig, SVDQuantConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import Mode
from quark.torch.layers.low_rank import LowRankBranch, can_have_branch, put_branch

CANDIDATES = tuple(step / 20 for step in range(1, 20))
"""alpha, where the config lists none."""
DAMPING = 0.01
"""Share of the mean second moment that is added to each before their root is taken."""
_MIXTURES = 128
"""Mixtures of tokens on which branches are compared: the error on so many has a standard deviation of an eighth of the
error on all tokens where these lose it in one direction, and of a hundredth where they lose it in a hundred."""
_COMPARED = 512
"""Rows of a weight, evenly spread, on which the branches of all alphas are compared at least, where it has as many."""
SCALES = (1e-5, 1e5)
"""Range of s."""
_NOT_DEFINITE = (
    f"The second moments of the inputs ({{}} channels) are not positive definite, even with {DAMPING} of their mean "
    "added. Possible: more calibration data."
)


class SVDQuant(Algorithm):
    """A low-rank branch beside each large linear layer of a block; see `SVDQuantConfig`."""

    needs_whole = True
    sums = False
    validated_apart = True

    def __init__(self, config: SVDQuantConfig) -> None:
        super().__init__(config)
        solver = GPTQConfig(damp_percent=config.gptq_percdamp, desc_act=config.gptq_actorder)
        self.solver = GPTQ(solver) if config.use_gptq else None
        self.rounds = config.use_gptq  # type: ignore[misc]

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        able = [name for name, layer in layers.items() if self._can_take(name, layer)]
        if not able:
            raise ConfigError(
                "SVDQuantConfig chooses no quantized linear layer: all are excluded, or have a side under "
                f"min_layer_size={self.config.min_layer_size}. Possible: a smaller min_layer_size."
            )
        missing = [name for name in self.config.correction_layers or [] if name not in able]
        if missing:
            raise ConfigError(f"SVDQuantConfig.correction_layers: {missing[0]!r} is none of the layers it can take.")
        chosen = [name for name in able if self._takes(name, layers[name])]
        for name in chosen if self.config.use_gptq else ():
            _check_grid(name, weight_spec(layers[name]), self.config)

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        layers = {n: cast(QuantLayer, m) for n, m in group.layers.items() if self._takes(n, cast(QuantLayer, m))}
        if not layers:
            return
        first = group.inputs[: self.config.alpha_search_max_samples]
        some = InputGroup(group.layers, first, [], waiting=group.waiting)
        inputs = _Inputs.of(some, as_read(some, layers))
        for name, layer in layers.items():
            if weight_quantizer(layer).mode is Mode.frozen:
                raise ConfigError(f"{name} was solved before SVDQuant; name SVDQuant first in algo_config.")
        self._split([_Problem.of(name, layer) for name, layer in layers.items()], group.max_abs, inputs)
        if self.solver is not None:
            chosen = InputGroup(layers, group.inputs, [], waiting=group.waiting)  # type: ignore[arg-type]
            self.solver.on_inputs(chosen, block)

    def _takes(self, name: str, layer: QuantLayer) -> bool:
        listed = self.config.correction_layers
        return self._can_take(name, layer) and (listed is None or name in listed)

    def _can_take(self, name: str, layer: QuantLayer) -> bool:
        return can_have_branch(self.config, name, layer, layer.spec.weight)

    def _split(self, problems: Sequence[_Problem], largest: torch.Tensor, inputs: _Inputs) -> None:
        """Give layers that read one input their branches, and the weights that are left."""
        rank = self.config.svd_rank
        candidates = self.config.alpha_candidates or CANDIDATES
        alphas = candidates if self.config.search_alpha else (self.config.smooth_alpha,)
        each = [(one, smoothing_scale(largest, one.weight, alpha)) for one in problems for alpha in alphas]
        # Which alpha is best is seen before its branch is exact, which the first pass makes it.
        close = ROUGH if len(alphas) > 1 and self.config.refine_passes else CLOSE
        scaled = (_told(one.weight * scale, one, f"branch {i} of {len(each)}") for i, (one, scale) in enumerate(each))
        branches: dict[_Problem, list[tuple[torch.Tensor, torch.Tensor]]] = {one: [] for one in problems}
        for (one, scale), (left, right) in zip(each, nearest_of_each(scaled, rank, close, related=True), strict=True):
            branches[one].append((right / scale, left))
        for one, tried in branches.items():
            one.take(*one.best_of(tried, inputs), inputs)
        self._refine(problems, inputs)
        for one in problems:
            cast(nn.Parameter, one.layer.weight).data.copy_(one.chosen.rest)
            put_branch(one.layer, LowRankBranch(one.chosen.l1, one.chosen.l2))

    def _refine(self, problems: Sequence[_Problem], inputs: _Inputs) -> None:
        """Find branches of what the rounded rest leaves, while each loses less than the one before."""
        going = [*problems]
        for number in range(self.config.refine_passes if problems else 0):
            missing = (_told(one.weight - one.chosen.rounded, one, f"pass {number}") for one in going)
            starts = [one.chosen.l1.float() @ inputs.root for one in going]
            found = nearest_of_each(missing, self.config.svd_rank, NEAR, inputs.root, starts)
            for one, (left, right) in zip([*going], found, strict=True):
                better = one.take(inputs.unweighed(right), left, inputs)
                # A device is not asked: what is no better is found again by the passes left, and refused again.
                if on_cpu(better) and not better:
                    going.remove(one)


def _told(x: torch.Tensor, problem: _Problem, how_far: str) -> torch.Tensor:
    """The matrix, and a word on what is looked for."""
    status(f"{problem.name}, {how_far}")
    return x


def smoothing_scale(largest: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """S of each input channel, (in,).

    Args:
        largest: max|X|, (in,).
        weight: (out, in).
        alpha: Between 0 and 1.
    """
    of_weight = weight.abs().amax(0).clamp(min=SCALES[0])
    return (largest.clamp(min=1e-8) ** alpha / of_weight ** (1 - alpha)).clamp(*SCALES)


@dataclass
class _Split:
    """A weight as a branch and a rest, as they are stored.

    Attributes:
        l1, l2: The branch.
        rest: R, in the dtype of the weight.
        rounded: Q(R), float32.
        error: Of the outputs, on their device: what is better is chosen there, and nothing waits.
    """

    l1: torch.Tensor
    l2: torch.Tensor
    rest: torch.Tensor
    rounded: torch.Tensor
    error: torch.Tensor

    def or_better(self, other: _Split) -> _Split:
        """The one that loses less, this one where both lose the same."""
        if on_cpu(self.error):
            return other if other.error < self.error else self
        pairs = ((getattr(self, part.name), getattr(other, part.name)) for part in fields(self))
        return _Split(*(torch.where(other.error < self.error, theirs, own) for own, theirs in pairs))

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        l1: torch.Tensor,
        l2: torch.Tensor,
        dtype: torch.dtype,
        spec: TensorSpec,
        inputs: _Inputs,
    ) -> _Split:
        l1, l2 = l1.to(dtype).contiguous(), l2.to(dtype).contiguous()
        rest = (weight - l2.float() @ l1.float()).to(dtype)
        rounded = fake_quantize(rest, tensor_qparams(rest, spec), spec).float()
        return cls(l1, l2, rest, rounded, inputs.error(rest.float(), rounded))


@dataclass(eq=False)
class _Problem:
    """A layer and what is known of its branch.

    Attributes:
        name, layer: The layer.
        weight: In float32, shape (out, in).
        spec: Of the weight.
        best: The branch that loses least so far.
    """

    name: str
    layer: QuantLayer
    weight: torch.Tensor
    spec: TensorSpec
    best: _Split | None = None

    @classmethod
    def of(cls, name: str, layer: QuantLayer) -> _Problem:
        return cls(name, layer, float_weight(layer), weight_spec(layer))

    @property
    def chosen(self) -> _Split:
        assert self.best is not None
        return self.best

    def best_of(
        self, branches: Sequence[tuple[torch.Tensor, torch.Tensor]], inputs: _Inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The branch that loses least, by some rows of the weight where rows are rounded each by itself."""
        if len(branches) == 1:
            return branches[0]
        apart = by_row(self.spec) and self.spec.scale_spec is None
        rows = slice(None, None, max(1, len(self.weight) // _COMPARED) if apart else 1)
        weight, dtype = self.weight[rows], cast(torch.Tensor, self.layer.weight).dtype
        with naming(self.name):
            errors = [_Split.of(weight, l1, l2[rows], dtype, self.spec, inputs).error for l1, l2 in branches]
        best = torch.stack(errors).nan_to_num(torch.inf).argmin()
        # A device is not asked which it is.
        l1, l2 = (torch.stack(part).index_select(0, best[None])[0] for part in zip(*branches, strict=True))
        return l1, l2

    def take(self, l1: torch.Tensor, l2: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        """Take this branch if it loses less than the best one; whether it does, on its device."""
        with naming(self.name):
            tried = _Split.of(self.weight, l1, l2, cast(torch.Tensor, self.layer.weight).dtype, self.spec, inputs)
        best, self.best = self.best, tried if self.best is None else self.best.or_better(tried)
        return torch.isfinite(tried.error) if best is None else tried.error < best.error


@dataclass
class _Inputs:
    """Tokens that a layer reads, X, and what rounding changes of them, D = X - Q(X), over the root of their number.

    Of many tokens mixtures take the place: S X and S D, the entries of S being +1 and -1 at random. They keep the mean
    square of what is linear in the tokens, and all branches are compared on the same ones.

    Attributes:
        tokens: (tokens or _MIXTURES, channels), float32.
        changes: D likewise; None where inputs are not rounded, or it is not known how.
        root: C.
    """

    tokens: torch.Tensor
    changes: torch.Tensor | None
    root: torch.Tensor

    @classmethod
    def of(cls, group: InputGroup, rounded: InputGroup) -> _Inputs:
        root, failed = torch.linalg.cholesky_ex(damped(group.gram, DAMPING))
        check(failed == 0, CalibrationError(_NOT_DEFINITE.format(len(root))))
        tokens, root = _mixed(group, group.inputs), root.float()
        if rounded is group:
            return cls(tokens, None, root)
        waiting = group.waiting
        pairs = zip(group.inputs, rounded.inputs, strict=True)
        changes = [waiting.leave(waiting.load(x) - waiting.load(y)) for x, y in pairs]
        return cls(tokens, _mixed(group, changes), root)

    def error(self, rest: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Mean square of X R^T - Q(X) Q(R)^T = X (R - Q(R))^T + D Q(R)^T, summed over outputs."""
        lost = self.tokens @ (rest - rounded).T
        if self.changes is not None:
            lost.addmm_(self.changes, rounded.T)
        return lost.square_().sum()

    def unweighed(self, right: torch.Tensor) -> torch.Tensor:
        """C^-1 of the right factor of a matrix that was weighed."""
        return torch.linalg.solve_triangular(self.root, right, upper=False, left=False)


def _mixed(group: InputGroup, inputs: list[torch.Tensor]) -> torch.Tensor:
    """All tokens of some inputs of a group, or mixtures of them where they are many; see `_Inputs`."""
    count, every = group.count, (flat(x).float() for x in group.in_turn(inputs))
    if count <= _MIXTURES:
        return torch.cat(list(every)) / count**0.5
    random, mixed = np.random.default_rng(0), torch.zeros(())
    for x in every:
        signs = torch.from_numpy(random.choice(np.array([-1, 1], np.float32), (_MIXTURES, len(x)))).to(x.device)
        mixed = mixed.to(x.device) + signs @ x
    return mixed / (_MIXTURES * count) ** 0.5


def _check_grid(name: str, spec: TensorSpec, config: SVDQuantConfig) -> None:
    """Raise ConfigError where the grid that the config describes for GPTQ is not that of a layer."""
    asked = (config.gptq_n_bits, config.gptq_symmetric)
    found = (spec.dtype.bits, spec.symmetric or not spec.has_zero_point)
    size = dynamic_group(spec)
    if asked != found or config.gptq_group_size not in (-1, size):
        raise ConfigError(
            f"SVDQuantConfig: gptq_n_bits={asked[0]}, gptq_symmetric={asked[1]}, gptq_group_size="
            f"{config.gptq_group_size} is not how {name} is quantized ({spec}). Possible: gptq_n_bits={found[0]}, "
            f"gptq_symmetric={found[1]}, gptq_group_size=-1 (that of the scheme)."
        )
