"""Distillation: codes and scales of a quantized model, learned from what the float model says of the same tokens.

    W' = s exp(a) (round(u V) - zero_point)    V the shape of W, u the mean step of the grid there; a shaped like s
    minimise     mean over tokens of KL( p(x) || p_Q(x; V, a) )
    gradients    dL/dV = s exp(a) u dL/dW',   dL/da = sum over the part of W' dL/dW';   round() counts as the identity
    steps        Adam on V and a, the rate falling linearly to 0

V starts where an algorithm before has solved the codes, else at W / (s u). It begins in the middle of a cell then, and
a code flips only where the gradient points one way for long: by steps of random sign, n of them, V gets lr sqrt(n / 3)
away from there, which has to stay well under a half. So the rate falls with the number of steps where none is given: of
MXFP4 with inputs, 1632 steps at the rate of 288 ended where they began, at half of it they gained. Inputs are rounded
as they will be, so their loss is seen and the weights make up for a part of it. The objective is that of knowledge
distillation (Hinton et al. 2015) as LLM-QAT (Liu et al. 2023, arXiv:2305.17888) takes it, and the scales are learned in
the way of LSQ (Esser et al. 2020) and EfficientQAT (Chen et al. 2024).

Batches that no step has seen say what it gained. Where the algorithm is asked for by name alone and they say nothing,
half and a quarter of the way are tried, then the model is left as it was.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.base.progress import progress, status
from quark.core.array import dtype_name
from quark.core.blocks.block_types import BlockType
from quark.core.dtypes import Dtype
from quark.core.quantize import elementwise, quantize_elements
from quark.core.rounding import step_of
from quark.core.scales import QParams, round_scale
from quark.core.spec import FLOAT_SCALES
from quark.errors import ConfigError, NonFiniteError, StructureError
from quark.torch.algorithms.base import DIVERGENCE, Algorithm, BlockErrors
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.layer_weights import freeze_weight, weight_quantizer, weight_spec
from quark.torch.calibration.divergence import divergence, log_probabilities
from quark.torch.config.algo_configs import DistillationConfig
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.tied_weights import overlapping

UNSEEN, MOST_UNSEEN = 0.125, 8
"""Share of the batches for validation, which no step sees, and most of them. The first ones: what a model has written
itself comes after the user's data."""
REACH, FASTEST = 0.2, 0.02
"""How far steps of random sign may move a code, in mean steps of the grid, and the highest rate that this sets."""
_RETREATS = 2
"""How often half of the way is gone back where what was learned is no better."""


class Distillation(Algorithm):
    """Learned codes and scales of all linear layers together; see `DistillationConfig`."""

    config: DistillationConfig
    reads_inputs = False
    needs_whole = True
    sums = False
    learns = True

    def learned_bytes(self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> int:
        """The teacher, and for each weight of a linear layer its codes now and at first, scales and zero points,
        values, gradient and two moments, float32.
        """
        teacher = sum(parameter.nbytes for parameter in model.parameters())
        linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        return teacher + 8 * 4 * linear

    def learn(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantLayer],
        data: Sequence[Any],
        weights: BlockWeights,
        work: Path | None,
    ) -> None:
        """Keep the float model, which is the teacher, and the data; what is refused is found before any work.

        Raises:
            ConfigError: Fewer than two batches.
            StructureError: No layer has codes to learn.
            NotSupportedError: The model gives no logits.
        """
        if not any(map(_has_codes, layers.values())):
            raise StructureError("DistillationConfig: no linear layer has a weight in codes, with scales.")
        if len(data) < 2:
            raise ConfigError(
                f"DistillationConfig needs two calibration batches or more, one for validation: {len(data)}."
            )
        self.data = data
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        for module in self.teacher.modules():
            if isinstance(module, FakeQuantize):
                module.mode = Mode.off
        with torch.no_grad(), evaluating(self.teacher):
            self._log_probabilities(self.teacher, data[0])

    def finish(self, model: nn.Module, layers: Mapping[str, QuantLayer]) -> None:
        """Learn, and write what was learned into the layers where it is better.

        Raises:
            StructureError: Every weight in codes is shared with something else.
            NonFiniteError: The loss or its gradient holds NaN or Inf.
        """
        learned = learned_weights(model, layers)
        if not learned:
            raise StructureError(
                "DistillationConfig: no linear layer has a quantized weight that only this layer uses."
            )
        count = max(1, min(round(UNSEEN * len(self.data)), MOST_UNSEEN))
        validation = merged(self.data[:count], self.config.batch_size)
        seen = merged(self.data[count:], self.config.batch_size)
        start = time.perf_counter()
        with evaluating(self.teacher), evaluating(model), frozen(learned):
            before = self._mean_loss(model, {}, validation)
            self._learn(model, learned, seen)
            after = self._mean_loss(model, _values(learned), validation)
            for _ in range(_RETREATS if self.keeps_better else 0):
                if after < before:
                    break
                for weight in learned:
                    weight.go_back()
                after = self._mean_loss(model, _values(learned), validation)
        del self.teacher, self.data
        kept = after < before or not self.keeps_better
        done = BlockErrors("", self.name, (), before, after, kept, time.perf_counter() - start, DIVERGENCE)
        self.errors.append(done)
        logger.info("%s", done)
        if kept:
            for weight in learned:
                weight.freeze()

    def _learn(self, model: nn.Module, learned: Sequence[LearnedCodes], batches: Sequence[Any]) -> None:
        config, order = self.config, torch.Generator().manual_seed(0)
        steps = [
            index for _ in range(config.epochs) for index in torch.randperm(len(batches), generator=order).tolist()
        ]
        lr, scale_lr = rates_for(config, len(steps))
        groups = [
            {"params": [weight.codes for weight in learned], "lr": lr},
            {"params": [weight.shift for weight in learned if weight.shift is not None], "lr": scale_lr},
        ]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]], betas=(0.9, 0.99))
        rates, losses = [group["lr"] for group in optimizer.param_groups], list[torch.Tensor]()
        for step, index in enumerate(progress(steps, "steps", len(steps))):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / len(steps))
            values = {name: value.requires_grad_() for name, value in _values(learned).items()}
            with torch.enable_grad():
                loss = self._loss(model, values, batches[index])
                loss.backward(inputs=list(values.values()))  # type: ignore[no-untyped-call]
            for weight in learned:
                weight.pull(values[weight.parameter_name])
            optimizer.step()
            losses.append(loss.detach())
            status(partial(_divergence_text, losses[-1]))
        for step, value in enumerate(torch.stack(losses).tolist()):  # read once, when a device is done
            if not math.isfinite(value):
                raise NonFiniteError(f"DistillationConfig: the divergence of step {step} is {value}.")

    def _loss(self, model: nn.Module, values: Mapping[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """The divergence on one batch, in nats for each token."""
        with torch.no_grad():
            expected = self._log_probabilities(self.teacher, batch)

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, dict(values), args, kwargs, tie_weights=False)

        return divergence(expected, self._log_probabilities(call, batch))

    def _log_probabilities(self, model: Any, batch: Any) -> torch.Tensor:
        result = forward_batch(model, batch, input_device(self.teacher))
        return log_probabilities(result, f"DistillationConfig: {type(self.teacher).__name__}")

    def _mean_loss(self, model: nn.Module, values: Mapping[str, torch.Tensor], batches: Sequence[Any]) -> float:
        with torch.no_grad():
            return float(torch.stack([self._loss(model, values, batch) for batch in batches]).mean())


class LearnedCodes:
    """The weight of a layer while its codes and scales are learned.

    Attributes:
        codes: V, in mean steps; where the layer has a zero point, the distance from it.
        shift: a, shaped like the scales; None where their type is too coarse for it.
    """

    def __init__(self, name: str, layer: QuantLayer) -> None:
        self.parameter_name, self.layer = f"{name}.weight", layer
        self.quantizer, self.spec = weight_quantizer(layer), weight_spec(layer)
        self.parameter = cast(nn.Parameter, layer.weight)
        self.dtype = dtype_name(self.parameter)
        self.first = cast(QParams, self.quantizer.params)
        scale, _ = self._grid(self.first)
        codes = self.parameter.detach().float() / torch.where(scale == 0, 1.0, scale)
        self.step = mean_step(codes, self.spec.dtype)
        self.codes = nn.Parameter(codes / self.step, requires_grad=False)
        self.start = self.codes.detach().clone()
        fine = self.spec.scale_type in FLOAT_SCALES and self.spec.scale_spec is None and not self.spec.dtype.is_block
        self.shift = nn.Parameter(torch.zeros_like(self.first.scale.float()), requires_grad=False) if fine else None

    def values(self) -> torch.Tensor:
        """W', in the type of the parameter; it has no gradient yet."""
        params = self.params()
        scale, zero = self._grid(params)
        return (
            quantize_elements(self.codes * (self.step * scale), scale, zero, self.spec)
            .to(self.parameter.dtype)
            .detach()
        )

    def pull(self, values: torch.Tensor) -> None:
        """Leave the gradients of V and a, from that of the values; none where no token came by (experts)."""
        if values.grad is None:
            self.codes.grad = None
            if self.shift is not None:
                self.shift.grad = None
            return
        gradient = values.grad.float()
        scale, _ = self._grid(self.params())
        self.codes.grad = gradient * (self.step * scale)
        if self.shift is not None:
            self.shift.grad = self.spec.split.sums(gradient * values.detach().float()).reshape(self.shift.shape)

    def go_back(self) -> None:
        """Half of the way to the start."""
        self.codes.data.lerp_(self.start, 0.5)
        if self.shift is not None:
            self.shift.data /= 2

    def freeze(self) -> None:
        """Write what was learned into the layer."""
        freeze_weight(self.layer, self.values(), self.params())

    def params(self) -> QParams:
        """The scales of now, rounded to their type."""
        if self.shift is None:
            return self.first
        scale = round_scale(self.first.scale.float() * self.shift.exp(), self.spec, self.dtype)
        return QParams(scale.to(self.first.scale.dtype), self.first.zero_point, self.first.second)

    def _grid(self, params: QParams) -> tuple[torch.Tensor, torch.Tensor | None]:
        return elementwise(params, self.spec, tuple(self.parameter.shape))


def rates_for(config: DistillationConfig, steps: int) -> tuple[float, float]:
    """The rates of codes and scales for so many steps."""
    lr = min(FASTEST, REACH / math.sqrt(steps / 3)) if config.lr is None else config.lr
    return lr, lr / 10 if config.scale_lr is None else config.scale_lr


def _values(learned: Sequence[LearnedCodes]) -> dict[str, torch.Tensor]:
    return {weight.parameter_name: weight.values() for weight in learned}


def _divergence_text(loss: torch.Tensor) -> str:
    return f"divergence {float(loss):.4g}"


def mean_step(codes: torch.Tensor, dtype: Dtype) -> torch.Tensor | float:
    """The mean distance of neighbours in the grid where the codes are; on their device where it depends on them."""
    if dtype.is_float:
        found: torch.Tensor = step_of(codes, dtype).mean()
        return found
    if isinstance(dtype, BlockType) and dtype.values:
        return (dtype.max - dtype.min) / (len(dtype.values) - 1)
    return 1.0


def learned_weights(model: nn.Module, layers: Mapping[str, QuantLayer]) -> list[LearnedCodes]:
    """The weights whose codes can be learned: of linear layers, in codes with scales, shared with nothing."""
    shared = overlapping(x for module in model.modules() for x in (*module.parameters(False), *module.buffers(False)))
    return [
        LearnedCodes(name, layer)
        for name, layer in layers.items()
        if _has_codes(layer) and weight_quantizer(layer).params is not None and id(layer.weight) not in shared
    ]


def _has_codes(layer: QuantLayer) -> bool:
    """Return True for a linear layer whose weight has codes and scales that can be learned."""
    spec = layer.spec.weight
    return isinstance(layer, nn.Linear) and spec is not None and not spec.is_cast and spec.code_spec is None


@contextmanager
def frozen(learned: Sequence[LearnedCodes]) -> Iterator[None]:
    """Within: the layers compute with the values that they are given; what was to nearest is rounded at first."""
    before = [(weight.quantizer, weight.quantizer.mode, weight.parameter, weight.parameter.data) for weight in learned]
    for weight in learned:
        if weight.quantizer.mode is not Mode.frozen:
            weight.parameter.data = weight.values()
            weight.quantizer.mode = Mode.frozen
    try:
        yield
    finally:
        for quantizer, mode, parameter, data in before:
            parameter.data = data
            quantizer.mode = mode


def merged(batches: Sequence[Any], rows: int) -> list[Any]:
    """The batches, those that follow one another and differ in their number of rows alone put together up to `rows`."""
    groups: list[list[Any]] = []
    for batch in batches:
        last = groups[-1] if groups else []
        fits = last and _shape(batch) is not None and _shape(last[0]) == _shape(batch)
        if fits and sum(map(_batch_size, (*last, batch))) <= rows:
            last.append(batch)
        else:
            groups.append([batch])
    return [group[0] if len(group) == 1 else _together(group) for group in groups]


def _shape(batch: Any) -> Any:
    """Return the common properties of batches that go together; None for a batch that goes alone."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[1:], batch.dtype
    if not hasattr(batch, "items") or not all(isinstance(value, torch.Tensor) for value in batch.values()):
        return None
    return {key: (value.shape[1:], value.dtype) for key, value in batch.items()}


def _batch_size(batch: Any) -> int:
    return len(batch if isinstance(batch, torch.Tensor) else next(iter(batch.values())))


def _together(batches: Sequence[Any]) -> Any:
    if isinstance(batches[0], torch.Tensor):
        return torch.cat([*batches])
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0].keys()}  # noqa: SIM118 (BatchEncoding)
