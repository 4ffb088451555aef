"""PathDataReader: calibration data from a folder or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.base.data_files.arrays import read_npy, read_npz
from quark.base.data_files.images import WAYS
from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, ConfigError, FormatError
from quark.onnx.calibration.data.inputs import Feed, Input, check_feed, model_inputs
from quark.onnx.calibration.data.preprocessing import Preprocessing
from quark.onnx.calibration.data.preprocessing_files import PREPROCESSOR, said_by_model
from quark.onnx.calibration.data.readers import CalibrationDataReader, check_range
from quark.onnx.calibration.data.sample_batches import rebatch
from quark.onnx.calibration.data.sample_files import IMAGES, SOUND, find_samples, read_image
from quark.onnx.calibration.data.waveforms import Waveforms

__all__ = ["PathDataReader"]


class PathDataReader(CalibrationDataReader):
    """Reads samples from disk as they are asked for.

    A folder holds one file for each sample: arrays (.npy), named arrays (.npz), images or sounds (.wav); a model with
    several inputs takes .npz, or a folder for each input: `folder/<input name>/*.npy`. A single .npz or .npy file holds
    all samples along the first axis, or, where inputs differ in it, along the first that the model leaves open, as in
    the state [layers, batch, features] of a recurrent layer; a scalar is that of every sample. A missing batch axis is
    added.

    Args:
        model_input: The model that is fed.
        data_path: Folder or file.
        input_shape: Shape to give to the arrays of a model with one input, or input name -> shape.
        batch_size: Rows in a sample. None: files of a folder as they are; from a single file the batch of the model,
            or 1.
        mean: Mean of each colour, or of all, in units of 0 to 1; for images read as floats: (image / 255 - mean) / std.
        std: Standard deviation of the same.
        resize: How images get the size of the input: "stretch", "crop" or "pad"; with ":HEIGHTxWIDTH" where the model
            leaves its size open; see `Resizing.parse` for more.
        colours: Order of the colours that the model reads: "RGB" or "BGR".
        pixel_max: The value of a white pixel before mean and std: 1 or 255; None for 1.

    What is None of these five is what the model, or a file beside it, says (`preprocessing_files.py`); where nothing
    does, images have the size of the input already, and colours are RGB.

    Raises:
        CalibrationError: The path is not there, is empty or unreadable, or a sample does not fit the model.
        ConfigError: mean and std are in units of 0 to 255, do not belong together, or make no range of a network.
        FormatError: A file beside the model does not say how images are read.
    """

    def __init__(
        self,
        model_input: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
        data_path: str | os.PathLike[str],
        input_shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        batch_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        resize: str | None = None,
        colours: str | None = None,
        pixel_max: float | None = None,
    ) -> None:
        given = Preprocessing.given(mean, std, resize, colours, pixel_max)
        self._inputs, self._path = model_inputs(model_input), Path(data_path)
        shapes = input_shape or {}
        if not isinstance(shapes, Mapping):
            if len(self._inputs) != 1:
                raise ConfigError(f"input_shape: the model has the inputs {', '.join(self._inputs)}; give a dict.")
            shapes = {next(iter(self._inputs)): shapes}
        self._shapes = shapes
        self._told, self._varies = False, False
        self._model = model_input
        self._waveforms: Waveforms | None = None
        self._size = batch_size
        self._feeds: Iterator[Feed] = iter(())
        self._sources = find_samples(self._path, list(self._inputs))
        self._has_images = any(path.suffix.lower() in IMAGES for s in self._sources for path in s.values())
        flags = {"mean and std are": mean, "resize is": resize, "colours is": colours, "pixel_max is": pixel_max}
        said = next((name for name, value in flags.items() if value is not None), "")
        if said and not self._has_images:
            raise ConfigError(f"{said} for images, and {self._path} has none: arrays are taken as they are.")
        known = said_by_model(model_input, given.resizing is not None) if self._has_images else None
        self._preprocessing = given.over(known)
        self._resized_by = "resize" if known is None or given.resizing is not None else f"resize of {known.source}"
        self.rewind()

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self._path

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How images are read; None where there are none."""
        return self._preprocessing if self._has_images else None

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return [self._path, *(path for sources in self._sources for path in sources.values())]

    @property
    def _as_stored(self) -> bool:
        """True where each file of the folder is a sample, whatever it holds."""
        return self._size is None and not self._path.is_file()

    def _open_feeds(self) -> Iterator[Feed]:
        feeds = map(self._feed, self._sources)
        return feeds if self._as_stored else rebatch(feeds, self._size, self._inputs)

    def __len__(self) -> int:
        """How many samples there are; files that hold many are read for it."""
        return len(self._sources) if self._as_stored else sum(1 for _ in self._open_feeds())

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read the samples from one position up to another from now on, which it leaves out.

        Raises:
            ConfigError: There are no such positions.
        """
        check_range(start_index, end_index, len(self))
        self.rewind()
        self._feeds = islice(self._feeds, start_index, end_index)

    def rewind(self) -> None:
        """Start again at the first sample, of all."""
        self._feeds = self._open_feeds()

    def get_next(self) -> Feed | None:
        try:
            feed = next(self._feeds, None)
        except FormatError as error:
            raise CalibrationError(str(error)) from None
        if feed is None and self._told and not self._varies:
            raise CalibrationError(
                f"Each image of {self._path} is of one colour: ranges of such would be those of none in use."
            )
        if feed is not None:
            check_feed(feed, self._inputs, f"A sample of {self._path}")
        return feed

    def _feed(self, source: Mapping[str, Path]) -> Feed:
        """The arrays of one sample, the batch axis added where it is missing."""
        feed = {}
        for name, path in source.items():
            if path.suffix.lower() == ".npz":
                return {n: self._fit(n, a, path) for n, a in self._feed_of_file(path).items()}
            feed[name] = self._fit(name, self._array(path, self._inputs[name]), path)
        return feed

    def _array(self, path: Path, entry: Input) -> NumpyArray:
        """The array that a file holds for an input."""
        if path.suffix.lower() in IMAGES:
            return self._image(path, entry)
        if path.suffix.lower() != SOUND:
            return read_npy(path)
        if self._waveforms is None:
            self._waveforms = Waveforms.of(self._model)
        array, told = self._waveforms.read(path, entry)
        if told != self._waveforms:
            normalized = ", normalized" if told.normalizes else ""
            logger.info("Sounds are read at %d samples a second, %s%s.", told.rate, entry.dtype, normalized)
            self._waveforms = told
        return array

    def _feed_of_file(self, path: Path) -> Feed:
        arrays = read_npz(path)
        if len(arrays) == len(self._inputs) == 1:
            return dict(zip(self._inputs, arrays.values(), strict=True))
        if set(arrays) != set(self._inputs):
            expected = ", ".join(map(str, self._inputs.values()))
            raise CalibrationError(f"{path} holds {', '.join(sorted(arrays))}; the model expects {expected}.")
        return arrays

    def _fit(self, name: str, array: NumpyArray, path: Path) -> NumpyArray:
        if name in self._shapes:
            try:
                array = array.reshape(self._shapes[name])
            except ValueError as error:
                raise CalibrationError(f"{path}: {error}.") from None
        shape = self._inputs[name].shape
        return array[None] if shape is not None and array.ndim == len(shape) - 1 else array

    def _image(self, path: Path, entry: Input) -> NumpyArray:
        """An image in the layout and the type of an input, without batch axis."""
        shape = (entry.shape or ())[-3:]
        first = len(shape) == 3 and shape[0] in (1, 3)
        channels = shape[0] if first else shape[-1] if len(shape) == 3 else None
        if channels not in (1, 3):
            raise CalibrationError(f"{path} is an image; the input {entry} has no axis of 1 or 3 colours.")
        height, width = shape[1:] if first else shape[:2]
        pixels = read_image(path, "RGB" if channels == 3 else "L", self._fitting(entry, height, width))
        if any(isinstance(size, int) and size != got for size, got in zip((height, width), pixels.shape, strict=False)):
            raise CalibrationError(
                f"{path} has {pixels.shape[0]}x{pixels.shape[1]} pixels and the model expects {entry}: say how it was "
                f"trained to see images of other sizes by resize (--resize): {', '.join(WAYS)}."
            )
        self._varies = self._varies or pixels.min() < pixels.max()
        array = self._preprocessing.in_order(pixels[..., None] if pixels.ndim == 2 else pixels)
        if not self._told:
            self._told = True
            logger.info(self._preprocessing.told(array.shape, first, np.dtype(entry.dtype).kind != "u"))
        array = self._in_type(array, entry, path)
        return array.transpose(2, 0, 1) if first else array

    def _in_type(self, image: NumpyArray, entry: Input, path: Path) -> NumpyArray:
        """An image of 0 to 255 in the type of an input, normalized where that is floats."""
        if np.dtype(entry.dtype).kind == "u":
            return image
        if self._preprocessing.mean is None:
            raise CalibrationError(
                f"{path} holds 0 to 255 and the model expects {entry}: say how it was trained to see images by "
                f"mean and std, as in (image / 255 - mean) / std, or by {PREPROCESSOR} beside the model."
            )
        return self._preprocessing.normalised(image, str(path)).astype(entry.dtype)

    def _fitting(self, entry: Input, height: int | str | None, width: int | str | None) -> Callable[[Any], Any] | None:
        """Return what resizes an image of Pillow to an input, or None. Raises ConfigError for one of no known size."""
        if self._preprocessing.resizing is None:
            return None
        how, known = self._preprocessing.resizing, (height, width)
        if how.height is None or how.width is None:
            if not isinstance(height, int) or not isinstance(width, int):
                raise ConfigError(
                    f"resize: the input {entry} has no size of its own. Possible: {how.way}:HEIGHTxWIDTH, as in "
                    f"{how.way}:480x640."
                )
            return partial(how.apply, height=height, width=width)
        given = how.height, how.width
        if any(isinstance(size, int) and size != got for size, got in zip(known, given, strict=True)):
            raise ConfigError(f"{self._resized_by}: {how.height}x{how.width} is not the size of the input {entry}.")
        return partial(how.apply, height=how.height, width=how.width)
