"""The blocks of a model: found in any module tree, and the arguments that each one gets.

One dry run records the arguments of all blocks: each block passes its input through, so nothing is computed but the
embeddings, masks and position tables, and weights of blocks may still be on the meta device. After that a block runs
alone, on the hidden state that the block before it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quark.errors import CalibrationError, StructureError
from quark.torch.model.batches import calibration_step, evaluating, input_device

WHOLE = ""
"""The name of the one block of a model that has no list of blocks: the model itself."""


@dataclass(frozen=True)
class Call:
    """The arguments of one block for one batch.

    Attributes:
        args, kwargs: As the model passed them; the hidden state is the first argument, or `key`.
        key: Name of the hidden state among kwargs; None: it is args[0], or the block is the whole model.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden state, or the first argument of a whole model."""
        return self.kwargs[self.key] if self.key else self.args[0]

    def with_hidden(self, hidden: torch.Tensor) -> Call:
        """The same call on another hidden state."""
        if self.key:
            return replace(self, kwargs={**self.kwargs, self.key: hidden})
        return replace(self, args=(hidden, *self.args[1:]))

    def run(self, module: nn.Module) -> torch.Tensor:
        """The hidden state that `module` returns."""
        output = module(*self.args, **self.kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output


def find_blocks(model: nn.Module, path: str | None = None) -> list[str]:
    """Names of the blocks in the order in which they run.

    Args:
        model: Any module.
        path: Name of the list of blocks ("model.layers"); None or "": the ModuleList that holds the most parameters
            and is not inside another one. A model without one is a single block, named "".

    Raises:
        StructureError: `path` is no list of modules.
    """
    if path:
        try:
            blocks = model.get_submodule(path)
        except AttributeError:
            blocks = None
        if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
            lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
            raise StructureError(
                f"model_decoder_layers={path!r} is no list of modules. Possible: {', '.join(lists) or 'none here'}."
            )
        return [f"{path}.{index}" for index in range(len(blocks))]
    stacks = {name: module for name, module in model.named_modules() if _is_stack(module)}
    outer = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if not outer:
        return [WHOLE]
    largest = max(outer, key=lambda name: sum(p.numel() for p in stacks[name].parameters()))
    return [f"{largest}.{name}" for name, _ in stacks[largest].named_children()]


def _is_stack(module: nn.Module) -> bool:
    """Whether a module is a list of blocks: of modules that hold several linear layers each."""
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    return all(sum(isinstance(m, nn.Linear) for m in child.modules() if m is not child) > 1 for child in module)


def record_calls(model: nn.Module, names: list[str], data: Iterable[Any]) -> dict[str, list[Call]]:
    """The call of each block for each batch; the hidden states are those of the first block for all of them.

    Args:
        model: Its blocks are not run (but for the first, on one batch, to see what a block returns).
        names: From `find_blocks`.
        data: Batches as `quantize_model` takes them.

    Raises:
        CalibrationError: No batch, a batch that the model does not take, or blocks that it does not run in this order.
        StructureError: A block returns more than its hidden state, which the next ones may need.
    """
    device = input_device(model)
    calls: dict[str, list[Call]] = {name: [] for name in names}

    def note(name: str, call: Call) -> None:
        calls[name].append(call)
        if name == names[-1]:
            raise _LastBlockReachedError

    count = 0
    with torch.no_grad(), evaluating(model), passing_through(model, names, note, BlockOutput()):
        for batch in data:
            with suppress(_LastBlockReachedError):
                calibration_step(model, batch, device, count)
            count += 1
            for name in names:
                if len(calls[name]) != count:
                    raise CalibrationError(f"Batch {count - 1} reached the block {name!r} {len(calls[name])} times.")
    if count == 0:
        raise CalibrationError("The calibration dataloader is empty: at least one batch is needed.")
    return calls


class _LastBlockReachedError(Exception):
    """Nothing behind the last block needs to run."""


class BlockOutput:
    """How the blocks of a model return their hidden state: alone, or first in a tuple or list.

    Known when one block has really run.
    """

    def __init__(self) -> None:
        self.known = False
        self.sequence: type | None = None

    def learn(self, name: str, output: Any) -> None:
        """See it from what a block returned. Raises StructureError for more than a hidden state."""
        self.known, self.sequence = True, _sequence_around_hidden(name, output)

    def of(self, hidden: torch.Tensor) -> Any:
        """What a block returns that computes this hidden state."""
        return hidden if self.sequence is None else self.sequence((hidden,))


@contextmanager
def passing_through(
    model: nn.Module, names: Sequence[str], note: Callable[[str, Call], None], output: BlockOutput
) -> Iterator[None]:
    """Within: blocks return their hidden state as it came, and `note` gets their names and calls.

    Unless `output` is known, the first block that is called really runs once.
    """
    blocks = {name: model.get_submodule(name) for name in names}

    def recorder(name: str, forward: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            call = _as_call(name, args, kwargs)
            note(name, call)
            if not output.known:
                output.learn(name, forward(*args, **kwargs))
            return output.of(call.hidden)

        return record

    configs: list[Any] = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "use_cache")]
    caches = [(config, config.use_cache) for config in configs]
    try:
        for config in configs:
            config.use_cache = False  # a cache would grow with each run of a block
        for name, block in blocks.items():
            block.forward = recorder(name, block.forward)
        yield
    finally:
        for block in blocks.values():
            block.__dict__.pop("forward", None)
        for config, value in reversed(caches):
            config.use_cache = value


def _as_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    kwargs = {key: None if hasattr(value, "get_seq_length") else value for key, value in kwargs.items()}
    args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
    if args:
        return Call(args, kwargs)
    key = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), None)
    if key is None or not isinstance(kwargs[key], torch.Tensor):
        raise StructureError(f"The block {name!r} is called without a tensor: its hidden state cannot be found.")
    return Call(args, kwargs, key)


def _sequence_around_hidden(name: str, output: Any) -> type | None:
    """None for a tensor, tuple or list for a sequence whose first item is the hidden state."""
    if isinstance(output, torch.Tensor):
        return None
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        if all(item is None for item in output[1:]):
            return type(output)
        raise StructureError(
            f"The block {name!r} returns {len(output)} values, not only its hidden state: later blocks may need them, "
            "so this model cannot run block by block."
        )
    raise StructureError(f"The block {name!r} returns a {type(output).__name__}, not a hidden state.")
