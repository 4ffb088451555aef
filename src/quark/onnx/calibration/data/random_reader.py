"""RandomDataReader: one sample of noise, to try a flow without data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.errors import ConfigError, did_you_mean
from quark.onnx.calibration.data.inputs import Feed, Input, model_inputs
from quark.onnx.calibration.data.readers import CalibrationDataReader

__all__ = ["RandomDataReader"]


SEED = 42


class RandomDataReader(CalibrationDataReader):
    """One sample of seeded noise for each input; unknown dimensions count as 1.

    Args:
        model_input: The model whose inputs are filled.
        input_shape: Input name -> shape, for inputs with unknown dimensions.
        input_data_range: Input name -> (low, high): uniform between them. Without: floats are normal, integers 0 or 1.

    Raises:
        ConfigError: A name is no input, a shape does not fit the model, or a range is none.
    """

    def __init__(
        self,
        model_input: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        shapes, ranges, inputs = input_shape or {}, input_data_range or {}, model_inputs(model_input)
        for name in (*shapes, *ranges):
            if name not in inputs:
                raise ConfigError(f"Random data: {name!r} is no input of the model. {did_you_mean(name, inputs)}")
        generator = np.random.default_rng(SEED)
        self._feed: Feed | None = {
            name: _noise(entry, shapes.get(name), ranges.get(name), generator) for name, entry in inputs.items()
        }

    def __len__(self) -> int:
        """One."""
        return 1

    def get_next(self) -> Feed | None:
        """The sample, once."""
        feed, self._feed = self._feed, None
        return feed


def _noise(
    entry: Input, shape: Sequence[int] | None, bounds: Sequence[float] | None, generator: np.random.Generator
) -> NumpyArray:
    if shape is None:
        if entry.shape is None:
            raise ConfigError(f"The input {entry.name} has no shape: give one in RandomDataReaderInputShape.")
        shape = [size if isinstance(size, int) else 1 for size in entry.shape]
    dtype = np.dtype(entry.dtype)
    floating = dtype.kind not in "iub"
    if bounds is None:
        array = generator.standard_normal(shape) if floating else generator.integers(0, 2, shape)
    elif len(bounds) != 2 or not bounds[0] <= bounds[1]:
        raise ConfigError(f"The random data range of {entry.name} is {bounds!r}; possible: [low, high].")
    elif floating:
        array = generator.uniform(bounds[0], bounds[1], shape)
    else:
        array = generator.integers(int(bounds[0]), int(bounds[1]) + 1, shape)
    if not entry.fits(array.astype(dtype)):
        raise ConfigError(f"Random data of shape {list(shape)} does not fit the input {entry}.")
    return np.asarray(array.astype(dtype))
