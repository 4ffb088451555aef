"""Checks of values that a device holds: asked on the way, read together.

    with gathered():                                  # one block of a model, or all of its weights
        check(all_finite(low, high), NonFiniteError("..."))
        ...
                                                      # here the device is waited for once; the first that failed raises

To read a value of a device, Python waits until everything before it is computed, and what comes after has not begun.
So a check outside of a block waits, one inside is kept with the names of what it is about. What lies on the host, or is
numpy's, is read at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from quark.core.array import Array, is_torch, namespace
from quark.errors import QuarkError

Failure = QuarkError | Callable[[], QuarkError | None]
"""An error, or what makes it; None where a closer look finds nothing wrong."""


@dataclass(frozen=True)
class _Asked:
    holds: Array
    failure: Failure
    names: tuple[str, ...]


@dataclass
class _Gathered:
    """The checks of one `gathered`; the first `outer` names are put before an error by what it lies in."""

    outer: int
    asked: list[_Asked]


_gathered: ContextVar[_Gathered | None] = ContextVar("gathered", default=None)
_names: ContextVar[tuple[str, ...]] = ContextVar("names", default=())


def check(holds: Array, failure: Failure) -> None:
    """Raise unless `holds`, now or at the end of the `gathered` that this is in.

    Args:
        holds: One truth value, of numpy or torch.
        failure: The error. What makes one may read the device: it is called only where `holds` is false.
    """
    here = _gathered.get()
    if here is not None and is_torch(holds) and holds.device.type != "cpu":
        here.asked.append(_Asked(holds, failure, _names.get()[here.outer :]))
    elif not bool(holds):
        _fail(failure, ())


@contextmanager
def gathered() -> Iterator[None]:
    """Within: checks of a device are kept; they are read at the end, or when an error may follow from one of them.

    Inside of another `gathered` it is that one.
    """
    if _gathered.get() is not None:
        yield
        return
    asked: list[_Asked] = []
    token = _gathered.set(_Gathered(len(_names.get()), asked))
    try:
        yield
    except QuarkError:
        _gathered.reset(token)
        _read(asked)  # what failed first is the cause
        raise
    except BaseException:
        _gathered.reset(token)
        raise
    _gathered.reset(token)
    _read(asked)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Within: the message of a quark error begins with the tensor or layers that it is about."""
    token = _names.set((*_names.get(), name))
    try:
        yield
    except QuarkError as error:
        raise type(error)(f"{name}: {error}") from None
    finally:
        _names.reset(token)


def all_finite(*arrays: Array) -> Array:
    """Whether arrays hold neither NaN nor Inf: one truth value."""
    first, *others = arrays
    xp = namespace(first)
    if not is_torch(first) or first.device.type == "cpu":
        return xp.asarray(all(bool(xp.isfinite(x).all()) for x in arrays))
    # x - x is 0, or NaN for both; isfinite itself is four launches. Of several shapes each is looked at alone.
    if any(x.shape != first.shape for x in others):
        return xp.stack([all_finite(x) for x in arrays]).all()
    rest = first - first
    for x in others:
        rest = rest + (x - x)
    return (rest == 0).all()


def _read(asked: list[_Asked]) -> None:
    """Wait for the devices, and raise for the first check that failed."""
    if not asked:
        return
    torch = sys.modules["torch"]
    device = asked[0].holds.device
    held = torch.stack([one.holds.to(device).reshape(()) for one in asked]).tolist()
    for one, holds in zip(asked, held, strict=True):
        if not holds:
            _fail(one.failure, one.names)


def _fail(failure: Failure, names: tuple[str, ...]) -> None:
    error = failure if isinstance(failure, QuarkError) else failure()
    if error is not None:
        raise type(error)(": ".join([*names, str(error)])) from None
