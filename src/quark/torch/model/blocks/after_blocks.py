"""The modules after the blocks of a model (the last norm, heads), run as one more block on the last outputs.

    a copy of the model's containers around its own modules and tensors; blocks in it stand aside:  x -> what is given

So algorithms reach the linear layers there like those of a block, and nothing is in memory twice or computed again.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.model.batches import forward_batch, input_device, named_outputs
from quark.torch.model.blocks.calls import Call, short_call
from quark.torch.model.blocks.forwards import forward_instead, without_caches
from quark.torch.model.blocks.recording import BlockOutput
from quark.torch.model.blocks.streams import StreamCall
from quark.torch.model.tied_weights import overlapping

TOKENS = 64
"""How many tokens of each sample `CallAfterBlocks` returns, evenly taken."""


class Given:
    """The forward of a block that stands aside: returns what it is told to.

    Attributes:
        index: Of the block.
    """

    output: Any = None

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given output."""
        return self.output


@dataclass(frozen=True)
class CallAfterBlocks(Call):
    """The call of what runs after the blocks, for one batch; its hidden state is what the last block gave.

    Attributes:
        batch: As the user has it.
        around: What a block returns, of its index and of the hidden state after the last one.
    """

    batch: Any = None
    around: Callable[[int, torch.Tensor], Any] = lambda index, hidden: hidden

    def run(self, module: nn.Module) -> torch.Tensor:
        """Some tokens of the largest tensor that the model returns: the logits of all would fill the memory."""
        hidden = self.loaded().hidden
        for part in module.modules():
            if given := _given_forward(part):
                given.output = self.around(given.index, hidden)
        result = forward_batch(module, self.batch, hidden.device)
        largest = max((x for _, x in named_outputs(result)), key=torch.Tensor.numel)
        return largest[:, :: -(-largest.shape[1] // TOKENS)].clone() if largest.ndim > 2 else largest


def around_hidden(call: Call, block: nn.Module) -> Callable[[int, torch.Tensor], Any]:
    """Return a function for the outputs of blocks when the last one gives a hidden state.

    Args:
        call: Of the last block.
        block: It runs once, to see what is beside its hidden state; that, blocks alone read.
    """
    if isinstance(call, StreamCall):
        return call.around
    args, kwargs = short_call(block, call).arguments()
    output = block(*args, **kwargs)
    if isinstance(output, torch.Tensor):
        return lambda index, hidden: hidden
    kind, others = type(output), tuple(output[1:])
    return lambda index, hidden: kind((hidden, *others))


def given_around(
    model: nn.Module, names: Sequence[str], calls: Sequence[Call]
) -> list[Callable[[int, torch.Tensor], Any]]:
    """For each batch what blocks return, of their index and of the hidden state after the last one.

    Args:
        model: Its first block is there, and runs once.
        names: Of its blocks, in running order.
        calls: Of the first block, one for each batch.
    """
    first, block = calls[0], model.get_submodule(names[0])
    if isinstance(first, StreamCall):
        return [call.around for call in calls if isinstance(call, StreamCall)]
    output = BlockOutput()
    output.see(names[0], first.to(input_device(block)), block)
    return [lambda index, hidden: output.of(hidden)] * len(calls)


@contextmanager
def blocks_aside(
    model: nn.Module, names: Sequence[str], around: Callable[[int, torch.Tensor], Any], hidden: torch.Tensor
) -> Iterator[None]:
    """Within: the blocks of a model do not run, and return what `around` says of the last one's hidden state."""
    with ExitStack() as aside:
        aside.enter_context(without_caches(model))
        for index, name in enumerate(names):
            aside.enter_context(
                forward_instead(model.get_submodule(name), partial(_given_hidden, around, index, hidden))
            )
        yield


def _given_hidden(
    around: Callable[[int, torch.Tensor], Any], index: int, hidden: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """The forward of a block that stands aside."""
    return around(index, hidden)


def without_blocks(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The model with its blocks aside. Linear layers, modules without children, and all tensors are the model's own."""
    blocks = {id(model.get_submodule(name)): index for index, name in enumerate(names)}
    own: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if id(module) in blocks:
            # With the attributes that models look at, without its modules and tensors.
            aside = own[id(module)] = copy.copy(module)
            aside._modules, aside._parameters, aside._buffers = {}, {}, {}
            aside._forward_pre_hooks, aside._forward_hooks = OrderedDict(), OrderedDict()
            aside.forward = Given(blocks[id(module)])
        elif isinstance(module, nn.Linear) or next(module.children(), None) is None:
            own[id(module)] = module
    users = {id(getattr(module, "config", None)) for module in model.modules()}
    without = copy.deepcopy(model, own)
    for module in without.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache") and id(config) not in users:
            config.use_cache = False
    return without


def _given_forward(module: nn.Module) -> Given | None:
    """The forward of a block that stands aside; None for other modules."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Given) else None


def _order(without: nn.Module, call: CallAfterBlocks) -> list[tuple[str, bool]]:
    """The linear layers and the blocks in the order in which they run, and which of them are blocks."""
    order: list[tuple[str, bool]] = []
    with ExitStack() as hooks:
        for name, module in without.named_modules():
            if isinstance(module, nn.Linear) or _given_forward(module):
                note = partial(_note, order, (name, _given_forward(module) is not None))
                hooks.enter_context(module.register_forward_pre_hook(note))
        call.run(without)
    return order


def layers_after_blocks(without: nn.Module, call: CallAfterBlocks) -> list[str]:
    """Names of the linear layers that run once, after the blocks, and whose weights are shared with nothing.

    Those of another list of modules (a decoder after its encoder) are left out.

    Args:
        without: The model from `without_blocks`.
        call: Of any batch.
    """
    order = _order(without, call)
    last = max((index for index, (_, is_block) in enumerate(order) if is_block), default=len(order))
    tensors = (x for module in without.modules() for x in (*module.parameters(False), *module.buffers(False)))
    shared, runs = overlapping(tensors), Counter(name for name, _ in order)
    lists = tuple(f"{name}." for name, module in without.named_modules() if isinstance(module, nn.ModuleList))
    alone = [name for name, _ in order[last + 1 :] if runs[name] == 1 and not name.startswith(lists)]
    return [name for name in alone if id(without.get_submodule(name).weight) not in shared]


def _note(order: list[tuple[str, bool]], entry: tuple[str, bool], *_: Any) -> None:
    order.append(entry)
