"""The blocks of a model: found in any module tree, and the arguments that each one gets.

One dry run records the arguments of all blocks: each block passes its input through, so nothing is computed but the
embeddings, masks and position tables, and weights of blocks may still be on the meta device. After that a block runs
alone, on the hidden state that the block before it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from quark.base.log import logger
from quark.errors import CalibrationError, StructureError
from quark.torch.model.batches import calibration_step, evaluating, input_device
from quark.torch.model.blocks.calls import Call, read_flags
from quark.torch.model.blocks.forwards import forward_instead, without_cache_arguments, without_caches
from quark.torch.model.blocks.streams import giving_stand_ins, listed_blocks, record_streams, stream_blocks

WHOLE = ""
"""The name of the one block of a model that has no list of blocks: the model itself."""


Around = Callable[[Sequence[str]], AbstractContextManager[None]]
"""Within: the weights of what is in none of these blocks are there, and those of the first one."""


def find_blocks(
    model: nn.Module,
    path: str | None = None,
    batch: Any = None,
    layers: Collection[str] = (),
    around: Around | None = None,
) -> list[str]:
    """Names of the blocks in the order in which they run.

    Args:
        model: Any module.
        path: Name of the list of blocks ("model.layers"); None or "": the ModuleList that holds the most parameters
            and is not inside another one. A model without one is a single block, named "".
        batch: Where there are several such lists, those that the forward of this batch does not reach do not count:
            a tower for images, in a model that gets text. All lists that it reaches are taken where blocks hand on
            more than one hidden state, as those of image models do, or where several lists hold `layers`, as those of
            an encoder and a decoder do; see `stream_blocks`. None: all count, and blocks are taken to hand on one.
        layers: Names of the layers that are worked on.
        around: Brings the weights that the forwards of the batch need; None: all are in memory.

    Raises:
        StructureError: `path` is no list of modules.
        CalibrationError: The model does not take `batch`.
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
    if batch is None:
        return _of_one_list(model, outer_stacks(model))
    return _of_reached_lists(model, batch, layers, around)


def _of_reached_lists(model: nn.Module, batch: Any, layers: Collection[str], around: Around | None) -> list[str]:
    """See `find_blocks`."""
    outside, stacks = around or _nothing_around, outer_stacks(model)
    reached = _reached(model, stacks, batch, outside)
    if around is not None:
        stacks = [path for path in stacks if _is_reached(path, reached)] or stacks
    names = _of_one_list(model, stacks, batch if around is None else None)
    if _suffice(model, names, reached, batch, layers, outside):
        return names
    try:
        with outside(reached or listed_blocks(model)):
            reached = reached or stream_blocks(model, batch)
            record_streams(model, reached, [batch], lambda call, _: call)
    except StructureError as error:
        if _run_alone(model, names, reached, batch, outside):
            logger.info("Algorithms work on %s and the blocks after it alone: %s", names[0], error)
            return names
        logger.info("The model runs as one block, with all its weights and inputs of layers in memory: %s", error)
        return [WHOLE]
    return reached


def _reached(model: nn.Module, stacks: Sequence[str], batch: Any, around: Around) -> list[str]:
    """The blocks of all lists that a batch reaches; none where there is one list, or where they are not seen."""
    listed = listed_blocks(model)
    if {*listed} == {*_of_one_list(model, stacks)}:
        return []
    with suppress(StructureError, CalibrationError), around(listed):
        return stream_blocks(model, batch)
    return []


def _suffice(
    model: nn.Module, names: Sequence[str], reached: Sequence[str], batch: Any, layers: Collection[str], around: Around
) -> bool:
    """Return True where the blocks of one list can run alone, and none of the others that are reached holds a layer."""
    if names == [WHOLE]:
        return not layers or not all(_holds(reached, layer) for layer in layers)
    if any(_holds([name for name in reached if name not in names], layer) for layer in layers):
        return False
    return _run_alone(model, names, reached, batch, around)


def _run_alone(model: nn.Module, names: Sequence[str], reached: Sequence[str], batch: Any, around: Around) -> bool:
    """Return True where blocks of one list hand on one hidden state; the others that are reached give stand-ins."""
    others = [name for name in reached if name not in names]
    with around([*names, *others]), giving_stand_ins(model, others):
        return names != [WHOLE] and _carry_one(model, names, batch)


def _nothing_around(names: Sequence[str]) -> AbstractContextManager[None]:
    return nullcontext()


def _is_reached(path: str, reached: Sequence[str]) -> bool:
    """Return True where blocks of a list, or one that it lies in, are reached."""
    return any(name.startswith(f"{path}.") or path.startswith(f"{name}.") for name in reached)


def _holds(names: Iterable[str], layer: str) -> bool:
    """Return True where a layer lies in one of these blocks."""
    return any(layer.startswith(f"{name}.") for name in names)


def _of_one_list(model: nn.Module, stacks: Sequence[str], batch: Any = None) -> list[str]:
    """Names of the blocks of the largest of some lists; of those that a batch reaches, where there is one."""
    if not stacks:
        return [WHOLE]
    order = sorted(stacks, key=lambda name: -sum(p.numel() for p in model.get_submodule(name).parameters()))
    largest = order[0] if batch is None or len(order) == 1 else _first_reached(model, order, batch)
    return [f"{largest}.{name}" for name, _ in model.get_submodule(largest).named_children()]


def _carry_one(model: nn.Module, names: Sequence[str], batch: Any) -> bool:
    """Return True where blocks hand on one hidden state, and nothing else that is computed from it; seen on a batch."""
    if names == [WHOLE]:
        return True
    try:
        recorded = _record_one(model, names, [batch], lambda call, _: call)
        _require_handed_on(model, names, batch, recorded)
    except (StructureError, CalibrationError):  # blocks of several kinds may return other things than the first
        return False
    return True


def _require_handed_on(
    model: nn.Module, names: Sequence[str], batch: Any, recorded: Mapping[str, Sequence[Call]]
) -> None:
    """Raise StructureError if a block gets another hidden state than the one before it returned, or anything that is
    computed from what one returned: blocks return other values than they did when the calls were recorded.
    """
    output, returned, before = BlockOutput(), list[torch.Tensor](), list[torch.Tensor]()
    same: dict[str, list[torch.Tensor]] = {}  # flags of what is compared; a device is waited for once for all

    def aside(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = _as_call(name, args, kwargs)
            output.see(name, call, forward)
            if before and not _is_same(call.hidden, before[-1]):
                raise StructureError(f"The block {name!r} reads what is computed from what the one before it returns.")
            same.setdefault(name, []).extend(_equal_arguments(recorded[name][0], call, returned))
            result = tree_map(_other, output.of(call.hidden))
            before.append(result if isinstance(result, torch.Tensor) else result[0])
            returned.extend(x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            if name == names[-1]:
                raise _LastBlockReachedError
            return result

        return run

    with torch.no_grad(), evaluating(model), without_caches(model), ExitStack() as forwards:
        forwards.enter_context(suppress(_LastBlockReachedError))
        for name in names:
            block = model.get_submodule(name)
            forwards.enter_context(forward_instead(block, aside(name, block.forward)))
        calibration_step(model, batch, input_device(model), 0)
    flags = read_flags([flag for flags in same.values() for flag in flags])
    if not all(flags):
        compared = [name for name, own in same.items() if own]
        raise StructureError(f"Blocks read what is computed between them, of {', '.join(compared[:3])} ...")


def _equal_arguments(first: Call, call: Call, returned: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Of each tensor that a block gets beside its hidden state, and that no block returned, whether it is as before."""
    was, now = (tree_leaves((one.args, dict(one.kwargs))) for one in (first, call))
    for x, y in zip(was, now, strict=True):
        known = x is first.hidden or any(_is_same(y, one) for one in returned)
        if isinstance(x, torch.Tensor) and not known and x is not y:
            yield (x == y).all() if x.shape == y.shape else torch.tensor(False)


def _other(x: Any) -> Any:
    """A tensor of other values; anything else, and integers, as they are."""
    return x.flip(-1) / 2 + 1 if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim else x


def _is_same(x: Any, y: torch.Tensor) -> bool:
    """Return True where a value is a tensor, or a view of all of it as it is."""
    if not isinstance(x, torch.Tensor):
        return False
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def outer_stacks(model: nn.Module) -> list[str]:
    """Names of the lists of blocks that are not inside another one."""
    stacks = [name for name, module in model.named_modules() if _is_stack(module)]
    return [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]


def _first_reached(model: nn.Module, paths: list[str], batch: Any) -> str:
    """The first of these lists of blocks that the forward of a batch reaches; it ends where the very first is."""
    reached: set[str] = set()

    def note(path: str) -> None:
        reached.add(path)
        if path == paths[0]:
            raise _LastBlockReachedError

    blocks = [(path, block) for path in paths for block in cast(nn.ModuleList, model.get_submodule(path))]
    hooks = [block.register_forward_pre_hook(lambda *_, path=path: note(path)) for path, block in blocks]
    try:
        with torch.no_grad(), evaluating(model), suppress(_LastBlockReachedError):
            calibration_step(model, batch, input_device(model), 0)
    finally:
        for hook in hooks:
            hook.remove()
    return next((path for path in paths if path in reached), paths[0])


def _is_stack(module: nn.Module) -> bool:
    """Return True where a module is a list of blocks: of modules that hold several linear layers each."""
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    return all(sum(isinstance(m, nn.Linear) for m in child.modules() if m is not child) > 1 for child in module)


_Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""id of a tensor -> that tensor, and what is kept of it."""


def record_calls(
    model: nn.Module,
    names: Sequence[str],
    data: Iterable[Any],
    keep: Callable[[Call, _Kept], Call] = lambda call, _: call,
) -> dict[str, list[Call]]:
    """The call of each block for each batch; the hidden states are those of the first block for all of them.

    Args:
        model: Its blocks are not run (but for the first, on one batch, to see what a block returns).
        names: From `find_blocks`.
        data: Batches as `quantize_model` takes them.
        keep: Makes of a call the one that is kept, and notes what is kept of its tensors for the next block.

    Raises:
        CalibrationError: No batch, a batch that the model does not take, or blocks that it does not run in this order.
        StructureError: Batches go different ways through the blocks.
    """
    data, first = with_first(data)
    if first is None or _carry_one(model, names, first):
        return _record_one(model, names, data, keep)
    return record_streams(model, names, data, keep)


def with_first(data: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """Batches, and the first of them; None where there is none."""
    if not isinstance(data, Iterator):
        return data, next(iter(data), None)
    first = list(islice(data, 1))
    return chain(first, data), next(iter(first), None)


def _record_one(
    model: nn.Module, names: Sequence[str], data: Iterable[Any], keep: Callable[[Call, _Kept], Call]
) -> dict[str, list[Call]]:
    """See `record_calls`, for blocks that hand on their hidden state alone. Raises StructureError for others."""
    device = input_device(model)
    calls: dict[str, list[Call]] = {name: [] for name in names}
    kept: _Kept = {}

    def note(name: str, call: Call) -> None:
        calls[name].append(keep(call, kept))
        if name == names[-1]:
            raise _LastBlockReachedError

    count = 0
    with torch.no_grad(), evaluating(model), passing_through(model, names, note, BlockOutput()):
        for batch in data:
            with suppress(_LastBlockReachedError):
                calibration_step(model, batch, device, count)
            count += 1
            kept.clear()
            for name in names:
                if len(calls[name]) != count:
                    raise CalibrationError(f"Batch {count - 1} reached the block {name!r} {len(calls[name])} times.")
    if count == 0:
        raise CalibrationError("The calibration dataloader is empty: at least one batch is needed.")
    return calls


class _LastBlockReachedError(Exception):
    """Nothing after the last block needs to run."""


class BlockOutput:
    """The form of the outputs of a model's blocks: a hidden state alone, or first in a tuple or list.

    Known when one block has really run. Some models compute a value in their first block and hand it from block to
    block (the position bias of T5): it is seen in what the first block returns for a batch, so that one then runs for
    each batch. What only the model itself gets (attention weights) does not matter.

    Attributes:
        known: Whether a block has run.
        by_batch: Whether blocks return tensors beside their hidden state, which each batch has its own of.
    """

    def __init__(self) -> None:
        self.known = self.by_batch = self._fixed = False
        self._sequence: type | None = None
        self._others: tuple[Any, ...] = ()
        self._first = ""
        self._computed: list[torch.Tensor] = []

    def see(self, name: str, call: Call, forward: Callable[..., Any]) -> None:
        """Note what a block gets and, where that must be known, what it returns; blocks come in running order.

        Raises:
            StructureError: It returns no hidden state, or reads what a block before it computed from its hidden state:
                that is not known before the blocks before it are finished.
        """
        if self._fixed:
            return
        if not self.known or (self.by_batch and name == self._first):
            self._learn(name, call, forward)
            return
        handed = {id(leaf) for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)}
        if any(id(tensor) in handed for tensor in self._computed):
            raise StructureError(
                f"The block {name!r} reads more of the block before it than its hidden state: a tensor that is "
                "computed from that hidden state. So this model cannot run block by block."
            )
        read = [index for index, x in enumerate(self._others) if isinstance(x, torch.Tensor) and id(x) in handed]
        if read:
            self._check_hands_on(name, call, forward, read)

    def fix(self) -> None:
        """From now on blocks return what is known, and none runs: for the batch that ran last."""
        self._fixed = True

    def of(self, hidden: torch.Tensor) -> Any:
        """Return the output of a block that computes this hidden state."""
        return hidden if self._sequence is None else self._sequence((hidden, *self._others))

    def _learn(self, name: str, call: Call, forward: Callable[..., Any]) -> None:
        """Run the first block of the model."""
        output = forward(*call.args, **call.kwargs)
        self.known, self._first = True, name
        self._sequence, self._others = _sequence_around_hidden(name, output), ()
        if self._sequence is None:
            return
        self._others = tuple(output[1:])
        self.by_batch = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(self._others))
        if self.by_batch:
            # Those of the other values that are different for another hidden state: backwards, and half as large.
            changed = call.with_hidden(call.hidden.flip(-1) / 2)
            again = forward(*changed.args, **changed.kwargs)[1:]
            pairs = zip(tree_leaves(self._others), tree_leaves(tuple(again)), strict=True)
            self._computed = [x for x, y in pairs if isinstance(x, torch.Tensor) and not _equal(x, y)]

    def _check_hands_on(self, name: str, call: Call, forward: Callable[..., Any], read: list[int]) -> None:
        """Raise StructureError unless a block returns the values that it got from the one before it."""
        if any(parameter.is_meta for parameter in getattr(forward, "__self__", nn.Module()).parameters()):
            raise StructureError(
                f"The block {name!r} reads {len(read) + 1} values of the one before it. Whether it hands them on is "
                "seen when it runs, and its weights are not in memory: quantize this model in memory."
            )
        output = forward(*call.args, **call.kwargs)
        others = tuple(output[1:]) if isinstance(output, (tuple, list)) else ()
        if not all(index < len(others) and _equal(self._others[index], others[index]) for index in read):
            raise StructureError(
                f"The block {name!r} changes a value beside its hidden state that the one before it gave, so this "
                "model cannot run block by block."
            )


def _equal(x: torch.Tensor, y: Any) -> bool:
    return x is y or (isinstance(y, torch.Tensor) and torch.equal(x, y))


@contextmanager
def passing_through(
    model: nn.Module, names: Sequence[str], note: Callable[[str, Call], None], output: BlockOutput
) -> Iterator[None]:
    """Within: blocks return their hidden state as it came, and `note` gets their names and calls.

    Blocks really run as far as `output` has to see what they return.
    """
    blocks = {name: model.get_submodule(name) for name in names}

    def recorder(name: str, forward: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            call = _as_call(name, args, kwargs)
            seen = output.known  # what the last block gets is looked at, too: after it `note` may end the forward
            if seen:
                output.see(name, call, forward)
            note(name, call)
            if not seen:
                output.see(name, call, forward)
            return output.of(call.hidden)

        return record

    with without_caches(model), ExitStack() as forwards:
        for name, block in blocks.items():
            forwards.enter_context(forward_instead(block, recorder(name, block.forward)))
        yield


def _as_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    args, kwargs = without_cache_arguments(args, kwargs)
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
        return list if isinstance(output, list) else tuple
    raise StructureError(f"The block {name!r} returns a {type(output).__name__}, not a hidden state.")
