"""Models that take images with the channels last, and the calibration data that are brought to that layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.onnx.calibration.data.inputs import Feed, Input, model_inputs
from quark.onnx.calibration.data.readers import CalibrationDataReader, as_reader
from quark.onnx.config.settings import Settings
from quark.onnx.passes.convert_nchw_to_nhwc import TO_NHWC, channels_first, convert_nchw_to_nhwc
from quark.onnx.passes.fix_shapes import fix_shapes


def with_channels_last(model: ir.Model, settings: Settings, reader: Any) -> tuple[Settings, Any]:
    """Convert the inputs of a model where the settings ask for that, and its data with them.

    Args:
        model: Changed: it takes NHWC images then, and has the shapes that the settings fix.
        settings: What is asked for.
        reader: Calibration samples in either layout, or None. What fits the model as it was given is moved.

    Returns:
        The settings, without what is done, and the reader; as given where nothing is asked for.

    Raises:
        ConfigError: No input has four dimensions, or a fixed shape does not fit.
    """
    passes, (fixing, converting) = settings.passes, (step.__name__ for step in (fix_shapes, convert_nchw_to_nhwc))
    if not passes.get(converting):
        return settings, reader
    shapes = passes.get(fixing)
    if isinstance(shapes, str):  # they are those of the model as it was given
        fix_shapes(model, shapes)
    known = model_inputs(model)
    moved = {value.name or "" for value in channels_first(model)}
    convert_nchw_to_nhwc(model)

    def with_moved(data: Any) -> Any:
        return None if data is None else _Moved(data, known, moved)

    done = {**passes, fixing: None, converting: False}
    return replace(settings, passes=done, metrics_data=with_moved(settings.metrics_data)), with_moved(reader)


class _Moved(CalibrationDataReader):
    """A reader whose NCHW images have their channels last."""

    def __init__(self, data: Any, inputs: Mapping[str, Input], moved: set[str]) -> None:
        self._data, self._inputs, self._moved = data, inputs, moved
        self._reader: Any = None

    def get_next(self) -> Feed | None:
        # Made when it is read, as a reader of samples is.
        self._reader = as_reader(self._data, self._inputs) if self._reader is None else self._reader
        feed = self._reader.get_next()
        if not isinstance(feed, dict):
            return feed
        return {name: self._placed(name, value) for name, value in feed.items()}

    def _placed(self, name: str, value: Any) -> Any:
        array = np.asarray(value)
        return array.transpose(TO_NHWC) if name in self._moved and self._inputs[name].fits(array) else value
