"""Documented names whose features are not part of this version: using one says so."""

from __future__ import annotations

from typing import Any, NoReturn

from quark.errors import NotSupportedError

__all__ = [
    "create_calibrator_float_scale",
    "create_calibrator_power_of_two",
    "fake_calibration",
    "get_data_reader",
    "load_tensors_range",
    "run_calibration",
    "save_tensors_range",
]


def _later(name: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotSupportedError(f"{name} is not part of this version; {instead}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not in this version; {instead}."
    return refuse


create_calibrator_power_of_two = _later(
    "create_calibrator_power_of_two",
    "ModelQuantizer calibrates, and option Statistics keeps what it saw of each tensor",
)
create_calibrator_float_scale = _later(
    "create_calibrator_float_scale", "ModelQuantizer calibrates, and option Statistics keeps what it saw of each tensor"
)
fake_calibration = _later("fake_calibration", "option UseRandomData calibrates without samples")
get_data_reader = _later("get_data_reader", "ModelQuantizer takes a reader, or calibration_data_path, a folder of .npy")
run_calibration = _later("run_calibration", "ModelQuantizer calibrates, and option Statistics keeps what it saw")
load_tensors_range = _later(
    "load_tensors_range", "extra option SaveAndRestore names a file of ranges, which is read where it is there"
)
save_tensors_range = _later(
    "save_tensors_range", "extra option SaveAndRestore names a file, which ranges are written to"
)
