"""Telemetry of libraries is switched off before they are imported: afterwards it is too late.

ONNX Runtime for Linux (1.31) opens a database of events under ~/.cache when it is imported, error texts with names of
nodes among them, and sends them after some seconds.
"""

from __future__ import annotations

import os
import sys

_SWITCHES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")
"""Environment variables. What a user has set stays."""

_was_early = "onnxruntime" not in sys.modules
"""True where ONNX Runtime was imported before this module, as the first one of quark."""
_said = os.environ.get(_SWITCHES[0])


def switch_off() -> None:
    """Set the variables that are not set. Processes that are started later have them, too."""
    for name in _SWITCHES:
        os.environ.setdefault(name, "1")


def onnxruntime_is_silent() -> bool:
    """Return True where ONNX Runtime was imported with its telemetry off."""
    return _said not in (None, "", "0") or (_said is None and _was_early)
