"""Ranges of activations: data in, statistics, qparams out.

The readers and methods that scripts import from here are taken from their homes when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.errors import did_you_mean

HOMES = {
    "quark.onnx.config.enums": ("ExtendedCalibrationMethod", "Int16Method", "LayerWiseMethod", "PowerOfTwoMethod"),
    "quark.onnx.calibration.data.readers": ("CachedDataReader", "CalibrationDataReader"),
    "quark.onnx.calibration.data.path_reader": ("PathDataReader",),
    "quark.onnx.calibration.data.random_reader": ("RandomDataReader",),
    "quark.compat.onnx_names.not_supported": (
        "create_calibrator_float_scale",
        "create_calibrator_power_of_two",
        "fake_calibration",
        "get_data_reader",
        "load_tensors_range",
        "run_calibration",
        "save_tensors_range",
    ),
}
"""Where the documented names are defined."""


def __getattr__(name: str) -> Any:
    """A documented name, from its home."""
    for home, names in HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    hint = "" if name.startswith("_") else " " + did_you_mean(name, [n for names in HOMES.values() for n in names])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
