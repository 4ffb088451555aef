"""What an algorithm does to a whole model before the first block stays only where the quantized model gains by it.

The error is that of `keep_better`, of the model's output in place of a block's, all weights rounded to nearest. It is
tried on a copy, so a model that would lose is never touched.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from quark.log import logger
from quark.torch.algorithms.base import Algorithm, Block, BlockErrors
from quark.torch.algorithms.keep_better import SAMPLES, BlockJudge
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.batches import evaluating, forward_batch, input_device
from quark.torch.model.blocks import Call


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
    before = _error(model, layers, batches)
    trial = copy.deepcopy(model)
    trying = type(algorithm)(algorithm.config)
    trying.prepare(trial, blocks, quantized_layers(trial))
    algorithm.config = trying.config  # what the model allows is known now
    after = _error(trial, quantized_layers(trial), batches)
    del trial
    kept = not after > before  # NaN where the model returns no tensor: that cannot be judged
    done = BlockErrors("", algorithm.name, (), before, after, kept, time.perf_counter() - start)
    algorithm.errors.append(done)
    logger.info("%s", done)
    if kept:
        algorithm.prepare(model, blocks, layers)
    return kept


def _error(model: nn.Module, layers: Mapping[str, QuantLayer], batches: Sequence[Any]) -> float:
    def call(*args: Any, **kwargs: Any) -> Call:
        return Call(args, kwargs, None if args else next(iter(kwargs)))

    with quantizers_off(layers.values()), evaluating(model), torch.no_grad():
        calls = [forward_batch(call, batch, input_device(model)) for batch in batches]  # type: ignore[arg-type]
        return BlockJudge(Block("", model, calls, calls), layers).error
