"""Values that a device holds and Python wants: asked on the way, read together.

    with gathered():                                  # one block of a model, or all of its weights
        check(all_finite(low, high), NonFiniteError("..."))
        later(errors, report)
        exact, = read(is_exact)                       # all that was asked before comes with it
        ...
                                                      # what is left is read here; the first check that failed raises

To read a value of a device, Python waits until everything before it is computed, and what comes after has not begun.
So a check outside of a block waits, one inside is kept with the names of what it is about. What lies on the host, or is
numpy's, is read at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from quark.core.array import Array, namespace, on_cpu, row_chunks
from quark.errors import QuarkError

_Failure = QuarkError | Callable[[], QuarkError | None]
"""An error, or what makes it; None where a closer look finds nothing wrong."""


_FINITE = 1 << 24
"""Bytes of an array that a CPU looks at at once for what is not finite."""


@dataclass(frozen=True)
class _Asked:
    values: Array
    use: Callable[[list[float]], None]


@dataclass
class _Gathered:
    """The offenders of one `gathered`; the first `outer` names are put before an error by what it lies in."""

    outer: int
    asked: list[_Asked]


_gathered: ContextVar[_Gathered | None] = ContextVar("gathered", default=None)
_names: ContextVar[tuple[str, ...]] = ContextVar("names", default=())


def check(holds: Array, failure: _Failure) -> None:
    """Raise unless `holds`, now or when the device is read next.

    Args:
        holds: One truth value, of numpy or torch.
        failure: The error. What makes one may read the device: it is called only where `holds` is false.
    """
    here = _gathered.get()
    names = _names.get()[here.outer :] if here is not None and not on_cpu(holds) else ()

    def require(values: list[float]) -> None:
        error = None if values[0] else failure if isinstance(failure, QuarkError) else failure()
        if error is not None:
            for name in reversed(names):
                error = named(name, error)
            raise error from None

    later(holds, require)


def later(values: Array, use: Callable[[list[float]], None]) -> None:
    """Give values to `use`, now or when the device is read next."""
    here = _gathered.get()
    if here is not None and not on_cpu(values):
        here.asked.append(_Asked(values, use))
    else:
        use(_listed(values))


def read(values: Array) -> list[float]:
    """The values of an array, in a row; what is kept is read and used with them, before.

    Raises:
        QuarkError: A check that was kept fails.
    """
    here = _gathered.get()
    if here is None or on_cpu(values):
        return _listed(values)
    asked, here.asked[:] = [*here.asked], []
    return _read_asked(asked, values)


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
        _read_asked(asked)  # what failed first is the cause
        raise
    except BaseException:
        _gathered.reset(token)
        raise
    _gathered.reset(token)
    _read_asked(asked)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Within: the message of a quark error begins with the tensor or layers that it is about."""
    token = _names.set((*_names.get(), name))
    try:
        yield
    except QuarkError as error:
        raise named(name, error) from None
    finally:
        _names.reset(token)


def named(name: str, error: QuarkError) -> QuarkError:
    """The error with a name before it, unless it begins with it."""
    return error if str(error).startswith(f"{name}: ") else type(error)(f"{name}: {error}")


def all_finite(*arrays: Array) -> Array:
    """Return True where arrays have neither NaN nor Inf: one truth value."""
    first, *others = arrays
    xp = namespace(first)
    if on_cpu(first):
        # Some rows at a time: what isfinite makes on the way is larger than the array.
        return xp.asarray(all(bool(xp.isfinite(part).all()) for x in arrays for part in _row_parts(x)))
    # x - x is 0, or NaN for both; isfinite itself is four launches. Of several shapes each is looked at alone.
    if any(x.shape != first.shape for x in others):
        return xp.stack([all_finite(x) for x in arrays]).all()
    rest = first - first
    for x in others:
        rest = rest + (x - x)
    return (rest == 0).all()


def _row_parts(x: Array) -> Iterator[Array]:
    """An array, cut along its first axis."""
    if x.ndim == 0:
        yield x
        return
    for rows in row_chunks(x.shape[0], x.itemsize * math.prod(x.shape[1:]), _FINITE):
        yield x[rows]


def _read_asked(asked: list[_Asked], values: Array | None = None) -> list[float]:
    """Wait for the devices once, and use what was asked in its order; the values are returned."""
    wanted = [one.values for one in asked] if values is None else [*(one.values for one in asked), values]
    if not wanted:
        return []
    torch, device = sys.modules["torch"], wanted[-1].device
    numbers: list[float] = torch.cat([x.detach().to(device).reshape(-1).double() for x in wanted]).tolist()
    start = 0
    for one in asked:
        count = math.prod(one.values.shape)
        one.use(numbers[start : start + count])
        start += count
    return numbers[start:]


def _listed(values: Array) -> list[float]:
    return [float(value) for value in values.reshape(-1).tolist()]
