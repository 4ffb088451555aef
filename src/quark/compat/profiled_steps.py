"""Steps of jobs become steps of the profile, where the environment asks for one by QUARK_PROFILING=1."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from quark.base.steps import WATCHERS


def asked() -> bool:
    """Tell if the environment asks for a profile."""
    return os.environ.get("QUARK_PROFILING", "0") == "1"


def _profiled(name: str) -> AbstractContextManager[object]:
    if not asked():
        return nullcontext()
    profiled: AbstractContextManager[object] = import_module("quark.compat.profiler").GlobalProfiler().scope(name)
    return profiled


def install() -> None:
    """Watch the steps of jobs."""
    if _profiled not in WATCHERS:
        WATCHERS.append(_profiled)
