"""Sums up an importance matrix of llama.cpp: the squares of what the linear layers of a model read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.core.array import NumpyArray, to_numpy
from quark.errors import CalibrationError, NonFiniteError
from quark.gguf.architectures.table import architecture_of
from quark.gguf.imatrix import Sums
from quark.gguf.names import expert_of
from quark.torch.model.batches import run_batches
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.passes import while_prepared
from quark.torch.writers.gguf.of_model import tensor_names


def collect_imatrix(model: nn.Module, data: Iterable[Any]) -> Sums:
    """Run data through a float model and sum the squares of what its linear layers read.

    Args:
        model: A transformers model of one of `ARCHITECTURES`, not changed.
        data: Batches as `quantize_model` takes them.

    Raises:
        CalibrationError: No batch.
        NonFiniteError: A layer reads NaN or Inf; names it.
        NotSupportedError: A model that GGUF files are not written of.
    """
    name_of = tensor_names(model, architecture_of(getattr(model, "config", None)))
    sums: dict[str, dict[int, tuple[torch.Tensor, int]]] = defaultdict(dict)

    def add(tensor: str, expert: int, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
        total, count = sums[tensor].get(expert, (0, 0))
        sums[tensor][expert] = (total + x.square().sum(0), count + len(x))

    with while_prepared(model, lambda name: True), ExitStack() as hooks:  # each expert is linear layers of its own
        for name, module in model.named_modules():
            stored = name_of(f"{name}.weight") if isinstance(module, nn.Linear) else None
            if stored is not None and stored.startswith("blk."):
                watch = partial(add, stored, expert_of(name) or 0)
                hooks.enter_context(module.register_forward_pre_hook(watch))
        if run_batches(model, calibration_data(model, data) or ()) == 0:
            raise CalibrationError("The calibration data is empty: an importance matrix needs one batch at least.")
    return {tensor: _joined(tensor, sums[tensor]) for tensor in sorted(sums)}


def _joined(tensor: str, experts: dict[int, tuple[torch.Tensor, int]]) -> tuple[NumpyArray, NumpyArray]:
    ordered = [experts[index] for index in sorted(experts)]
    total = to_numpy(torch.stack([sums for sums, _ in ordered]).cpu())
    if not np.isfinite(total).all():
        raise NonFiniteError(f"{tensor}: its inputs have NaN or Inf, or values too large to square.")
    return total, np.array([count for _, count in ordered], np.float32)
