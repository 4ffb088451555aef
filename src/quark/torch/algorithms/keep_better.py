"""A block keeps what an algorithm did to it only where its quantized output came no further from the float one.

    error = sqrt( sum |Q(block)(x) - block(x')|^2 / sum |block(x')|^2 )

over the first tokens of a few calibration samples: x is what the quantized blocks before give, x' what the float model
gives where an algorithm compares with it, else x. Q rounds each weight as it will be, to nearest where no algorithm has
chosen anything, and each input and output with the range that passes. An algorithm judges one group of layers at a
time, by their own outputs; what that does to the block, where one error hides another or adds to it, is seen here.

What an algorithm does to a whole model before the first block is judged likewise, by what the model returns. It is
tried on a copy, so a model that would lose by it is never touched.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.base.log import logger
from quark.core.checks import gathered, read
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.torch.algorithms.base import Algorithm, Block, BlockErrors
from quark.torch.calibration.calibrate import calibrate_tensor, share_scales
from quark.torch.calibration.distributed import summed
from quark.torch.calibration.spill import SpillFile
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.low_rank import LowRankBranch, branch_of, put_branch
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.blocks import Call, short_runs

SAMPLES, TOKENS = 4, 64
"""How many calibration samples are compared, and how many of their first tokens: of 128 x 512, four times 0.4 %."""

_Params = tuple[nn.Parameter, torch.Tensor]
_State = tuple[FakeQuantize, QParams | None, Mode]


class BlockErrorCheck:
    """Measures a block before the first algorithm and after each, and undoes what made it worse.

    Args:
        block: Float as yet; its quantizers are off.
        layers: Its quantized layers, by full name.
    """

    def __init__(self, block: Block, layers: Mapping[str, QuantLayer]) -> None:
        self.block, self.layers = block, dict(layers)
        picked = _picked(len(block.calls))
        rows = -(-SAMPLES // max(1, len(picked)))
        runs = short_runs(block.module, [block.calls[index] for index in picked], TOKENS, rows)
        self.calls = [call for call, _ in runs]
        if any(block.float_calls[index].hidden is not block.calls[index].hidden for index in picked):
            runs = short_runs(block.module, [block.float_calls[index] for index in picked], TOKENS, rows)
        self.expected = [
            _tensor_of(call, block.module) if x is None or not x.is_floating_point() else x for call, x in runs
        ]
        self.names: list[str] = []
        self.error = self._error()

    def keep(self) -> Before:
        """What an algorithm may change, as it is now."""
        quantizers = [module for module in self.block.module.modules() if isinstance(module, FakeQuantize)]
        spill_file, parameters = SpillFile(), []
        for parameter in self.block.module.parameters():
            values = parameter.detach().clone()
            spill_file.spill([values])  # seldom read again
            parameters.append((parameter, values))
        return Before(
            parameters,
            [(quantizer, quantizer.params, quantizer.mode) for quantizer in quantizers],
            [(layer, branch_of(layer)) for layer in self.layers.values()],
        )

    def keeps(self, algorithm: Algorithm, before: Before | None, start: float) -> bool:
        """Measure the block after an algorithm; put it back where that made it worse. Whether it stays is returned.

        Args:
            algorithm: Gets the figures, which are logged.
            before: What the block was, from `keep`; None: the algorithm runs as written, whatever it gives.
            start: When the algorithm began, as `time.perf_counter` says it.
        """
        error, name = self._error(), algorithm.name
        # A block that returns no tensor cannot be measured.
        kept = before is None or any(expected is None for expected in self.expected) or error <= self.error
        done = BlockErrors(
            self.block.name, name, tuple(self.names), self.error, error, kept, time.perf_counter() - start
        )
        algorithm.errors.append(done)
        logger.log(logging.DEBUG if kept else logging.INFO, "%s", done)  # the loop says the gain of each block
        if before is not None and not kept:
            before.restore()
            return False
        self.names.append(name)
        self.error = error
        return True

    @contextmanager
    def rounded_weights(self) -> Iterator[None]:
        """Within: the layers hold their weights as they will be quantized."""
        weights = {name: cast(FakeQuantize, layer.quantizer("weight")) for name, layer in self.layers.items()}
        weights = {name: quantizer for name, quantizer in weights.items() if isinstance(quantizer, FakeQuantize)}
        before = [(quantizer, quantizer.params, quantizer.mode) for quantizer in weights.values()]
        with ExitStack() as undo:
            for state in before:
                undo.callback(_put_back, *state)
            for name, quantizer in weights.items():
                calibrate_tensor(f"{name}.weight", self.layers[name].weight.detach(), quantizer)  # type: ignore[operator]
            share_scales({name: self.layers[name] for name in weights}, self.block.shared_scale_groups)
            for name, quantizer in weights.items():
                parameters = self.layers[name]._parameters
                weight = cast(nn.Parameter, parameters["weight"])
                if quantizer.mode is not Mode.frozen:
                    rounded = fake_quantize(weight.detach().contiguous(), quantizer.params, quantizer.spec)
                    undo.callback(parameters.__setitem__, "weight", weight)
                    parameters["weight"] = nn.Parameter(rounded, requires_grad=False)
            yield

    def _error(self) -> float:
        if any(expected is None for expected in self.expected):
            return float("nan")
        sums: list[torch.Tensor] = []
        with self.rounded_weights(), quantizers_off(self.layers.values()), _rounded_activations(self.layers.values()):
            for call, expected in zip(self.calls, cast(list[torch.Tensor], self.expected), strict=True):
                error = cast(torch.Tensor, _tensor_of(call, self.block.module)).float() - expected.float()
                sums.append(torch.stack([error.square().sum(), expected.float().square().sum()]).double())
        total = read(torch.stack(sums).sum(0)) if sums else [0.0, 0.0]
        noise, signal = summed(torch.tensor(total, dtype=torch.float64)).tolist()  # all processes decide the same
        return float((noise / max(signal, torch.finfo(torch.float32).tiny)) ** 0.5)


@dataclass
class Before:
    """A block as it was: its parameters with their values, its quantizers with theirs, and its low-rank branches."""

    parameters: list[_Params]
    quantizers: list[_State]
    branches: list[tuple[QuantLayer, LowRankBranch | None]]

    def restore(self) -> None:
        """Give the block all of it back, bit by bit."""
        with torch.no_grad():
            for parameter, values in self.parameters:
                parameter.copy_(values)
        for state in self.quantizers:
            _put_back(*state)
        for layer, branch in self.branches:
            put_branch(layer, branch)


def _picked(count: int) -> list[int]:
    """Numbers of the batches that are compared, evenly taken."""
    some = min(count, SAMPLES)
    return [index * count // some for index in range(some)]


def _tensor_of(call: Call, module: nn.Module) -> torch.Tensor | None:
    """The first tensor of numbers that a block returns; None where it returns none."""
    leaves = tree_leaves(call.run(module))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)


def _put_back(quantizer: FakeQuantize, params: QParams | None, mode: Mode) -> None:
    quantizer.forget()
    if params is not None:
        quantizer.store(params)
    quantizer.mode = mode


@contextmanager
def _rounded_activations(layers: Sequence[QuantLayer] | Any) -> Iterator[None]:
    """Within: what the layers read and give is rounded as it will be, a static scale being that of the sample."""

    def before(layer: nn.Module, args: tuple[Any, ...]) -> Any:
        return (rounded(args[0], cast(QuantLayer, layer).spec.input), *args[1:])

    def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return rounded(output, cast(QuantLayer, layer).spec.output)

    with ExitStack() as hooks:
        for layer in layers:
            if layer.spec.input is not None:
                hooks.enter_context(layer.register_forward_pre_hook(before))
            if layer.spec.output is not None:
                hooks.enter_context(layer.register_forward_hook(after))
        yield


def rounded(x: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """X as a spec rounds it, with the range that it has itself; x where there is no spec."""
    if spec is None or x.numel() == 0:
        return x
    x = x.contiguous()
    params = None if spec.dynamic or spec.is_cast else compute_qparams(x, spec)
    return fake_quantize(x, params, spec)


def prepare_where_better(
    algorithm: Algorithm,
    model: nn.Module,
    blocks: Sequence[str],
    layers: Mapping[str, QuantLayer],
    data: Iterable[Any],
) -> bool:
    """`algorithm.prepare`, if it lowers the error on some of the data; whether it does.

    Args:
        algorithm: Changes the model in `prepare`, and the float outputs by no more than float rounding.
        model: Float as yet; its quantizers are off.
        blocks, layers: As `prepare` takes them.
        data: Calibration batches.
    """
    start, batches = time.perf_counter(), list(islice(data, SAMPLES))
    before = _whole_error(model, layers, batches)
    trial = copy.deepcopy(model)
    trying = type(algorithm)(algorithm.config)
    trying.prepare(trial, blocks, quantized_layers(trial))
    algorithm.config = trying.config  # what the model allows is known now
    after = _whole_error(trial, quantized_layers(trial), batches)
    del trial
    kept = not after > before  # NaN where the model returns no tensor: that cannot be measured
    done = BlockErrors("", algorithm.name, (), before, after, kept, time.perf_counter() - start)
    algorithm.errors.append(done)
    logger.info("%s", done)
    if kept:
        algorithm.prepare(model, blocks, layers)
    return kept


def _whole_error(model: nn.Module, layers: Mapping[str, QuantLayer], batches: Sequence[Any]) -> float:
    def call(*args: Any, **kwargs: Any) -> Call:
        return Call(args, kwargs, None if args else next(iter(kwargs)))

    with gathered(), quantizers_off(layers.values()), evaluating(model), torch.no_grad():
        calls = [forward_batch(call, batch, input_device(model)) for batch in batches]  # type: ignore[arg-type]
        return BlockErrorCheck(Block("", model, calls, calls), layers).error
