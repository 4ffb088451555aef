"""Tests this checkout, on one thread, with hypothesis repeatable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The checkout that the tests belong to, even where another one is installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import quark  # noqa: F401 - before onnxruntime, whose telemetry it switches off

settings.register_profile("quark", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("quark")
