"""Static tensors that no calibration batch reaches, told before the first real forward.

A copy of the model without values takes the way that each batch takes: on the meta device, or where that does not do
with torch's fake tensors, which have shapes and types, and compute nothing. Quantizers that are called are noted. The
way of most models follows from what a batch holds (a text model beside a vision tower, a decoder without what an
encoder gives); where it follows from values, the copy stops, and it is the forward with values that says what was not
reached. What tokens are routed to is never asked for here.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from quark.errors import CalibrationError
from quark.torch.calibration.experts import expert_of
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize, Mode
from quark.torch.model.batches import forward_batch
from quark.torch.model.passes import UnfusedExperts
from quark.torch.model.passes.unfuse_experts import is_fused

SHOWN = 4
"""How many names, patterns or arguments a message lists."""
BESIDE = frozenset(
    ("attention_mask", "cache", "cache_position", "decoder_attention_mask", "decoder_inputs_embeds",
     "decoder_position_ids", "head_mask", "inputs_embeds", "labels", "logits_to_keep", "past_key_values",
     "position_ids", "token_type_ids")
)  # fmt: skip
"""Arguments that are given beside others, or in their place: no layer waits for one of them."""


def check_reached(model: nn.Module, layers: Mapping[str, QuantLayer], data: Iterable[Any] | None) -> None:
    """Raise CalibrationError where calibration batches never reach layers with static inputs or outputs; names them.

    Costs a forward without values of one batch, where that reaches all; else of each batch of another form.

    Args:
        model: A model whose layers are replaced, with or without its weights; not changed.
        layers: Its quantized layers, by their full names.
        data: Batches; what can be read once only is left alone.
    """
    waiting = {
        name: [q for role in ("input", "output") if isinstance(q := layer.quantizer(role), FakeQuantize)]
        for name, layer in layers.items()
        if expert_of(name) is None
    }
    waiting = {name: own for name, quantizers in waiting.items() if (own := [q for q in quantizers if q.needs_range])}
    if not waiting or not isinstance(data, Sized) or _has_own_code(model):
        return
    with _no_tracebacks(), torch.random.fork_rng(devices=[]):  # a shuffled loader draws when it is begun
        found = _never_called(model, waiting, data, nullcontext, "meta")
        found = found or _never_called(model, waiting, data, _fake, "cpu")
    if found is not None and found[0]:
        raise CalibrationError(_message(model, layers, *found))


def _has_own_code(model: nn.Module) -> bool:
    """Return True where something of others around the forward of a module would run with the copy."""
    hooks = (hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    return any("forward" in m.__dict__ for m in model.modules()) or any(
        not (getattr(hook, "__module__", None) or "").startswith("quark.") for hook in hooks
    )


def _fake() -> AbstractContextManager[Any]:
    """Within: tensors are fake. Masks are taken as they are in an export, where the meta device asks for values."""
    # A second of imports, which is spent where the meta device does not do.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Within: torch does not log a page for an operator that fails on fake tensors; what it raises is said later."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _never_called(
    model: nn.Module,
    waiting: Mapping[str, list[FakeQuantize]],
    data: Iterable[Any],
    within: Callable[[], AbstractContextManager[Any]],
    device: str,
) -> tuple[list[str], set[str]] | None:
    """The names of which a quantizer is never called, and the arguments that batches hold; None where it is unknown.

    Args:
        model: A model whose layers are replaced; not changed.
        waiting: Name of a layer -> its quantizers that wait for a range.
        data: Batches.
        within: The context in which tensors of that device have no values.
        device: Where the copy is.
    """
    called: set[int] = set()
    seen: set[Any] = set()
    given: set[str] = set()
    missing = [*waiting]
    mode = within()
    without_values: nn.Module | None = None
    try:
        for batch in data:
            # What its way through the model follows from: structure, and shapes and types of tensors.
            leaves, structure = tree_flatten(_as_dict(batch))
            form = str(structure), *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
            if form in seen:
                continue
            seen.add(form)
            given |= {str(key) for key in batch.keys()} if hasattr(batch, "keys") else set()  # noqa: SIM118
            with ExitStack() as stack, suppress(Exception):
                stack.enter_context(torch.no_grad())
                stack.enter_context(mode)
                without_values = without_values or _without_values(model, waiting, called, device)
                forward_batch(without_values, _empty(_as_dict(batch), device), torch.device(device))
                missing = [name for name in missing if any(id(q) not in called for q in waiting[name])]
                if missing:
                    continue
            return ([], given) if not missing else None
    finally:
        _forget_results(model)
    return (missing, given) if seen else None


def _as_dict(batch: Any) -> Any:
    """A batch as a dict where it is a mapping of some other class."""
    return {key: batch[key] for key in batch.keys()} if hasattr(batch, "keys") else batch  # noqa: SIM118


def _empty(value: Any, device: str) -> Any:
    """Tensors of the same form, without values where such are made."""
    return tree_map_only(
        torch.Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), value
    )


def _without_values(
    model: nn.Module, waiting: Mapping[str, list[FakeQuantize]], called: set[int], device: str
) -> nn.Module:
    """A copy whose quantizers do nothing; those that wait note it when they are called."""
    mixtures = [module for module in model.modules() if isinstance(module, UnfusedExperts) or is_fused(module)]
    inside = {id(part) for mixture in mixtures for part in mixture.modules()}
    memo: dict[int, Any] = {id(mixture): _Mixture() for mixture in mixtures}  # of which nothing is copied
    for module in model.modules():
        if id(module) not in inside:
            _add_empty(module, device, memo)
    copied = copy.deepcopy(model, memo).eval()
    for module in copied.modules():
        if isinstance(module, FakeQuantize):
            module.mode = Mode.off
    for own in waiting.values():
        for quantizer in own:
            memo[id(quantizer)].forward = _noting(called, id(quantizer))
    return copied


def _add_empty(module: nn.Module, device: str, memo: dict[int, Any]) -> None:
    """Add what stands for the tensors of a module, once for each."""
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None and id(x) not in memo:
            empty = _empty(x, device)
            memo[id(x)] = nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty


class _Mixture(nn.Module):
    """Stands where experts are: which of them reads what follows from values."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Something of the shape of its input."""
        return torch.zeros_like(hidden)


def _noting(called: set[int], key: int) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, extras: Any = None) -> torch.Tensor:
        called.add(key)
        return x

    return forward


def _forget_results(model: nn.Module) -> None:
    """Empty the caches of functions beside the classes of a model: what they hold now may have no values."""
    for name in {type(module).__module__ for module in model.modules()}:
        for function in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if getattr(function, "__module__", None) == name:
                for each in (function, *_enclosed(function)):
                    if callable(getattr(each, "cache_clear", None)):
                        each.cache_clear()


def _enclosed(function: Any) -> Iterator[Any]:
    """Yield the objects that the closure of a function holds, as the one that a decorator wraps."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _message(model: nn.Module, layers: Collection[str], missing: list[str], given: set[str]) -> str:
    """Return the message about layers that are not reached, and what there is to do."""
    patterns = _patterns(missing, layers)
    parameters = inspect.signature(model.forward).parameters.values() if given else ()
    tensors = [each.name for each in parameters if "Tensor" in str(each.annotation)]
    others = [name for name in tensors if name not in given | BESIDE]
    more = f"batches that hold more of what the model takes ({_some(others)}), " if others else ""
    return (
        f"{_some(missing)} ({len(missing)} of {len(layers)} layers) are never reached by the calibration data, and "
        f"their static scales need values. Possible: {more}to leave them in float (--exclude "
        f"{_some([repr(pattern) for pattern in patterns], ' ')}), or a dynamic or weight-only scheme."
    )


def _patterns(missing: Collection[str], layers: Collection[str]) -> list[str]:
    """Patterns of all missing layers and no other: of the outermost modules of which none is reached, in any block."""
    others = [name for name in layers if name not in {*missing}]
    found: dict[str, None] = {}
    for name in missing:
        if not any(fnmatchcase(name, pattern) for pattern in found):
            parts = ["*" if part.isdigit() else part for part in name.split(".")]
            tried = [".".join([*parts[:depth], "*"]) for depth in range(1, len(parts))] + [".".join(parts)]
            free = (pattern for pattern in tried if not any(fnmatchcase(other, pattern) for other in others))
            found[next(free, name)] = None
    return [*found]


def _some(names: list[str], between: str = ", ") -> str:
    """The first of some names."""
    return between.join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
