"""A block keeps what an algorithm did to it only where its quantized output came no further from the float one.

    error = sqrt( sum |Q(block)(x) - block(x')|^2 / sum |block(x')|^2 )

over the first tokens of a few calibration samples: x is what the quantized blocks before give, x' what the float model
gives where an algorithm compares with it, else x. Q rounds each weight as it will be, to nearest where no algorithm has
chosen anything, and each input and output with the range that passes. An algorithm solves one group of layers at a
time, by their own outputs; what that does to the block, where one error hides another or adds to it, is seen here.

Samples that an algorithm read say too much good of it, if what it chose fits their chance, too (`validated_apart`). It
is measured by one batch of eight (two of few, four at most) that it does not read, and none of them may come further
from the float output. Static ranges are then those of the others, so what lies beyond them is clipped.

What an algorithm does to a whole model before the first block is measured likewise, by what the model returns. It is
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
from quark.core.observers import Observer
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.torch.algorithms.base import Algorithm, Block, BlockErrors
from quark.torch.calibration.calibrate import calibrate_tensor, share_scales
from quark.torch.calibration.distributed import merge_observers, rank, summed, world
from quark.torch.calibration.spill import SpillFile
from quark.torch.layers import QuantLayer
from quark.torch.layers.base import hook_input
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.layers.low_rank import LowRankBranch, branch_of, put_branch
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.blocks import Call, short_runs

SAMPLES, TOKENS = 4, 64
"""How many calibration samples are compared, and how many of their first tokens: of 128 x 512, four times 0.4 %."""

SHARE, FEW, LEAST = 8, 2, 4
"""One batch of eight is for validation, or two where that would be fewer; never more than one of four."""

_Params = tuple[nn.Parameter, torch.Tensor]
_State = tuple[FakeQuantize, QParams | None, Mode]


class BlockErrorCheck:
    """Measures a block before the first algorithm and after each, and undoes what made it worse.

    Args:
        block: Float as yet; its quantizers are off. Some of its batches are compared.
        layers: Its quantized layers, by full name.
        read: The block with the batches that algorithms read: ranges are those of them. None: of what is compared.
    """

    def __init__(self, block: Block, layers: Mapping[str, QuantLayer], read: Block | None = None) -> None:
        self.block, self.layers, self.read = block, dict(layers), read
        some = min(len(block.calls), SAMPLES)
        picked = [index * len(block.calls) // some for index in range(some)]
        rows = -(-SAMPLES // max(1, len(picked)))
        runs = short_runs(block.module, [block.calls[index] for index in picked], TOKENS, rows)
        self.calls = [call for call, _ in runs]
        if any(block.float_calls[index].hidden is not block.calls[index].hidden for index in picked):
            runs = short_runs(block.module, [block.float_calls[index] for index in picked], TOKENS, rows)
        self.expected = [
            _tensor_of(call, block.module) if x is None or not x.is_floating_point() else x for call, x in runs
        ]
        # Of all processes, of which one may have none to compare: each of them goes the same way.
        unknown = torch.tensor(int(any(expected is None for expected in self.expected)))
        self.measured = not int(summed(unknown))
        self.names: list[str] = []
        self.errors = self._errors()
        self.error = self._total()

    def keep(self) -> Before:
        """Return the parameters and quantizers that an algorithm may change, as they are now."""
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
        name, earlier, earlier_error = algorithm.name, self.errors, self.error
        self.errors = self._errors()
        error = self._total()
        # A block that returns no tensor cannot be measured.
        kept = before is None or not self.measured or error <= earlier_error
        if before is not None and self.read is not None and self.errors is not None and earlier is not None:
            grown = torch.tensor(int((self.errors[:, 0] > earlier[:, 0]).any()))
            kept = kept and not int(summed(grown))
        done = BlockErrors(
            self.block.name, name, tuple(self.names), earlier_error, error, kept, time.perf_counter() - start
        )
        algorithm.errors.append(done)
        logger.log(logging.DEBUG if kept else logging.INFO, "%s", done)  # the loop says the gain of each block
        if before is not None and not kept:
            before.restore()
            self.errors = earlier
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

    def _ranges(self) -> dict[FakeQuantize, QParams | None]:
        """Return the static ranges of the block's inputs and outputs by the batches that algorithms read.

        What others do to them, clipping where they reach further, is a part of the error.
        """
        quantizers = _static_quantizers(self.layers)
        if self.read is None or not quantizers:
            return {}
        before = [(quantizer, quantizer.params, quantizer.mode) for quantizer in quantizers.values()]
        with ExitStack() as undo:
            for state in before:
                undo.callback(_put_back, *state)
            for quantizer in quantizers.values():
                quantizer.start_observing()
            for call in self.read.calls:
                call.run(self.block.module)
            merge_observers(quantizers)
            observers = {q: cast(Observer, q.observer) for q in quantizers.values()}
            ranges: dict[FakeQuantize, QParams | None] = {
                q: observer.qparams() for q, observer in observers.items() if observer.count
            }
            for quantizer in quantizers.values():
                quantizer.observer = None
            return ranges

    def _errors(self) -> torch.Tensor | None:
        """Of each call sum |Q(block)(x) - block(x')|^2 and sum |block(x')|^2, (calls, 2); None of what cannot be
        measured.
        """
        if not self.measured:
            return None
        sums: list[torch.Tensor] = []
        with ExitStack() as within:
            within.enter_context(self.rounded_weights())
            within.enter_context(quantizers_off(self.layers.values()))
            within.enter_context(_rounded_activations(self.layers.values(), self._ranges()))
            for call, expected in zip(self.calls, cast(list[torch.Tensor], self.expected), strict=True):
                error = cast(torch.Tensor, _tensor_of(call, self.block.module)).float() - expected.float()
                sums.append(torch.stack([error.square().sum(), expected.float().square().sum()]).double())
        return torch.tensor(read(torch.stack(sums)) if sums else [], dtype=torch.float64).reshape(-1, 2)

    def _total(self) -> float:
        """The error of all calls together, of all processes, which so decide the same."""
        if self.errors is None:
            return float("nan")
        noise, signal = summed(self.errors.sum(0)).tolist()
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


def _static_quantizers(layers: Mapping[str, QuantLayer]) -> dict[str, FakeQuantize]:
    """Those of inputs and outputs whose scale is that of a range, by the names of their tensors."""
    found = {f"{name}.{role}": layer.quantizer(role) for name, layer in layers.items() for role in ("input", "output")}
    quantizers = {name: quantizer for name, quantizer in found.items() if isinstance(quantizer, FakeQuantize)}
    return {name: q for name, q in quantizers.items() if q.spec.needs_calibration and not q.spec.dynamic}


def validation_batches(count: int) -> list[int] | None:
    """Numbers of those of so many batches of this process that measure algorithms, and that none reads; evenly taken.

    None where there are too few, of all processes together, for some to be spared.
    """
    own = range(rank(), world() * count, world())
    total = int(summed(torch.tensor(count)))
    some = min(SAMPLES, max(total // SHARE, min(FEW, total // LEAST)))
    chosen = {(2 * index + 1) * total // (2 * some) for index in range(some)}
    if not some or any(chosen.issuperset(range(first, total, world())) for first in range(world())):
        return None  # a process would have none to read
    return [number for number, batch in enumerate(own) if batch in chosen]


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
def _rounded_activations(
    layers: Sequence[QuantLayer] | Any, ranges: Mapping[FakeQuantize, QParams | None]
) -> Iterator[None]:
    """Within: what the layers read and give is rounded as it will be, a static scale of no known range being that of
    the sample.
    """

    def before(layer: nn.Module, x: torch.Tensor) -> Any:
        own = cast(Any, layer)
        return rounded(x, own.spec.input, ranges.get(own.quantizer("input")))

    def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        own = cast(Any, layer)
        return rounded(output, own.spec.output, ranges.get(own.quantizer("output")))

    with ExitStack() as hooks:
        for layer in layers:
            if layer.spec.input is not None:
                hooks.enter_context(hook_input(layer, before))
            if layer.spec.output is not None:
                hooks.enter_context(layer.register_forward_hook(after))
        yield


def rounded(x: torch.Tensor, spec: TensorSpec | None, params: QParams | None = None) -> torch.Tensor:
    """X as a spec rounds it, with scales, or with the range that it has itself; x where there is no spec."""
    if spec is None or x.numel() == 0:
        return x
    x = x.contiguous()
    if params is None and not spec.dynamic and not spec.is_cast:
        params = compute_qparams(x, spec)
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
