"""A module's forward in float64, with scales put on chosen tensors: the ground on which folds are proved.

Parameters are converted one operation at a time, so a proof needs no second copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from quark.torch.calibration.surroundings import default_dtype
from quark.torch.layers.base import hook_input
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers

Tensors = Mapping[str, torch.Tensor]
NARROW = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 64
"""Rows of a weight that are float64 at once."""


class Float64(TorchFunctionMode):
    """Within: every floating-point operation is done in float64, whatever casts the code asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return func(*args, **(kwargs or {}))
        if name in ("float", "half", "bfloat16"):
            func = torch.Tensor.double
        if name.endswith("grouped_mm"):
            func = _grouped_mm  # torch has none for float64
        if func is F.linear and not kwargs and args[1].dtype in NARROW:
            # Of the weight only some rows are float64 at a time, and these stay in the cache.
            x, weight, bias = (*args, None)[:3]
            y = torch.cat([F.linear(x.double(), rows.double()) for rows in torch.split(weight, ROWS)], -1)
            return y if bias is None else y + bias.double()
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


class Exact:
    """Repeated float64 forwards of one module on the same inputs.

    Args:
        module: Usually a decoder block; never changed.
        args, kwargs: What it is called with; any dtype.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, tuple(args), dict(kwargs)

    def run(
        self,
        parameters: Tensors | None = None,
        inputs: Tensors | None = None,
        outputs: Tensors | None = None,
        watch: Sequence[str] = (),
        instead: Tensors | None = None,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """One forward.

        Args:
            parameters: Full name -> value to use instead.
            inputs, outputs: Name of a submodule -> factors that its first input (its output) is multiplied by.
            watch: Submodules whose first input is wanted (of several calls, the rows of all); none is of a table, which
                reads row numbers.
            instead: Watched submodule -> the rows that it reads instead of its input.

        Returns:
            All floating-point tensors that the module returns, and the watched inputs as (rows, channels).
        """
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in watch}
        # A cache among the arguments would remember the run before.
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        with ExitStack() as stack:
            for name, factors in (inputs or {}).items():
                stack.enter_context(_on_input(self.module, name, partial(_times, factors)))
            for name, factors in (outputs or {}).items():
                stack.enter_context(_on_output(self.module, name, partial(_times, factors)))
            for name, rows in seen.items():
                stack.enter_context(_on_input(self.module, name, _watcher(rows, (instead or {}).get(name))))
            stack.enter_context(torch.no_grad())
            stack.enter_context(quantizers_off(quantized_layers(self.module).values()))
            stack.enter_context(default_dtype(torch.float64))
            stack.enter_context(Float64())
            result = functional_call(self.module, dict(parameters or {}), args, kwargs)
        returned = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return returned, {name: torch.cat(rows) for name, rows in seen.items() if rows}


def in_float64(module: nn.Module, parameters: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The output of a module of one tensor, computed in float64 with some parameters replaced."""
    return Exact(module, (x,), {}).run(parameters)[0][0]


def difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Largest deviation between two sets of outputs, relative to the largest value."""
    if len(a) != len(b):
        return float("inf")
    if not a:
        return 0.0
    each = [(x - y).abs().max() / x.abs().max().clamp_min(1e-300) for x, y in zip(a, b, strict=True)]
    return float(torch.stack([one.to(each[0].device) for one in each]).max())


def _times(factors: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return factors.to(x.device) * x


def _watcher(rows: list[torch.Tensor], instead: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def watch(x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_floating_point():
            return None
        start = sum(map(len, rows))
        rows.append(x.reshape(-1, x.shape[-1]))
        given = None if instead is None else instead[start : start + len(rows[-1])]
        return given.view_as(x) if given is not None and given.shape == rows[-1].shape else None

    return watch


def _grouped_mm(x: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, **options: Any) -> torch.Tensor:
    """x[offs[i - 1] : offs[i]] @ matrices[i], one below the other: experts that are kept in one tensor."""
    rows = [end - start for start, end in zip([0, *offs.tolist()], offs.tolist(), strict=False)]
    products = [part @ matrix for part, matrix in zip(torch.split(x[: sum(rows)], rows), matrices, strict=True)]
    return torch.cat([*products, x.new_zeros(len(x) - sum(rows), matrices.shape[-1])])


def _widened(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype in NARROW else x
    return torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x


@contextmanager
def _on_input(module: nn.Module, name: str, act: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    with hook_input(module.get_submodule(name), lambda _, x: act(x)):
        yield


@contextmanager
def _on_output(module: nn.Module, name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    def after(m: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        # A router that is a linear layer may return its logits and the scores that it made of them.
        return tree_map(lambda x: act(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, result)

    with module.get_submodule(name).register_forward_hook(after):
        yield
