"""Tokens of other experts by which those of a mixture are calibrated that the router chose seldom, or never.

    extra = EXTRA (channels - own)   tokens of others, evenly taken, to an expert with fewer of its own than channels,
                                     the most that a layer of it reads; all of the others, if they are fewer

An expert reads them after its own, in both of its phases, so its down projection sees what the expert itself makes of
them, which no other expert tells. Whatever is found of its inputs counts its own tokens with a share of
own / (own + extra). With as many tokens as channels, the second moments can be those of a full space: it reads none.

With `all_experts`, each expert reads all tokens. Either way what a mixture returns is what it always does.

Experts that are modules of their own (Switch, NLLB-MoE, code of a checkpoint) are called by their mixture with their
tokens alone, or not at all. Those that read tokens of others are called before that with what they are to read; when
the mixture then calls them, what they read is passed over. So are all of a mixture whose inputs are compared with
those of the float model: its experts then read the tokens that the router of the other chose, so that rows pair up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.torch.calibration.distributed import summed
from quark.torch.calibration.experts import expert_of
from quark.torch.layers import QuantLayer
from quark.torch.model.blocks import Call
from quark.torch.model.passes import UnfusedExperts
from quark.torch.model.passes.unfuse_experts import share_of

EXTRA = 4
"""Tokens of others for each one that an expert lacks. Measured (a mixture of 3 M parameters, GPTQ int4, 1024 tokens for
32 experts of 128 channels, three of them masked): of what rounding to nearest loses on other tokens, experts without
tokens lose 0.33, 0.29, 0.27 with 2, 4, 8 for each channel; those with few 0.36 with none, three of them more than
nearest, and 0.26, 0.27, 0.32 with 2, 4 for each one lacking, and all there are."""

ExtraTokens = Mapping[str, Mapping[int, float]]
"""Name of a mixture -> expert -> the share of the tokens of others that it reads."""


@dataclass
class ExpertCalibration:
    """How the experts of a model are calibrated, and what came of it.

    Attributes:
        shared_ranges: Whether the experts of a mixture share the range of their inputs.
        all_experts: Whether each expert reads all tokens.
        experts, few, idle: How many there are, were reached by too few tokens but some, and by none.
        left: Experts of which layers could not be shown a token: they are rounded to nearest.
        ranges: Experts whose static ranges are those of the others of their mixture.
    """

    shared_ranges: bool = False
    all_experts: bool = False
    experts: int = 0
    few: int = 0
    idle: int = 0
    left: int = 0
    ranges: set[str] = field(default_factory=set)

    def extra_tokens(self, module: nn.Module, calls: Sequence[Call], compared: bool = False) -> ExtraTokens:
        """Which tokens of others the experts of a block read, by what its router chooses for some calls.

        Args:
            module: The block.
            calls: For which its router chooses.
            compared: Whether inputs are compared with those of the float model. Experts that are modules of their own
                then read a share of 0 at least, so that both sides are called with the same tokens.
        """
        found: dict[str, dict[int, float]] = {}
        for name, of in ({} if self.all_experts else _routed(module, calls)).items():
            found[name] = {
                e: min(1.0, EXTRA * (of.channels - n) / max(1, of.tokens - n))
                for e, n in enumerate(of.own)
                if n < of.channels
            }
            self.experts += len(of.own)
            self.idle += of.own.count(0)
            self.few += len(found[name]) - of.own.count(0)
            if compared and of.called:
                found[name] = dict.fromkeys(range(len(of.own)), 0.0) | found[name]
        return {name: shares for name, shares in found.items() if shares}

    def say(self) -> None:
        """Say in a line what came of it, where some experts had too few tokens."""
        parts = []
        if self.few + self.idle:
            parts.append(
                f"of {self.experts}, calibration reached {self.few} with too few tokens and {self.idle} with none, "
                "which also read tokens of others"
            )
        if self.left:
            parts.append(f"{self.left} that no token reached are rounded to nearest")
        if self.ranges:
            parts.append(f"{len(self.ranges)} that none reached have the static ranges of the others of their mixture")
        if parts:
            advice = ", or calibrate_all_experts," if (self.left or self.ranges) and not self.all_experts else ""
            logger.warning("Experts: %s. More or other data%s may be better.", "; ".join(parts), advice)


Places = dict[int, torch.Tensor]
"""Expert -> places of its tokens among those that its mixture gets."""
Choose = Callable[[str, Callable[[], Places | None]], Places | None]
"""Gets the name of a mixture, and what finds the places that its own router chooses (None where they are not found);
returns the places that are read, None for those of its own router."""


@contextmanager
def reading_extra(module: nn.Module, extra: ExtraTokens, choose: Choose | None = None) -> Iterator[None]:
    """Within: the experts of a block read tokens of others, too.

    Args:
        module: The block.
        extra: The share that each reads.
        choose: Whose tokens experts that are modules of their own read; None: their own.
    """
    called = _called_experts(module) if extra else {}
    mixtures = {name: cast(UnfusedExperts, module.get_submodule(name)) for name in extra if name not in called}
    try:
        with ExitStack() as hooks:
            for name, mixture in mixtures.items():
                mixture.extra = extra[name]
            for name in extra.keys() & called.keys():
                hooks.enter_context(called[name].showing(extra[name], partial(choose, name) if choose else None))
            yield
    finally:
        for mixture in mixtures.values():
            del mixture.extra


@contextmanager
def all_tokens_to_all_experts(module: nn.Module) -> Iterator[None]:
    """Within: each expert reads all tokens."""
    mixtures = [m for m in module.modules() if isinstance(m, UnfusedExperts)]
    try:
        with ExitStack() as hooks:
            for mixture in mixtures:
                mixture.all_tokens = True
            for mixture_of_modules in _called_experts(module).values():
                hooks.enter_context(mixture_of_modules.showing(None))
            yield
    finally:
        for mixture in mixtures:
            del mixture.all_tokens


_SHOWN: ContextVar[frozenset[nn.Module]] = ContextVar("shown", default=frozenset())
"""Layers whose inputs are passed over: batches that run in turns, each a greenlet, have one each."""


def is_shown(layer: nn.Module) -> bool:
    """Return True where the input of a layer is passed over: its mixture has shown it the tokens to read, or will."""
    return layer in _SHOWN.get()


@contextmanager
def _passed_over(layers: frozenset[nn.Module]) -> Iterator[None]:
    before = _SHOWN.get()
    _SHOWN.set(before | layers)
    try:
        yield
    finally:
        _SHOWN.set(before)


@dataclass(frozen=True)
class CalledExperts:
    """A mixture whose experts are modules that it calls with their tokens.

    Attributes:
        owner: What calls them.
        experts: They, in the order in which it holds them.
    """

    owner: nn.Module
    experts: tuple[nn.Module, ...]

    def tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The tokens among what the owner is called with, as rows; None where there are none."""
        layers = self._linear(self.experts[:1])
        width = layers[0].in_features if layers else -1
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point())
        x = next((x for x in tensors if x.shape[-1:] == (width,)), None)
        return None if x is None else x.reshape(-1, width)

    @contextmanager
    def noting(self, note: Callable[[int, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
        """Within: `note` gets the index of each expert that is called, and what it is called with."""
        with ExitStack() as hooks:
            for index, expert in enumerate(self.experts):
                hooks.enter_context(
                    expert.register_forward_pre_hook(
                        lambda _, args, kwargs, index=index: note(index, args, kwargs), with_kwargs=True
                    )
                )
            yield

    @contextmanager
    def showing(
        self,
        shares: Mapping[int, float] | None,
        choose: Callable[[Callable[[], Places | None]], Places | None] | None = None,
    ) -> Iterator[None]:
        """Within: before the owner runs, experts are called with what they are to read.

        Args:
            shares: Expert -> share of all tokens that it reads after its own; None: each reads all tokens.
            choose: As `reading_extra` takes it, of this mixture.
        """
        chosen = range(len(self.experts)) if shares is None else sorted(shares)
        layers = frozenset(self._linear([self.experts[index] for index in chosen]))

        def read(x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
            if shares is None:
                yield from (x for _ in chosen)
                return
            none = dict.fromkeys(chosen, x[:0])
            places = None if choose is None else choose(lambda: _places(self._own_tokens(args, kwargs), x))
            own = none | (self._own_tokens(args, kwargs) if places is None else {e: x[of] for e, of in places.items()})
            every = x.new_ones(len(x), dtype=torch.bool)
            yield from (torch.cat([own[index], x[share_of(every, shares[index])]]) for index in chosen)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = self.tokens(args, kwargs)
            if x is None:
                return
            for index, rows in zip(chosen, read(x, args, kwargs), strict=True):
                self.experts[index](rows)
            _SHOWN.set(_SHOWN.get() | layers)

        def after(*_: Any) -> None:
            _SHOWN.set(_SHOWN.get() - layers)

        with (
            self.owner.register_forward_pre_hook(before, with_kwargs=True),
            self.owner.register_forward_hook(after, always_call=True),
        ):
            yield

    def _own_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Expert -> its tokens, of what the owner is called with: it runs, and what its layers read is passed over."""
        own: dict[int, list[torch.Tensor]] = {}

        def note(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            own.setdefault(index, []).append(args[0].reshape(-1, args[0].shape[-1]))

        with _passed_over(frozenset(self._linear([self.owner]))), self.noting(note):
            self.owner.forward(*args, **kwargs)
        return {index: torch.cat(rows) for index, rows in own.items()}

    @staticmethod
    def _linear(modules: Sequence[nn.Module]) -> list[nn.Linear]:
        return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]


def _called_experts(module: nn.Module) -> dict[str, CalledExperts]:
    """Name of each list of experts that are modules, and are called with their tokens -> the mixture."""
    found = {}
    for name, container in module.named_modules():
        named = ((f"{name}.{child}".lstrip("."), expert) for child, expert in container.named_children())
        experts = tuple(expert for full, expert in named if expert_of(full) == full)
        of_one_class = len({type(expert) for expert in experts}) == 1 and not isinstance(container, UnfusedExperts)
        if of_one_class and len(experts) > 1:
            plain = type(container).forward is nn.Module.forward
            owner = module.get_submodule(name.rpartition(".")[0]) if plain else container
            found[name] = CalledExperts(owner, experts)
    return found


def _places(own: Mapping[int, torch.Tensor], x: torch.Tensor) -> Places | None:
    """Places of the tokens of experts among all tokens x, (tokens, channels); None where some are not among them."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    factors = torch.randint(2**62, (x.shape[-1],), generator=torch.Generator().manual_seed(0)).to(x.device)

    def keys(rows: torch.Tensor) -> torch.Tensor:
        # Sums of integers, which wrap around, are the same in any order.
        return (rows.contiguous().view(width).long() * factors).sum(-1)

    order = (of_all := keys(x)).argsort()
    places = {}
    for expert, rows in own.items():
        found = torch.searchsorted(of_all[order], keys(rows)).clamp(max=len(x) - 1)
        places[expert] = order[found]
        if not torch.equal(x[places[expert]], rows):
            return None  # a mixture that scales them, perhaps
    return places


class _RoutedError(Exception):
    """Raised where all is known that a forward was run for."""


@dataclass
class _Routed:
    """The tokens of each expert of a mixture, those of all together, and the most channels that an expert reads."""

    own: Any
    channels: int
    called: bool
    tokens: int = 0
    alone: bool = True

    def add_own(self, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of an expert that is called with them, alone or with something else."""
        self.alone = self.alone and len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        if self.alone:
            self.own[expert] += args[0].shape[:-1].numel()


def _routed(block: nn.Module, calls: Sequence[Call]) -> dict[str, _Routed]:
    """Name of each mixture with quantized experts -> what its router chooses, in all processes.

    A block with one mixture runs up to it. Mixtures that call their experts with more than tokens are left out.
    """
    mixtures: dict[str, UnfusedExperts | CalledExperts] = {
        name: m for name, m in block.named_modules() if isinstance(m, UnfusedExperts) and _has_quantized([m])
    }
    mixtures |= {name: m for name, m in _called_experts(block).items() if _has_quantized(m.experts)}
    routed = {}
    with ExitStack() as hooks:
        for name, mixture in mixtures.items():
            experts = mixture.experts if isinstance(mixture, CalledExperts) else tuple(mixture.children())
            none, called = torch.zeros(len(experts), dtype=torch.int64), isinstance(mixture, CalledExperts)
            of = routed[name] = _Routed(none, _channels(experts), called)
            if isinstance(mixture, CalledExperts):
                _count_called(mixture, of, len(mixtures) == 1, hooks)
            else:
                _count_unfused(mixture, of, len(mixtures) == 1, hooks)
        for call in calls if mixtures else ():
            with suppress(_RoutedError):
                call.run(block)
    for of in routed.values():
        of.own, of.tokens = summed(of.own.cpu()).tolist(), int(summed(torch.tensor(of.tokens)))
        of.alone = not int(summed(torch.tensor(int(not of.alone))))
    return {name: of for name, of in routed.items() if of.alone and of.tokens}


def _count_unfused(mixture: UnfusedExperts, of: _Routed, only: bool, hooks: ExitStack) -> None:
    def before(mixture: UnfusedExperts, args: tuple[torch.Tensor, ...]) -> None:
        of_experts, tokens = mixture.tokens_of_experts(*args)
        of.own = of.own.to(of_experts.device) + of_experts
        of.tokens += tokens
        if only:
            raise _RoutedError

    hooks.enter_context(mixture.register_forward_pre_hook(before))


def _count_called(mixture: CalledExperts, of: _Routed, only: bool, hooks: ExitStack) -> None:
    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = mixture.tokens(args, kwargs)
        of.tokens += 0 if x is None else len(x)
        if only:
            raise _RoutedError

    hooks.enter_context(mixture.noting(of.add_own))
    hooks.enter_context(mixture.owner.register_forward_hook(after, with_kwargs=True))


def _has_quantized(experts: Sequence[nn.Module]) -> bool:
    return any(isinstance(layer, QuantLayer) for expert in experts for layer in expert.modules())


def _channels(experts: Sequence[nn.Module]) -> int:
    """The most that a layer of an expert reads."""
    return max(layer.in_features for one in experts for layer in one.modules() if isinstance(layer, nn.Linear))
