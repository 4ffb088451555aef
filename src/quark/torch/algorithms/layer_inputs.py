"""Runs a block over all batches at once, and halts where linear layers are about to read their input.

Each batch is a coroutine (a greenlet) that runs the block's forward. It halts when it reaches a group of linear layers
that read one tensor (q, k, v; gate, up; ...). When all batches have arrived, the group's inputs are known for all of
the data: an algorithm may measure them, change the weights, and rescale the inputs; then all go on to the next
group. So one forward of the block serves all of its layers, each seeing what the changed layers before it give.

The experts of a mixture do not read what each other gives. So several of them may be reached at once, with their
inputs, as many as `experts.reached_together` lets be in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn

from quark.base.memory_and_disk import give_back_memory
from quark.errors import StructureError
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.calibration.expert_tokens import Choose, Places, is_shown
from quark.torch.calibration.experts import expert_of, reached_together
from quark.torch.calibration.spill import Waiting, tensors_of
from quark.torch.calibration.work_device import WHERE_IT_IS, WorkDevice
from quark.torch.layers.base import hook_input
from quark.torch.model.blocks import Call
from quark.torch.model.passes import UnfusedExperts

Groups = Sequence[Sequence[str]]
"""Names of the layers (relative to the block) that read one tensor, in running order; a group goes by its index."""

_OnInputs = Callable[[InputGroup], None]
_OnExpertInputs = Callable[[list[InputGroup]], None]


def input_groups(block: nn.Module, layers: Sequence[str], call: Call) -> list[tuple[str, ...]]:
    """Names of the layers (relative to the block) that read the same tensor one after the other, in running order.

    A layer that reads it after others have run (kv_a_proj of DeepSeek, after q_b_proj) is a group of its own.
    """
    groups: list[tuple[Any, list[str]]] = []
    alive = []  # a freed tensor's address may be given to another one

    def note(name: str, x: torch.Tensor) -> None:
        alive.append(x)
        identity = (x.data_ptr(), tuple(x.shape), x.stride(), x._version) if x.numel() else id(x)
        if not groups or groups[-1][0] != identity:
            groups.append((identity, []))
        groups[-1][1].append(name)

    with _hooked(block, layers, note):
        call.run(block)
    return [tuple(dict.fromkeys(names)) for _, names in groups]


def lockstep(
    name: str,
    block: nn.Module,
    calls: Sequence[Call],
    groups: Groups,
    on_inputs: _OnInputs,
    float_block: nn.Module | None = None,
    float_calls: Sequence[Call] = (),
    on_expert_inputs: _OnExpertInputs | None = None,
    float_once: bool = False,
    place: WorkDevice = WHERE_IT_IS,
    reading_extra: Callable[[nn.Module, Choose | None], AbstractContextManager[None]] = lambda *_: nullcontext(),
    all_experts: bool = False,
    batches: Sequence[int] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run all calls, halting at each group.

    Args:
        name: The block's name, the prefix of its layers' full names.
        block: Its linear layers may be changed by `on_inputs`.
        calls: One for each batch.
        groups: From `input_groups`.
        on_inputs: Gets each group when all batches have reached it.
        float_block, float_calls: The float block and its calls, run beside for `InputGroup.float_inputs`.
        on_expert_inputs: Gets the groups of several experts at once; None: `on_inputs` gets one after the other.
        float_once: Whether the float block runs for the last time: its layers then lose their weights as they have run.
        place: Where the block computes, and where its batches wait.
        reading_extra: Within what it gives for a block, experts read tokens of others, too. It gets whose they read.
        all_experts: Whether each expert reads all tokens within it: of what they read, statistics are then found once.
        batches: Numbers of the batches of this process that the calls are of; none: of all.

    Returns:
        The outputs of the block, and of the float block, one for each batch, as they wait.

    Raises:
        StructureError: Layers do not run in the same order, once, for all batches.
    """
    blocks = [one for one in (block, float_block) if one is not None]
    own = (x for one in blocks for x in (*one.parameters(), *one.buffers()))
    waiting = place.halted(own, [*calls, *float_calls])
    numbered = zip(batches or range(len(calls)), calls, strict=True)
    runs = [_BatchRun(block, call, place, waiting, number) for number, call in numbered]
    float_runs: list[_BatchRun] = []
    follow: AbstractContextManager[None] = nullcontext()
    if float_block is not None:
        follow = reading_extra(float_block, _follow_places)
        pairs = zip(float_calls, runs, strict=True)
        float_runs = [_BatchRun(float_block, call, place, waiting, pair.number, pair) for call, pair in pairs]
    known = SharedStatistics() if all_experts else None
    expert_groups = groups if on_expert_inputs is not None else ()
    with (
        _halting(block, groups),
        _halting(float_block, groups),
        reading_extra(block, None if float_block is None else _note_places),
        follow,
        _same_experts(block, float_block),
        _looking_ahead(block, expert_groups),
        _looking_ahead(float_block, expert_groups),
        _freeing(float_block if float_once else None, groups, len(float_runs)),
    ):
        shown = partial(_show, on_inputs=on_inputs, on_expert_inputs=on_expert_inputs)
        meet = partial(_meet, name, block, groups, shown=shown, known=known)
        _run_all([*runs, *float_runs], meet)
    return [run.output for run in runs], [run.output for run in float_runs]


def _run_all(runs: Sequence[_BatchRun], meet: Callable[[list[_BatchRun]], None]) -> None:
    """Run all batches to their end; `meet` gets those that halt at the earliest group that any has reached."""
    try:
        for run in runs:
            run.advance()
        while True:
            waiting = [run for run in runs if not run.dead]
            if not waiting:
                return
            earliest = min(run.group for run in waiting)
            halted = [run for run in waiting if run.group == earliest]
            meet(halted)
            for run in halted:
                if not run.dead and run.group == earliest:  # else it has gone on by itself
                    run.advance()
    finally:
        for run in runs:
            if not run.dead:
                run.throw()


def _show(groups: Sequence[InputGroup], on_inputs: _OnInputs, on_expert_inputs: _OnExpertInputs | None) -> None:
    """Hand over the groups that tokens reached: of others there is no statistic, and they are rounded to nearest."""
    shown = [group for group in groups if group.count]
    if on_expert_inputs is not None and len(shown) > 1:
        on_expert_inputs(shown)
    elif shown:
        on_inputs(shown[0])


class SharedStatistics:
    """The statistics of the tokens that all experts of a mixture read.

    Memory holds it while they are solved, beside what one expert takes.
    """

    def __init__(self) -> None:
        self.mixture: str | None = None
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.statistics: dict[Any, Any] = {}

    def of(self, layer: str, inputs: Sequence[torch.Tensor]) -> dict[Any, Any] | None:
        """Statistics of the inputs of a layer and those with it; None for what is not read by all of a mixture.

        The first layers of experts read what all do, those after them what their expert makes of it.
        """
        expert = expert_of(layer)
        mixture = None if expert is None else expert.rpartition(".")[0]
        if mixture != self.mixture:
            self.mixture, self.statistics = mixture, {}
            self.inputs = [weakref.ref(x) for x in inputs] if mixture else []
        same = len(inputs) == len(self.inputs) and all(a() is b for a, b in zip(self.inputs, inputs, strict=True))
        return self.statistics if mixture and same else None


def _meet(
    name: str,
    block: nn.Module,
    groups: Groups,
    halted: Sequence[_BatchRun],
    shown: Callable[[list[InputGroup]], None],
    known: SharedStatistics | None,
) -> None:
    """Show what all batches have reached, and hand them their inputs as the algorithm leaves them."""
    runs = [run for run in halted if run.block is block]
    float_runs = [run for run in halted if run.block is not block]
    reached: dict[int, InputGroup] = {}
    # Float experts follow the tokens of the others, which must be there before.
    alone = not any(map(expert_of, chain.from_iterable(groups)))

    def go_on() -> None:
        for run in float_runs if alone else ():
            run.advance()

    for index in halted[0].inputs:
        layers = {f"{name}.{leaf}".lstrip("."): block.get_submodule(leaf) for leaf in groups[index]}
        inputs = [run.inputs[index] for run in runs]
        reached[index] = InputGroup(
            layers,  # type: ignore[arg-type]
            inputs,
            [run.inputs[index] for run in float_runs],
            go_on,
            halted[0].waiting,
            None if known is None else known.of(next(iter(layers)), inputs),
            list(map(attrgetter("number"), runs)),
        )
    give_back_memory()  # what the batches freed on their way here, before the algorithm makes its matrices
    shown(list(reached.values()))
    for batch, run in enumerate(runs):
        run.inputs = {index: group.inputs[batch] for index, group in reached.items()}


@dataclass
class _KeptInput:
    """The input of a group as the algorithm left it, and how many layers of the group have read it."""

    x: torch.Tensor
    read: int = 0


class _BatchRun(greenlet):  # type: ignore[misc]
    """One batch on its way through a block.

    Attributes:
        group: The group at which it halts; the first one, where several experts are reached at once.
        inputs: Group -> its input, of those that it has reached while it halts: one, or several experts.
        kept: Group -> what its layers get. A block whose attention and MLP read one norm side by side runs other
            groups in between.
        output: What the block returned, in the end, as it waits.
        waiting: Where the tensors that it holds are while it halts.
        number: Of the batch, among those of this process.
        pair: For the float block: the run of the same batch through the other one.
        routes: Name of a mixture of experts -> the experts that its router chose for each token.
        places: Name of a mixture whose experts are modules of their own -> the tokens that its router chose for each.
        passing: Whether layers are run without a halt.
    """

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        place: WorkDevice,
        waiting: Waiting,
        number: int,
        pair: _BatchRun | None = None,
    ) -> None:
        super().__init__()
        self.block, self.call, self.place, self.waiting, self.pair = block, call, place, waiting, pair
        self.number = number
        self.spilled: list[Any] = []
        self.routes: dict[str, torch.Tensor] = {}
        self.places: dict[str, Places | None] = {}
        self.passing = False
        self.group = -1
        self.inputs: dict[int, torch.Tensor] = {}
        self.kept: dict[int, _KeptInput] = {}
        self.output: Any = None

    def run(self) -> None:
        self.output = self.place.waiting(self.call.run(self.block))

    def advance(self) -> None:
        """Run to the next group or to the end."""
        before = self.group
        while self.spilled:  # no name keeps what the batch itself lets go
            self.waiting.bring_back(self.spilled.pop())
        self.switch()
        self.spilled = self.waiting.spill(self._tensors())
        if not self.dead and self.group <= before:
            raise StructureError(
                f"A batch reaches layer group {self.group} after group {before}: the layers of this block run more "
                "than once, or not in the same order for all batches, so it cannot be solved in one sweep."
            )

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that it holds while it halts."""
        yield from tensors_of(self.gr_frame)
        yield from self.inputs.values()
        yield from (kept.x for kept in self.kept.values())

    def read_input(self, group: int, size: int, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer of a group of `size`: the run halts at the first, and keeps x for the rest."""
        if group not in self.kept:
            self.halt({group: x})
        kept = self.kept[group]
        kept.read += 1
        if kept.read == size:
            del self.kept[group]
        return kept.x

    def halt(self, inputs: dict[int, torch.Tensor]) -> None:
        """Halt with the inputs of some groups, then hold them as the algorithm leaves them."""
        self.group, self.inputs = min(inputs), inputs
        del inputs  # what is replaced while this batch waits must be free for the batches that go on before it
        self.parent.switch()
        self.kept |= {group: _KeptInput(self.waiting.load(x)) for group, x in self.inputs.items()}
        self.inputs = {}


def _current() -> _BatchRun | None:
    """The batch that is running, if one is."""
    current = getcurrent()
    return current if isinstance(current, _BatchRun) else None


@contextmanager
def _halting(block: nn.Module | None, groups: Groups) -> Iterator[None]:
    """Within: a batch that calls a layer of a group halts there."""
    places = {leaf: (index, len(group)) for index, group in enumerate(groups) for leaf in group}

    def halt(leaf: str, x: torch.Tensor) -> torch.Tensor | None:
        run = _current()
        return None if run is None or run.passing else run.read_input(*places[leaf], x)

    if block is None:
        yield
        return
    with _hooked(block, list(places), halt):
        yield


@contextmanager
def _freeing(block: nn.Module | None, groups: Groups, count: int) -> Iterator[None]:
    """Within: a layer of a float block loses its weights after so many calls, one for each batch."""
    left: dict[nn.Module, int] = {}

    def after(module: nn.Module, *_: Any) -> None:
        left[module] -= 0 if is_shown(module) else 1
        if left[module] == 0:
            for name in module._parameters:
                module._parameters[name] = None

    with ExitStack() as hooks:
        for leaf in {leaf for group in groups for leaf in group} if block is not None else ():
            if expert_of(leaf) is None:  # those the tokens choose
                module = block.get_submodule(leaf)  # type: ignore[union-attr]
                left[module] = count
                hooks.enter_context(module.register_forward_hook(after))
        yield


@contextmanager
def _looking_ahead(block: nn.Module | None, groups: Groups) -> Iterator[None]:
    """Within: a batch that comes to an expert halts there with the inputs of experts that follow, too."""
    mixtures: dict[str, UnfusedExperts] = {}
    if block is not None and groups:
        mixtures = {name: module for name, module in block.named_modules() if isinstance(module, UnfusedExperts)}

    def look(name: str, mixture: UnfusedExperts) -> Callable[[bool, int, Callable[[int], torch.Tensor]], None]:
        reached = reached_together(mixture, name, groups)

        def ahead(down: bool, index: int, of: Callable[[int], torch.Tensor]) -> None:
            run = _current()
            if run is not None and not run.passing and (down, index) in reached:
                run.halt({group: of(expert) for expert, group in reached[down, index].items()})

        return ahead

    for name, mixture in mixtures.items():
        mixture.ahead = look(name, mixture)
    try:
        yield
    finally:
        for mixture in mixtures.values():
            del mixture.ahead


def _note_places(name: str, find: Callable[[], Places | None]) -> Places | None:
    """Keep the choices of the router of a mixture, which the float batch will read, too."""
    found, run = find(), _current()
    if run is not None:
        run.places[name] = found
    return found


def _follow_places(name: str, _: Callable[[], Places | None]) -> Places | None:
    """Return the choices of the router of the block beside."""
    run = _current()
    return None if run is None or run.pair is None else run.pair.places[name]


@contextmanager
def _same_experts(block: nn.Module, float_block: nn.Module | None) -> Iterator[None]:
    """Within: float experts halt with the tokens that the router of `block` chose, so that inputs pair up row by row.

    After that they run as the float router wants it, without a halt: the float block returns what it always does.
    """

    def note(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            run = _current()
            if run is not None:
                run.routes[name] = args[1]

        return before

    def follow(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            run = _current()
            if run is not None and run.pair is not None:
                module.forward(args[0], run.pair.routes[name], *args[2:])
                run.passing = True

        return before

    def leave(*_: Any) -> None:
        run = _current()
        if run is not None:
            run.passing = False

    with ExitStack() as hooks:
        if float_block is not None:
            # Sorted experts get rows for every token, whatever the router chose.
            routed = {n for n, m in block.named_modules() if isinstance(m, UnfusedExperts) and not m.sorted}
            for name in routed:
                float_experts = float_block.get_submodule(name)
                hooks.enter_context(block.get_submodule(name).register_forward_pre_hook(note(name)))
                hooks.enter_context(float_experts.register_forward_pre_hook(follow(name)))
                hooks.enter_context(float_experts.register_forward_hook(leave))
        yield


@contextmanager
def _hooked(block: nn.Module, layers: Sequence[str], hook: Callable[[str, torch.Tensor], Any]) -> Iterator[None]:
    """Within: `hook(name, x)` runs before each of the layers; what it returns, if anything, replaces x."""

    def before(name: str, layer: nn.Module, x: torch.Tensor) -> Any:
        return None if is_shown(layer) else hook(name, x)

    with ExitStack() as hooks:
        for name in layers:
            hooks.enter_context(hook_input(block.get_submodule(name), partial(before, name)))
        yield
