"""Blocks that hand several tensors on: two streams of joint blocks, the skips of a UNet, an encoder beside a decoder.

    state after block k     every tensor that a block up to k has given, and that one after it or the model reads
    a call of block k       state  ->  arguments of the block  ->  what it returns  ->  state after it

A state is one tensor, in which its streams lie one after the other. So what works block by block sees one hidden state
here, too: its error is that of all streams, and gradients flow through all.

How tensors go is seen in forwards of the first batch in which blocks stand aside: each gives stand-ins of the shapes
that it would give, so nothing is computed but what is between the blocks. An argument that is a stand-in is read from
that block; one that is the same whatever stand-ins hold is fixed; any other is computed between blocks, by the model's
own code, which then runs with what the blocks before have really given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from quark.errors import CalibrationError, StructureError, one_line
from quark.torch.model.batches import calibration_step, evaluating, input_device
from quark.torch.model.blocks.calls import Call
from quark.torch.model.blocks.forwards import forward_instead, without_cache_arguments, without_caches

Stream = tuple[int, int]
"""A tensor that goes from block to block: the index of the block that gives it, -1 for what the first one reads, and
its place among what that gives."""
Answer = Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]
"""A function that gives the output of a block that stands aside, of its index and its arguments."""


@dataclass(frozen=True)
class Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self, device: torch.device, other: bool = False) -> torch.Tensor:
        """A tensor of that shape which takes no memory: one row of random values, again and again.

        Args:
            device: Where it is.
            other: Whether it has other values.
        """
        generator = torch.Generator().manual_seed(int(other))
        row = torch.rand(self.shape[-1:], generator=generator).to(device, self.dtype)
        return row.expand(self.shape)


@dataclass(frozen=True)
class StateLayout:
    """The streams of a state, in the order in which they lie in it."""

    streams: tuple[Stream, ...]
    likes: tuple[Like, ...]

    def pack(self, tensors: Mapping[Stream, torch.Tensor]) -> torch.Tensor:
        """One tensor of all streams: (rows, values) where all have as many rows, else (1, values)."""
        found = [tensors[stream] for stream in self.streams]
        rows = found[0].shape[0] if len({x.shape[:1] for x in found}) == 1 and found[0].ndim else 1
        return torch.cat([x.reshape(rows, -1).to(self._dtype()) for x in found], 1)

    def unpack(self, state: torch.Tensor) -> dict[Stream, torch.Tensor]:
        """The streams of a state."""
        sizes = [torch.Size(like.shape).numel() // state.shape[0] for like in self.likes]
        parts = zip(self.streams, self.likes, torch.split(state, sizes, 1), strict=True)
        return {stream: part.reshape(like.shape).to(like.dtype) for stream, like, part in parts}

    def _dtype(self) -> torch.dtype:
        """A type that holds the values of all streams; float64 where some are integers (tokens that a block chose)."""
        dtypes = {like.dtype for like in self.likes}
        if len(dtypes) > 1 and not all(dtype.is_floating_point for dtype in dtypes):
            return torch.float64
        return functools.reduce(torch.promote_types, dtypes)


@dataclass(frozen=True)
class StreamStep:
    """How one block is called on a state, for batches of one shape.

    Attributes:
        index: Of the block.
        structure: Of its arguments.
        leaves: For each argument its stream, or None for one that is fixed or computed.
        before, after: The state that it reads, and the one that it leaves.
        bridge: Gives the arguments where some are computed between blocks; None where none is.
        around: What a block gives, of its index and of the state after the last block.
    """

    index: int
    structure: TreeSpec
    leaves: tuple[Stream | None, ...]
    before: StateLayout
    after: StateLayout
    bridge: Callable[[Mapping[Stream, torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]] | None
    around: Callable[[int, torch.Tensor], Any]


@dataclass(frozen=True)
class StreamCall(Call):
    """A call of one block for one batch, whose hidden state is a state of streams.

    Its further arguments are those that are fixed: a leaf each, None in the place of a stream.
    """

    step: StreamStep | None = None

    @property
    def is_computed(self) -> bool:
        """True where the model runs for its arguments, as some are computed between blocks."""
        return self._step.bridge is not None

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        step, (state, *fixed) = self._step, self.loaded().args
        streams = step.before.unpack(state)
        if step.bridge is not None:
            return step.bridge(streams)
        leaves = [x if stream is None else streams[stream] for x, stream in zip(fixed, step.leaves, strict=True)]
        args, kwargs = tree_unflatten(leaves, step.structure)
        return args, kwargs

    def run(self, module: nn.Module) -> torch.Tensor:
        """The state after the block."""
        args, kwargs = self.arguments()
        given, step = _tensors(module(*args, **kwargs)), self._step
        streams = step.before.unpack(self.loaded().hidden)
        return step.after.pack({s: streams[s] if s in streams else given[s[1]] for s in step.after.streams})

    def around(self, index: int, state: torch.Tensor) -> Any:
        """Return the output of the block of an index, of the state after the last block."""
        return self._step.around(index, state)

    @property
    def _step(self) -> StreamStep:
        assert self.step is not None
        return self.step


def stream_blocks(model: nn.Module, batch: Any) -> list[str]:
    """Names of the blocks that a batch runs through once, in running order: those of all lists of blocks.

    Raises:
        CalibrationError: The model does not take the batch.
        StructureError: No list of blocks is reached.
    """
    order = _Recorder(model, listed_blocks(model)).order(batch)
    found = [name for name in order if order.count(name) == 1]
    if not found:
        raise StructureError("This batch reaches no list of blocks.")
    return found


def listed_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks of all lists, whether they are reached or not, as the model has them."""
    lists = [name for name, module in model.named_modules() if _is_list(module)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{child}" for path in outer for child, _ in model.get_submodule(path).named_children()]


@contextmanager
def giving_stand_ins(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within: some blocks give stand-ins of the shapes that they would give, and need no weights."""
    recorder = _Recorder(model, names)
    answer = recorder.stand_ins(_none)

    def aside(index: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: answer(index, *without_cache_arguments(args, kwargs))

    with ExitStack() as all_aside:
        for index, block in enumerate(recorder.blocks):
            all_aside.enter_context(forward_instead(block, aside(index)))
        yield


def _is_list(module: nn.Module) -> bool:
    """Return True where a module is a list of modules that hold weights for products in modules of theirs."""
    weighted = (nn.Linear, nn.modules.conv._ConvNd)
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(any(isinstance(m, weighted) for m in child.modules() if m is not child) for child in module)
    )


def record_streams(
    model: nn.Module, names: Sequence[str], data: Iterable[Any], keep: Callable[[Call, Any], Call]
) -> dict[str, list[Call]]:
    """The call of each block for each batch; the states are those of the first block.

    Args:
        model: Its blocks may be on the meta device; all else is in memory.
        names: Of its blocks, in the order in which they run.
        data: Batches as `quantize_model` takes them.
        keep: See `record_calls`.

    Raises:
        CalibrationError: No batch, one that the model does not take, or blocks that do not run in this order.
        StructureError: A batch goes another way than the first one; says where.
    """
    calls: dict[str, list[Call]] = {name: [] for name in names}
    routes: _Routes | None = None
    recorder = _Recorder(model, names)
    with torch.no_grad(), evaluating(model):
        for count, batch in enumerate(data):
            routes = routes or _Routes.of(recorder, batch)
            kept: dict[int, Any] = {}
            for name, call in zip(names, recorder.calls(routes, batch, count), strict=True):
                calls[name].append(keep(call, kept))
    if routes is None:
        raise CalibrationError("The calibration dataloader is empty: at least one batch is needed.")
    return calls


@dataclass(frozen=True)
class _Forward:
    """The record of a forward in which blocks stand aside.

    Attributes:
        arguments: Of each block that was reached: the leaves of its arguments, and their structure.
        given: Of each: what it gave, a tree of tensors.
        result: The tensors that the model returned; none where it ended before a block.
    """

    arguments: list[tuple[list[Any], TreeSpec]]
    given: list[Any]
    result: list[torch.Tensor]

    def likes(self) -> dict[Stream, Any]:
        """Return the outputs of each block and the inputs of the first one, without the values."""
        likes = {(index, place): _like(x) for index, given in enumerate(self.given) for place, x in _numbered(given)}
        return likes | {(-1, place): _like(x) for place, x in enumerate(self.arguments[0][0])}


class _EndsHereError(Exception):
    """An end of the forward: no later part needs to run."""


class _WithoutHooks(nn.Module):
    """A block that runs without the hooks on itself: those of one whose weights are on disk take no meta tensors."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the block's own forward."""
        return self.block.forward(*args, **kwargs)


class _Recorder:
    """Runs forwards of a model in which its blocks stand aside."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model, self.names = model, names
        self.blocks = [model.get_submodule(name) for name in names]
        self._forwards = [block.forward for block in self.blocks]
        self._given: dict[Any, Any] = {}

    def forward(self, batch: Any, answer: Answer, until: int | None = None, number: int = 0) -> _Forward:
        """Run a batch; each block gives what `answer` says. It ends before the block `until`.

        Raises:
            CalibrationError: The model does not take the batch, or does not run the blocks in their order, once each.
        """
        seen = _Forward([], [], [])

        def aside(index: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if index != len(seen.arguments):
                    raise CalibrationError(
                        f"Batch {number} reached the block {self.names[index]!r} when "
                        f"{self.names[len(seen.arguments) % len(self.names)]!r} was next."
                    )
                args, kwargs = without_cache_arguments(args, kwargs)
                seen.arguments.append(tree_flatten((args, kwargs)))
                if index == until:
                    raise _EndsHereError
                seen.given.append(answer(index, args, kwargs))
                return seen.given[-1]

            return run

        with ExitStack() as aside_all, suppress(_EndsHereError), without_caches(self.model):
            for index, block in enumerate(self.blocks):
                aside_all.enter_context(forward_instead(block, aside(index)))
            handle = self.model.register_forward_hook(lambda *a: seen.result.extend(_tensors(a[-1])))
            aside_all.callback(handle.remove)
            calibration_step(self.model, batch, input_device(self.model), number)
        if until is None and len(seen.arguments) != len(self.blocks):
            raise CalibrationError(f"Batch {number} did not reach the block {self.names[len(seen.arguments)]!r}.")
        return seen

    def order(self, batch: Any) -> list[str]:
        """The names of the blocks as a batch reaches them."""
        reached: list[str] = []
        answer = self.stand_ins(_none)

        def aside(index: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                reached.append(self.names[index])
                return answer(index, *without_cache_arguments(args, kwargs))

            return run

        with ExitStack() as aside_all, torch.no_grad(), evaluating(self.model), without_caches(self.model):
            for index, block in enumerate(self.blocks):
                aside_all.enter_context(forward_instead(block, aside(index)))
            calibration_step(self.model, batch, input_device(self.model), 0)
        return reached

    def likes(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a block, a tree of a `Like` for each tensor: seen on the meta device, or by a run."""
        leaves, structure = tree_flatten((args, dict(kwargs)))
        key = (index, str(structure), tuple(repr(_like(x)) for x in leaves))
        if key not in self._given:
            with forward_instead(self.blocks[index], self._forwards[index]):
                self._given[key] = tree_map(_like, self._run(index, leaves, structure))
        return self._given[key]

    def _run(self, index: int, leaves: list[Any], structure: TreeSpec) -> Any:
        block = self.blocks[index]
        own = dict([*block.named_parameters(), *block.named_buffers()])
        on_meta = {f"block.{name}": x.to("meta") for name, x in own.items()}
        try:
            args, kwargs = tree_unflatten([_to(x, torch.device("meta")) for x in leaves], structure)
            return torch.func.functional_call(_WithoutHooks(block), on_meta, args, kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if any(x.is_meta for x in own.values()):
                raise StructureError(
                    f"What the block {self.names[index]!r} returns is seen when it runs, and its weights are not in "
                    f"memory ({one_line(error)}): quantize this model in memory."
                ) from error
        device = next(iter(own.values())).device
        args, kwargs = tree_unflatten([_to(x, device) for x in leaves], structure)
        return block(*args, **kwargs)

    def stand_ins(self, others: Callable[[Stream], bool]) -> Answer:
        """Blocks give stand-ins: of two kinds of values, the other one for the streams that are said."""

        def answer(index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            device = next((x.device for x in _tensors((args, dict(kwargs)))), torch.device("cpu"))
            place = iter(range(1 << 30))

            def filled(x: Any) -> Any:
                return x.stand_in(device, bool(others((index, next(place))))) if isinstance(x, Like) else x

            return tree_map(filled, self.likes(index, args, kwargs), is_leaf=_is_like)

        return answer

    def calls(self, routes: _Routes, batch: Any, number: int) -> Iterator[Call]:
        """The calls of all blocks for a batch."""
        seen = self.forward(batch, self.stand_ins(_none), number=number)
        origin = _origins(seen)
        if [_route(seen, index, origin) for index in range(len(self.blocks))] != routes.direct:
            raise StructureError(f"Batch {number} takes another way through the blocks than the first one.")
        first, likes = seen.arguments[0][0], seen.likes()
        layouts = [StateLayout(streams, tuple(likes[s] for s in streams)) for streams in routes.states]
        trees = [tree_map(_like, given) for given in seen.given]
        state = layouts[0].pack({(-1, place): first[place] for _, place in routes.states[0]})
        around = partial(_given_by, trees=trees, layout=layouts[-1])
        for index, (leaves, structure) in enumerate(seen.arguments):
            bridge = partial(self._bridge, batch, trees, index) if index in routes.computed else None
            step = StreamStep(
                index, structure, routes.leaves[index], layouts[index], layouts[index + 1], bridge, around
            )
            fixed = [None if stream is not None or bridge else x for x, stream in zip(leaves, step.leaves, strict=True)]
            yield StreamCall((state, *fixed), {}, step=step)

    def _bridge(
        self, batch: Any, trees: Sequence[Any], index: int, streams: Mapping[Stream, torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block, by the model's own code on what the blocks before it have given."""
        device, here = next(iter(streams.values())).device, input_device(self.model)
        given = {stream: _to(x, here) for stream, x in streams.items()}

        def answer(other: int, *_: Any) -> Any:
            return _filled(trees[other], other, given, here)

        leaves, structure = self.forward(batch, answer, until=index).arguments[index]
        leaves = [_to(x, device) for x in leaves]
        leaves = [streams[-1, place] if index == 0 and (-1, place) in streams else x for place, x in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, structure)
        return args, kwargs


@dataclass(frozen=True)
class _Routes:
    """How tensors go from block to block, in all batches.

    Attributes:
        direct: For each block and argument the stream that it is; None for any other.
        leaves: The same with what the first block reads, which is a stream, too.
        computed: Indices of blocks with arguments that are computed between blocks.
        states: The streams before each block, and after the last one.
    """

    direct: list[tuple[Stream | None, ...]]
    leaves: list[tuple[Stream | None, ...]]
    computed: frozenset[int]
    states: list[tuple[Stream, ...]]

    @classmethod
    def of(cls, recorder: _Recorder, batch: Any) -> _Routes:
        """Return the routes that forwards of the first batch show."""
        seen = recorder.forward(batch, recorder.stand_ins(_none))
        count, origin = len(seen.arguments), _origins(seen)
        direct = [_route(seen, index, origin) for index in range(count)]
        given = [*origin.values()]
        differs = _differences(seen, recorder.forward(batch, recorder.stand_ins(_all)), direct)
        # The last block that reads a stream, as it is or by what is computed of it; `count` for the model.
        last = {stream: index for index, route in enumerate(direct) for stream in route if stream is not None}
        for stream in given if differs else ():
            alone = recorder.forward(batch, recorder.stand_ins(stream.__eq__))
            last[stream] = max(last.get(stream, -1), *_differences(seen, alone, direct), -1)
        leaves = [_first_streams(seen), *direct[1:]]
        states = [tuple(stream for stream in leaves[0] if stream is not None)]
        for index, name in enumerate(recorder.names):
            states.append(tuple(stream for stream in given if stream[0] <= index < last.get(stream, -1)))
            if not states[-1]:
                raise StructureError(f"Nothing reads what the block {name!r} gives.")
        return cls(direct, leaves, frozenset(index for index in differs if index < count), states)


def _first_streams(seen: _Forward) -> tuple[Stream | None, ...]:
    """Return the streams that the first block alone reads: its floating-point arguments, else the first of them."""
    leaves = seen.arguments[0][0]
    floats = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    others = {id(x) for arguments, _ in seen.arguments[1:] for x in arguments}
    own = [place for place in floats if id(leaves[place]) not in others] or floats[:1]
    if not own:
        raise StructureError("The first block is called without a tensor: its hidden state cannot be found.")
    return tuple((-1, place) if place in own else None for place in range(len(leaves)))


def _origins(seen: _Forward) -> dict[int, Stream]:
    """Id of a tensor -> the stream that it is."""
    return {id(x): (index, place) for index, given in enumerate(seen.given) for place, x in _numbered(given)}


def _route(seen: _Forward, index: int, origin: Mapping[int, Stream]) -> tuple[Stream | None, ...]:
    return tuple(origin.get(id(x)) if isinstance(x, torch.Tensor) else None for x in seen.arguments[index][0])


def _differences(seen: _Forward, other: _Forward, direct: Sequence[tuple[Stream | None, ...]]) -> set[int]:
    """Indices of blocks of which an argument that is no stream differs; their number for what the model returns."""
    found = set()
    for index, ((leaves, _), (others, _)) in enumerate(zip(seen.arguments, other.arguments, strict=True)):
        pairs = zip(leaves, others, direct[index], strict=True)
        if any(stream is None and not _equal(x, y) for x, y, stream in pairs):
            found.add(index)
    if not all(map(_equal, seen.result, other.result)):
        found.add(len(seen.arguments))
    return found


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.shape == y.shape and torch.equal(x, y)
    return type(x) is type(y) and (x is y or not isinstance(x, (bool, int, float, str)) or x == y)


def _given_by(index: int, state: torch.Tensor, trees: Sequence[Any], layout: StateLayout) -> Any:
    """Return the output of a block, of the state after the last one: stand-ins for tensors that nothing reads."""
    return _filled(trees[index], index, layout.unpack(state), state.device)


def _filled(tree: Any, index: int, streams: Mapping[Stream, torch.Tensor], device: torch.device) -> Any:
    place = iter(range(1 << 30))

    def filled(x: Any) -> Any:
        if not isinstance(x, Like):
            return x
        stream = (index, next(place))
        return streams[stream] if stream in streams else x.stand_in(device)

    return tree_map(filled, tree, is_leaf=_is_like)


def _numbered(tree: Any) -> Iterable[tuple[int, torch.Tensor]]:
    return enumerate(_tensors(tree))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _none(stream: Stream) -> bool:
    return False


def _all(stream: Stream) -> bool:
    return True


def _is_like(x: Any) -> bool:
    return isinstance(x, Like)


def _like(x: Any) -> Any:
    return Like(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x
