"""Tokens of other experts by which those of a mixture are calibrated that the router chose seldom, or never.

    lent = LENT (channels - own)     tokens of others, evenly taken, to an expert with fewer of its own than channels,
                                     the most that a layer of it reads; all of the others, if they are fewer

An expert reads them behind its own, in both of its phases, so its down projection sees what the expert itself makes of
them, which no other expert tells. Whatever is found of its inputs counts its own tokens with a share of
own / (own + lent). With as many tokens as channels, the second moments can be those of a full space: it is lent none.

With `all_experts`, each expert reads all tokens. Either way what a mixture returns is what it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.torch.calibration.distributed import summed
from quark.torch.calibration.experts import expert_of
from quark.torch.layers import QuantLayer
from quark.torch.model.blocks import Call
from quark.torch.model.passes import UnfusedExperts

LENT = 4
"""Tokens of others for each one that an expert lacks. Measured (a mixture of 3 M parameters, GPTQ int4, 1024 tokens for
32 experts of 128 channels, three of them masked): of what rounding to nearest loses on held-out tokens, experts without
tokens lose 0.33, 0.29, 0.27 with 2, 4, 8 for each channel; those with few 0.36 with none, three of them more than
nearest, and 0.26, 0.27, 0.32 with 2, 4 for each one lacking, and all there are."""

Lent = Mapping[str, Mapping[int, float]]
"""Name of a mixture -> expert -> the share of the tokens of others that it is lent."""


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

    def lent(self, module: nn.Module, calls: Sequence[Call]) -> Lent:
        """What the experts of a block are lent, by what its router chooses for some calls."""
        quantized = {name: m for name, m in module.named_modules() if isinstance(m, UnfusedExperts) and _quantized(m)}
        found = {}
        for name, (own, tokens) in ({} if self.all_experts else _routed(module, quantized, calls)).items():
            channels = _channels(quantized[name])
            found[name] = {
                e: min(1.0, LENT * (channels - n) / max(1, tokens - n)) for e, n in enumerate(own) if n < channels
            }
            self.experts += len(own)
            self.idle += own.count(0)
            self.few += len(found[name]) - own.count(0)
        return {name: shares for name, shares in found.items() if shares}

    def say(self) -> None:
        """Say in a line what came of it, where some experts had too few tokens."""
        parts = []
        if self.few + self.idle:
            parts.append(
                f"of {self.experts}, calibration reached {self.few} with too few tokens and {self.idle} with none, "
                "which are lent tokens of others"
            )
        if self.left:
            parts.append(f"{self.left} that no token reached are rounded to nearest")
        if self.ranges:
            parts.append(f"{len(self.ranges)} that none reached have the static ranges of the others of their mixture")
        if parts:
            advice = ", or calibrate_all_experts," if (self.left or self.ranges) and not self.all_experts else ""
            logger.warning("Experts: %s. More or other data%s may be better.", "; ".join(parts), advice)


@contextmanager
def lending(module: nn.Module, lent: Lent) -> Iterator[None]:
    """Within: the experts of a block read what they are lent."""
    mixtures = {name: cast(UnfusedExperts, module.get_submodule(name)) for name in lent}
    for name, mixture in mixtures.items():
        mixture.lent = lent[name]
    try:
        yield
    finally:
        for mixture in mixtures.values():
            del mixture.lent


@contextmanager
def all_tokens_to_all_experts(module: nn.Module) -> Iterator[None]:
    """Within: each expert reads all tokens.

    Experts that are modules of their own, called with their tokens alone, are called with all before that; while their
    mixture then calls them, their layers are marked as `is_shown`.
    """
    mixtures = [m for m in module.modules() if isinstance(m, UnfusedExperts)]
    try:
        with ExitStack() as hooks:
            for mixture in mixtures:
                mixture.all_tokens = True
            for owner, experts in called_experts(module):
                before, after = _showing(experts)
                hooks.enter_context(owner.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(owner.register_forward_hook(after, always_call=True))
            yield
    finally:
        for mixture in mixtures:
            del mixture.all_tokens


def is_shown(layer: nn.Module) -> bool:
    """Whether a layer is called by a mixture that has shown it all tokens before."""
    return bool(layer.__dict__.get("shown"))


def called_experts(module: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Mixtures whose experts are modules that are called with their tokens: (what calls them, the experts)."""
    found: list[tuple[nn.Module, list[nn.Module]]] = []
    for name, container in module.named_modules():
        named = ((f"{name}.{child}".lstrip("."), expert) for child, expert in container.named_children())
        experts = [expert for full, expert in named if expert_of(full) == full]
        alike = len({type(expert) for expert in experts}) == 1 and not isinstance(container, UnfusedExperts)
        if alike and len(experts) > 1:
            plain = type(container).forward is nn.Module.forward
            found.append((module.get_submodule(name.rpartition(".")[0]) if plain else container, experts))
    return found


def _showing(experts: Sequence[nn.Module]) -> tuple[Callable[..., None], Callable[..., None]]:
    """What is done before and after a mixture runs."""
    linear = [layer for expert in experts for layer in expert.modules() if isinstance(layer, nn.Linear)]

    def before(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point())
        x = next(tensors, None)
        if x is None or not linear or x.shape[-1] != linear[0].in_features:
            return
        for expert in experts:
            expert(x.reshape(-1, x.shape[-1]))
        for layer in linear:
            layer.__dict__["shown"] = True

    def after(*_: Any) -> None:
        for layer in linear:
            layer.__dict__.pop("shown", None)

    return before, after


class _RoutedError(Exception):
    """Raised where all is known that a forward was run for."""


def _routed(
    block: nn.Module, mixtures: Mapping[str, UnfusedExperts], calls: Sequence[Call]
) -> dict[str, tuple[list[int], int]]:
    """Name of each mixture -> the tokens of each expert, and of all together, in all processes.

    A block with one mixture runs up to it.
    """
    own = {name: torch.zeros(mixture.count, dtype=torch.int64) for name, mixture in mixtures.items()}
    total = dict.fromkeys(mixtures, 0)

    def note(name: str) -> Callable[..., None]:
        def before(mixture: UnfusedExperts, args: tuple[torch.Tensor, ...]) -> None:
            of_experts, tokens = mixture.tokens_of_experts(*args)
            own[name] = own[name].to(of_experts.device) + of_experts
            total[name] += tokens
            if len(mixtures) == 1:
                raise _RoutedError

        return before

    with ExitStack() as hooks:
        for name, mixture in mixtures.items():
            hooks.enter_context(mixture.register_forward_pre_hook(note(name)))
        for call in calls if mixtures else ():
            with suppress(_RoutedError):
                call.run(block)
    return {n: (summed(own[n].cpu()).tolist(), int(summed(torch.tensor(total[n])))) for n in mixtures}


def _quantized(mixture: UnfusedExperts) -> bool:
    return any(isinstance(layer, QuantLayer) for layer in mixture.modules())


def _channels(mixture: UnfusedExperts) -> int:
    """The most that a layer of an expert reads."""
    return max(layer.in_features for layer in mixture.modules() if isinstance(layer, nn.Linear))
