"""A kernel is checked before it is trusted.

It was written on one machine and runs on many, under compilers that change. What it computes first on a kind of device,
each time it is compiled anew, is compared with the formulas, and read: the one wait that a kernel costs. Where it
fails, or cannot be compiled, that device takes the plain steps from then on, and one warning says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from quark.base.log import logger
from quark.base.memory_and_disk import is_out_of_memory
from quark.core.array import Array, is_torch, namespace

Key = tuple[object, ...]
"""The properties that a kernel is compiled for."""


class Trust:
    """The results of tests of the kernels of one family.

    Args:
        purpose: What they do, as in "The kernel to ... is not used".
        otherwise: What is done in their place; a sentence.

    Attributes:
        passed: (device, what the kernel was compiled for) whose first result was right.
        refused: Devices on which one was not.
    """

    def __init__(self, purpose: str, otherwise: str) -> None:
        self.purpose, self.otherwise = purpose, otherwise
        self.passed: set[tuple[str, Key]] = set()
        self.refused: set[str] = set()

    def run(
        self,
        device: str,
        key: Key,
        kernel: Callable[[], None],
        plain: Callable[[], None],
        prepare: Callable[[], tuple[Callable[[], Array], Callable[[], None]]],
    ) -> None:
        """Run a kernel, if its device is not refused; the first time, check it.

        Args:
            device: See `device_of`.
            key: What the kernel is compiled for.
            kernel: Writes its result.
            plain: Writes the same in plain steps.
            prepare: Called before a kernel that is to be checked: what says whether its result is right, an array of
                one bool, and what undoes it.
        """
        if device in self.refused:
            plain()
            return
        if (device, key) in self.passed:
            kernel()
            return
        torch = sys.modules.get("torch")
        if torch is not None and torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing():
            plain()  # nothing can be read while a graph of launches is recorded
            return
        try:
            is_right, undo = prepare()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            plain()  # there is no room to check it: another time
            return
        why = "what it computes is not what the formulas say"
        try:
            kernel()
            right = bool(is_right())
        except Exception as error:  # noqa: BLE001 - a compiler or a driver fails in ways of its own
            if is_out_of_memory(error):
                undo()
                plain()  # which is no fault of the kernel: the next time it is checked again
                return
            right, why = False, f"it does not run ({type(error).__name__})"
            logger.debug("The kernel to %s on %s: %s", self.purpose, device, error)
        if right:
            self.passed.add((device, key))
            return
        self.refused.add(device)
        logger.warning("The kernel to %s is not used on %s: %s. %s", self.purpose, device, why, self.otherwise)
        undo()
        plain()


def device_of(x: Array) -> str | None:
    """Return the name of the GPU that an array is on, as its maker calls it; None where no kernel runs."""
    if not is_torch(x) or x.device.type != "cuda":
        return None
    properties = namespace(x).cuda.get_device_properties(x.device)
    return f"{properties.name} ({properties.major}.{properties.minor})"


@cache
def kernel_module(name: str) -> Any:
    """A module of kernels, or None where triton is not there, or not one that it works with.

    Not imported above: triton takes a second, and comes with PyTorch for GPUs alone.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        logger.debug("%s is not used: %s", name, error)
        return None
