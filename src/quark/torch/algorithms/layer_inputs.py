"""Runs a block over all batches at once, and halts where linear layers are about to read their input.

Each batch is a coroutine (a greenlet) that runs the block's forward. It halts when it reaches a group of linear layers
that read one tensor (q, k, v; gate, up; ...). When all batches have arrived, the group's inputs are known for all of
the data: an algorithm may measure them, change the weights, and rescale the inputs; then all go on to the next
group. So one forward of the block serves all of its layers, each seeing what the changed layers before it give.

The experts of a mixture do not read what each other gives. So several of them may be reached at once, with their
inputs, as many as `moe.reached_together` lets be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn

from quark.errors import CalibrationError, NonFiniteError, StructureError
from quark.torch.calibration.distributed import largest, summed
from quark.torch.calibration.experts import reached_together
from quark.torch.model.blocks import Call
from quark.torch.model.passes import UnfusedExperts


class Stop:
    """A group of linear layers that read one tensor, and that tensor for every batch.

    Attributes:
        layers: Full name -> layer; all have the same in_features.
        inputs: One tensor for each batch, shape (..., in_features).
        float_inputs: The same in the float model, where an algorithm asked for it, else empty.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], inputs: list[torch.Tensor], float_inputs: list[torch.Tensor]
    ) -> None:
        self.layers, self.inputs, self.float_inputs = dict(layers), inputs, float_inputs

    def __str__(self) -> str:
        return ", ".join(self.layers)

    @cached_property
    def count(self) -> int:
        """Tokens that reach the layers."""
        own = sum(x.numel() // x.shape[-1] for x in self.inputs)
        return int(summed(torch.tensor(own)))

    @cached_property
    def gram(self) -> torch.Tensor:
        """Second moments X^T X / count, shape (in_features, in_features), float32.

        Raises:
            CalibrationError: No token reaches the layers (an expert that was never chosen).
            NonFiniteError: An input holds NaN or Inf.
        """
        return self._moments(self.inputs, self.inputs)

    @cached_property
    def cross(self) -> torch.Tensor:
        """X~^T X / count of the real inputs X~ and those of the float model X."""
        return self._moments(self.inputs, self.float_inputs)

    @cached_property
    def max_abs(self) -> torch.Tensor:
        """Largest magnitude of each channel, shape (in_features,), float32."""
        self._require_tokens()
        none = self.inputs[0].new_zeros(self.inputs[0].shape[-1])
        own = torch.stack([none, *(flat(x).abs().amax(0) for x in self.inputs if x.numel())]).amax(0)
        return largest(own.float())

    @cached_property
    def mean_abs(self) -> torch.Tensor:
        """Mean magnitude of each channel, shape (in_features,), float32."""
        self._require_tokens()
        own = torch.stack([flat(x).abs().sum(0, dtype=torch.float32) for x in self.inputs]).sum(0)
        return summed(own) / self.count

    def rescale(self, scale: torch.Tensor) -> None:
        """Divide channel i of all inputs by scale[i]: what a fold into the producer does to them."""
        self.inputs = [x / scale.to(x) for x in self.inputs]
        for name in ("gram", "cross", "max_abs", "mean_abs"):
            self.__dict__.pop(name, None)

    def _moments(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
        self._require_tokens()
        width = left[0].shape[-1]
        total = torch.zeros(width, width, dtype=torch.float32, device=left[0].device)
        rows, others = (sum(x.numel() // width for x in side) for side in (left, right))
        if [x.shape for x in left] != [y.shape for y in right]:
            raise StructureError(
                f"{self}: the float model gives these layers {others} tokens where this one gives {rows} (another "
                "choice of experts?), so they cannot be compared. Possible: exclude them, or an algorithm that does "
                "not compare (GPTQ)."
            )
        for x, y in zip(left, right, strict=True):
            total.addmm_(flat(x).float().T, flat(y).float(), alpha=1 / self.count)
        total = summed(total)
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError(f"{self}: an input holds NaN or Inf, or values too large to square.")
        return total

    def _require_tokens(self) -> None:
        if self.count == 0:
            raise CalibrationError(no_tokens(str(self)))


def no_tokens(layers: str) -> str:
    """What is wrong with layers that read nothing, and what to do."""
    return (
        f"{layers}: no calibration token reaches these layers (experts that the router never chose?). "
        "Use more or other data, or exclude them."
    )


def flat(x: torch.Tensor) -> torch.Tensor:
    """All tokens as rows, shape (tokens, features)."""
    return x.reshape(-1, x.shape[-1])


def input_groups(block: nn.Module, layers: Sequence[str], call: Call) -> list[tuple[str, ...]]:
    """Names of the layers (relative to the block) that read the same tensor one after the other, in running order.

    A layer that reads it after others have run (kv_a_proj of DeepSeek, after q_b_proj) is a group of its own.
    """
    groups: list[tuple[Any, list[str]]] = []
    alive = []  # a freed tensor's address may be given to another one

    def note(name: str, x: torch.Tensor) -> None:
        alive.append(x)
        place = (x.data_ptr(), tuple(x.shape), x.stride(), x._version) if x.numel() else id(x)
        if not groups or groups[-1][0] != place:
            groups.append((place, []))
        groups[-1][1].append(name)

    with _hooked(block, layers, note):
        call.run(block)
    return [tuple(dict.fromkeys(names)) for _, names in groups]


def lockstep(
    name: str,
    block: nn.Module,
    calls: Sequence[Call],
    groups: Sequence[Sequence[str]],
    visit: Callable[[Stop], None],
    float_block: nn.Module | None = None,
    float_calls: Sequence[Call] = (),
    visit_experts: Callable[[list[Stop]], None] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run all calls, stopping at each group.

    Args:
        name: The block's name, the prefix of its layers' full names.
        block: Its linear layers may be changed by `visit`.
        calls: One for each batch.
        groups: From `input_groups`.
        visit: What happens at a stop.
        float_block, float_calls: The float block and its calls, run beside for `Stop.float_inputs`.
        visit_experts: What happens at the stops of several experts at once; None: `visit`, at one after the other.

    Returns:
        The outputs of the block, and of the float block, one for each batch.

    Raises:
        StructureError: Layers do not run in the same order, once, for all batches.
    """
    first = [_Walker(block, call) for call in calls]
    second: list[_Walker] = []
    if float_block is not None:
        second = [_Walker(float_block, call, pair) for call, pair in zip(float_calls, first, strict=True)]
    walkers = first + second
    together = groups if visit_experts is not None else ()
    with (
        _halting(block, groups),
        _halting(float_block, groups),
        _same_experts(block, float_block),
        _looking_ahead(block, together),
        _looking_ahead(float_block, together),
    ):
        try:
            for walker in walkers:
                walker.advance()
            while waiting := [walker for walker in walkers if not walker.dead]:
                index = min(walker.group for walker in waiting)
                here = [walker for walker in waiting if walker.group == index]
                _meet(name, block, groups, here, visit, visit_experts)
                for walker in here:
                    walker.advance()
        finally:
            for walker in walkers:
                if not walker.dead:
                    walker.throw()
    return [walker.output for walker in first], [walker.output for walker in second]


def _meet(
    name: str,
    block: nn.Module,
    groups: Sequence[Sequence[str]],
    here: Sequence[_Walker],
    visit: Callable[[Stop], None],
    visit_experts: Callable[[list[Stop]], None] | None,
) -> None:
    """Show what all batches have reached, and hand them their inputs as the visit leaves them."""
    real, beside = ([walker for walker in here if (walker.block is block) is own] for own in (True, False))
    stops = {}
    for group in here[0].inputs:
        layers = {f"{name}.{leaf}".lstrip("."): block.get_submodule(leaf) for leaf in groups[group]}
        inputs, float_inputs = ([walker.inputs[group] for walker in side] for side in (real, beside))
        stops[group] = Stop(layers, inputs, float_inputs)  # type: ignore[arg-type]
        del inputs, float_inputs
    if visit_experts is not None and len(stops) > 1:
        visit_experts(list(stops.values()))
    else:
        visit(stops[here[0].group])
    for place, walker in enumerate(real):
        walker.inputs = {group: stop.inputs[place] for group, stop in stops.items()}


class _Walker(greenlet):  # type: ignore[misc]
    """One batch on its way through a block.

    Attributes:
        inputs: Group -> its input, of those that it has reached while it halts: one, or several experts.
        held: Group -> what its layers get, and how many of them have read it. A block whose attention and MLP read one
            norm side by side runs other groups in between.
        output: What the block returned, in the end.
        pair: For the float block: the walker of the same batch through the other one.
        routes: Name of a mixture of experts -> the experts that its router chose for each token.
        passing: Whether layers are run without a halt.
    """

    def __init__(self, block: nn.Module, call: Call, pair: _Walker | None = None) -> None:
        super().__init__()
        self.block, self.call, self.pair = block, call, pair
        self.routes: dict[str, torch.Tensor] = {}
        self.passing = False
        self.group = -1
        self.inputs: dict[int, torch.Tensor] = {}
        self.held: dict[int, tuple[torch.Tensor, int]] = {}
        self.output: Any = None

    def run(self) -> None:
        self.output = self.call.run(self.block)

    def advance(self) -> None:
        """Run to the next group or to the end."""
        before = self.group
        self.switch()
        if not self.dead and self.group <= before:
            raise StructureError(
                f"A batch reaches layer group {self.group} after group {before}: the layers of this block run more "
                "than once, or not in the same order for all batches, so it cannot be solved in one sweep."
            )

    def arrive(self, group: int, size: int, x: torch.Tensor) -> torch.Tensor:
        """Halt at the first layer of a group; hand the input as it is then to all of its layers."""
        if group not in self.held:
            self.halt({group: x})
            del x
        result, read = self.held.pop(group)
        if read + 1 < size:
            self.held[group] = (result, read + 1)
        return result

    def halt(self, inputs: dict[int, torch.Tensor]) -> None:
        """Halt with the inputs of some groups, then hold them as they are after the visit."""
        self.group, self.inputs = min(inputs), inputs
        del inputs
        self.parent.switch()
        self.held |= {group: (x, 0) for group, x in self.inputs.items()}
        self.inputs = {}


@contextmanager
def _halting(block: nn.Module | None, groups: Sequence[Sequence[str]]) -> Iterator[None]:
    """Within: a walker that calls a layer of a group halts there."""
    place = {leaf: (index, len(group)) for index, group in enumerate(groups) for leaf in group}

    def halt(leaf: str, x: torch.Tensor) -> torch.Tensor | None:
        walker = getcurrent()
        return walker.arrive(*place[leaf], x) if isinstance(walker, _Walker) and not walker.passing else None

    if block is None:
        yield
        return
    with _hooked(block, list(place), halt):
        yield


@contextmanager
def _looking_ahead(block: nn.Module | None, groups: Sequence[Sequence[str]]) -> Iterator[None]:
    """Within: a walker that comes to an expert halts there with the inputs of experts that follow, too."""
    mixtures: dict[str, UnfusedExperts] = {}
    if block is not None and groups:
        mixtures = {name: module for name, module in block.named_modules() if isinstance(module, UnfusedExperts)}

    def look(name: str, mixture: UnfusedExperts) -> Callable[[bool, int, Callable[[int], torch.Tensor]], None]:
        together = reached_together(mixture, name, groups)

        def ahead(down: bool, index: int, of: Callable[[int], torch.Tensor]) -> None:
            walker = getcurrent()
            if isinstance(walker, _Walker) and not walker.passing and (down, index) in together:
                walker.halt({group: of(expert) for expert, group in together[down, index].items()})

        return ahead

    for name, mixture in mixtures.items():
        mixture.ahead = look(name, mixture)
    try:
        yield
    finally:
        for mixture in mixtures.values():
            del mixture.ahead


@contextmanager
def _same_experts(block: nn.Module, float_block: nn.Module | None) -> Iterator[None]:
    """Within: float experts halt with the tokens that the router of `block` chose, so that inputs pair up row by row.

    After that they run as the float router wants it, without a halt: the float block returns what it always does.
    """

    def note(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if isinstance(walker := getcurrent(), _Walker):
                walker.routes[name] = args[1]

        return before

    def follow(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if isinstance(walker := getcurrent(), _Walker) and walker.pair is not None:
                module.forward(args[0], walker.pair.routes[name], *args[2:])
                walker.passing = True

        return before

    def leave(*_: Any) -> None:
        if isinstance(walker := getcurrent(), _Walker):
            walker.passing = False

    handles = []
    if float_block is not None:
        for name in (name for name, module in block.named_modules() if isinstance(module, UnfusedExperts)):
            float_experts = float_block.get_submodule(name)
            handles.append(block.get_submodule(name).register_forward_pre_hook(note(name)))
            handles.append(float_experts.register_forward_pre_hook(follow(name)))
            handles.append(float_experts.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooked(block: nn.Module, layers: Sequence[str], hook: Callable[[str, torch.Tensor], Any]) -> Iterator[None]:
    """Within: `hook(name, x)` runs before each of the layers; what it returns, if anything, replaces x."""

    def before(name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def call(module: nn.Module, args: tuple[Any, ...]) -> Any:
            x = hook(name, args[0])
            return None if x is None else (x, *args[1:])

        return call

    handles = [block.get_submodule(name).register_forward_pre_hook(before(name)) for name in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
