"""The costs of the steps of an effort on this machine, before they begin: counted memory, time by measured speed.

    seconds = (forwards * 2 * weights * tokens + columns * sum over layers of m n^2) / speed
    scores      forwards of the tokens that are scored, and COUPLED * sum over layers of m n (m + n)

`speed` is that of the linear layers of the first block, measured on random weights of their shapes and dtype, on the
device that computes; `forwards` and `columns` are what each step was counted to do, FORWARDS and COLUMNS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from quark.base.memory_and_disk import available_memory
from quark.torch.algorithms.base import Algorithm
from quark.torch.algorithms.rounding.output_scores import ByScores
from quark.torch.flows.preflight import estimate
from quark.torch.model.batches import hidden_width, text_config
from quark.torch.model.blocks import find_blocks
from quark.torch.model.half_products import lacking_types

TEXTS = "texts"
"""The step in which the model writes samples."""
FORWARDS = {TEXTS: 8.0, "equalize": 2.0, "gptq": 4.0, "gptaq": 6.5, "qronos": 7.0, "distillation": 6.0}
"""Step -> forwards of all tokens that it takes as long as, by linear layers alone; of distillation for each epoch.
Measured on the example model in float32; of equalizing counted: each block runs to be looked at, and for the next."""
FISHER = 13.0
"""Those of the scores of outputs, and of the moments of layers, for each token whose scores are found."""
COLUMNS = {"gptq": 8.0, "gptaq": 10.0, "qronos": 20.0}
"""Solver -> operations for each weight and column of its layer; measured at the shape of a billion parameters."""
COUPLED = 10.0
"""Operations for each weight and each column and row of its layer, of a solution by Fisher information."""
_BY_BLOCK = {*COLUMNS, "equalize"}
"""Steps that go block by block, and run no head."""
COMPUTES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The types that linear layers compute in."""
ROWS, ENOUGH, FEWEST_RUNS, MOST_RUNS = 128, 0.02, 8, 20
"""Of the measured layers: rows of input, seconds, and how often at least and at most."""


@dataclass(frozen=True)
class StepCosts:
    """The costs of the steps of a job.

    Attributes:
        seconds: Of each step, in their order.
        memory: Bytes at least.
    """

    seconds: Mapping[str, float]
    memory: int

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items())
        return f"about {duration(self.total)} ({steps})"


def step_costs(model: nn.Module, algorithms: Sequence[Algorithm], tokens: int, written: int, speed: float) -> StepCosts:
    """Estimate the steps of a language model in memory.

    Args:
        model: With or without weights.
        algorithms: That run, in their order; those that are not in FORWARDS take no time that is known.
        tokens: Of the calibration data that the user gives.
        written: Of the texts that the model writes beside them.
        speed: Operations a second, of `measured_speed`.
    """
    whole, blocks = (2.0 * _weights_of_a_token(model, head) for head in (True, False))
    inner = [m for name in find_blocks(model) for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)]
    columns = float(sum(m.weight.numel() * m.in_features for m in inner))
    rows = float(sum(m.weight.numel() * m.out_features for m in inner))
    seconds = {TEXTS: FORWARDS[TEXTS] * whole * written / speed} if written else {}
    for algorithm in algorithms:
        name = getattr(algorithm.config, "name", "")
        if name not in FORWARDS:
            continue
        operations = FORWARDS[name] * getattr(algorithm.config, "epochs", 1) * (blocks if name in _BY_BLOCK else whole)
        operations = operations * (tokens + written) + COLUMNS.get(name, 0.0) * columns
        if isinstance(algorithm, ByScores) and algorithm.config.fisher:
            scored = min(tokens + written, algorithm.scored_tokens(model))
            operations += FISHER * whole * scored + COUPLED * (columns + rows)
        seconds[name] = operations / speed
    batch = torch.empty(1, tokens + written, dtype=torch.long, device="meta")
    return StepCosts(seconds, estimate(model, 0, algorithms, [batch], whole=True).memory)


def forward_seconds(model: nn.Module, tokens: int, device: torch.device) -> float:
    """Estimate the seconds of a forward of so many tokens, by the linear layers alone; as `measured_speed`."""
    return 2.0 * _weights_of_a_token(model, True) * tokens / measured_speed(model, device)


def measured_speed(model: nn.Module, device: torch.device) -> float:
    """Operations a second of linear layers of the shapes and the dtype of a model's first block; measured once.

    Args:
        model: With or without weights; not run.
        device: Computes.
    """
    block = model.get_submodule(find_blocks(model)[0])
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
    shapes = {(each.in_features, each.out_features, each.weight.dtype) for each in layers}
    if not shapes:  # GPT-2 has layers of its own
        width, dtype = hidden_width(model) or ROWS, next(model.parameters()).dtype
        shapes = {(width, 4 * width, dtype)}
    return _speed_of(frozenset(shapes), device)


@cache
def _speed_of(layers: frozenset[tuple[int, int, torch.dtype]], device: torch.device) -> float:
    operations = seconds = 0.0
    for inputs, outputs, stored in sorted(layers, key=str):
        dtype = stored if stored in COMPUTES else torch.float32  # of weights in float8 the float model is computed
        if device.type == "cpu" and dtype in lacking_types():  # as `half_products` computes
            dtype = torch.float32
        weight = torch.full((outputs, inputs), 0.01, dtype=dtype, device=device)
        rows = torch.full((ROWS, inputs), 0.01, dtype=dtype, device=device)
        seconds += _seconds(partial(nn.functional.linear, rows, weight), device)
        operations += 2.0 * ROWS * inputs * outputs
    return operations / seconds


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of some runs, after a first one that only warms up: others may share the machine."""
    runs, fastest, start = 0, math.inf, time.perf_counter()
    with torch.no_grad():
        work()
        _wait(device)
        while runs < FEWEST_RUNS or (runs < MOST_RUNS and time.perf_counter() - start < ENOUGH):
            before = time.perf_counter()
            work()
            _wait(device)
            fastest = min(fastest, time.perf_counter() - before)
            runs += 1
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weights_of_a_token(model: nn.Module, head: bool) -> float:
    """Count the weights that a token is multiplied with: of experts its own alone, of tables none but a head."""
    config = text_config(getattr(model, "config", None))
    there = max(_number(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    share = (_number(config, "num_experts_per_tok") or there) / there if there else 1.0
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Linear):
        (tables.discard if head else tables.add)(id(output.weight))
    used = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables and parameter.ndim > 1:
            used += parameter.numel() * (share if ".experts." in f".{name}." else 1.0)
    return used


def _number(config: Any, name: str) -> int:
    """An entry of a config that is a whole number; else 0."""
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free where a model is; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def duration(seconds: float) -> str:
    """Seconds in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
