"""Telemetry of libraries is switched off before they are imported: afterwards the first events are written.

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
    """Return True where ONNX Runtime writes nothing of a model; where it was imported first, its events end now.

    What it has of the time before names no model that it did not load then. False where the user's variable asks for
    telemetry.
    """
    if _said is None and not _was_early:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
    return _said not in ("", "0")
