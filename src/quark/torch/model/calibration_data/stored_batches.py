"""Batches of a model in `.npz` files: its arguments by name, each an array, so that they are read one at a time.

What is no array of its own (a number, a list of sizes, arrays inside a dict) stands in `LAYOUT`, one more entry, as
JSON: null, true, numbers, texts and lists as they are, and

    {"array": name}                       an entry of the file
    {"array": name, "dtype": "bfloat16"}  the same, of a type that NumPy lacks: it is stored as float32
    {"tuple": [...]}, {"dict": {...}}     what they say
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import nn

from quark.base.data_files.arrays import read_npz
from quark.base.json_objects import plain_json
from quark.errors import CalibrationError, FormatError, StructureError, did_you_mean, one_line
from quark.torch.diffusion.component import TIMESTEPS
from quark.torch.model.calibration_data.model_arguments import positional_parameters

LAYOUT = "batch_layout"
"""The entry that says where the arrays of a batch belong."""


def write_batch(file: Path, batch: Mapping[str, Any]) -> None:
    """Write one batch. Raises StructureError for a value that is neither an array nor made of numbers and texts."""
    arrays: dict[str, Any] = {}
    layout = {name: _taken_apart(name, value, arrays) for name, value in batch.items()}
    plain = all(value == {"array": name} for name, value in layout.items())
    if not plain:
        arrays[LAYOUT] = np.array(json.dumps(layout))
    with file.open("wb") as opened:
        np.savez(opened, **arrays)


def _taken_apart(name: str, value: Any, arrays: dict[str, Any]) -> Any:
    """A value as JSON; the arrays in it go to `arrays`, by their places."""
    if isinstance(value, torch.Tensor):
        value, kind = value.detach().cpu(), str(value.dtype).removeprefix("torch.")
        lacking = value.dtype.is_floating_point and kind not in ("float16", "float32", "float64")
        arrays[name] = (value.float() if lacking else value).numpy()
        return {"array": name, "dtype": kind} if lacking else {"array": name}
    if isinstance(value, (np.ndarray, np.generic)):
        arrays[name] = value
        return {"array": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _taken_apart(f"{name}.{key}", item, arrays) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        items = [_taken_apart(f"{name}.{place}", item, arrays) for place, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise StructureError(f"{name} is a {type(value).__name__}: a file of batches holds arrays, numbers and texts.")


def read_batch(file: Path) -> dict[str, Any]:
    """The arguments in a file, arrays as tensors. Raises CalibrationError for a file that cannot be read."""
    try:
        arrays = read_npz(file)
        layout = plain_json(str(arrays.pop(LAYOUT))) if LAYOUT in arrays else {name: {"array": name} for name in arrays}
        return {name: _put_together(value, arrays) for name, value in layout.items()}
    except FormatError as error:
        raise CalibrationError(f"{file} cannot be read as a batch: {one_line(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(
            f"{file} cannot be read as a batch: {type(error).__name__}: {one_line(error)}."
        ) from None


def _put_together(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_put_together(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        tensor = _tensor(arrays[value["array"]])
        return tensor.to(_stored_dtype(value["dtype"])) if "dtype" in value else tensor
    if "tuple" in value:
        return tuple(_put_together(item, arrays) for item in value["tuple"])
    return {key: _put_together(item, arrays) for key, item in value["dict"].items()}


def _tensor(array: Any) -> torch.Tensor:
    """An array as a tensor; unsigned integers of several bytes, of which torch computes little, as int64."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind == "u" and array.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{array.max()} is more than int64 holds")
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def _stored_dtype(name: Any) -> torch.dtype:
    """The type of floats of a name in a layout. Raises ValueError: a name of torch may be that of anything."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name!r:.80} is no type of floats; possible: bfloat16, float8_e4m3fn and their like")
    return found


class StoredBatches(Sequence[dict[str, Any]]):
    """Batches that lie on the disk: each is read when it is asked for, and none is kept.

    Args:
        files: One for each batch.
        dtype: Of what the model computes with; see `stored_batches`.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype | None = None) -> None:
        self.files, self.dtype = tuple(files), dtype

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> StoredBatches: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return StoredBatches(self.files[index], self.dtype)
        return _in_dtype(read_batch(self.files[index]), self.dtype)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def _in_dtype(value: Any, dtype: torch.dtype | None, name: str = "") -> Any:
    """Floats of two axes or more in a type; timesteps, which are told apart by their last digits, as they are."""
    if isinstance(value, dict):
        return {key: _in_dtype(item, dtype, key) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_in_dtype(item, dtype, name) for item in value)
    if dtype is None or not isinstance(value, torch.Tensor) or value.ndim < 2 or name in TIMESTEPS:
        return value
    return value.to(dtype) if value.is_floating_point() else value


def stored_batches(
    path: str | os.PathLike[str],
    model: nn.Module | type[nn.Module] | None = None,
    limit: int | None = None,
    dtype: torch.dtype | None = None,
) -> Sequence[dict[str, Any]]:
    """The batches of a model in a file or a folder.

    Args:
        path: A folder of `.npz` files, each a batch, in the order of their names; or one file, whose rows are batches
            of one sample where all of its arrays have equally many, and which else is one batch.
        model: What takes them, or its class: names that it does not take are refused here. None: they are not looked
            at.
        limit: Most batches; of more, as many are taken, spread evenly. None: all.
        dtype: Of floats of two axes or more, as a pipeline gives them to a model of this type. None: that of `model`,
            and where that is no module, as they are.

    Returns:
        Of a folder, batches that are read one at a time.

    Raises:
        CalibrationError: Nothing is there, a file cannot be read, or it names arguments that the model does not take.
    """
    place = Path(path)
    if dtype is None and isinstance(model, nn.Module):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1), None)
    found = _batches_at(place, dtype)
    if model is not None:
        _refuse_unknown(place, found[0], model)
    if limit is None or limit >= len(found):
        return found
    chosen = [index * len(found) // limit for index in range(limit)]
    if isinstance(found, StoredBatches):
        return StoredBatches([found.files[index] for index in chosen], dtype)
    return [found[index] for index in chosen]


def _batches_at(place: Path, dtype: torch.dtype | None) -> Sequence[dict[str, Any]]:
    """All batches of a folder or a file. Raises CalibrationError where there is none."""
    if place.is_dir():
        files = sorted(place.glob("*.npz"))
        if not files:
            raise CalibrationError(f"{place} holds no .npz file. Possible: a folder that record_steps wrote.")
        return StoredBatches(files, dtype)
    if place.suffix == ".npz" and place.is_file():
        return _samples_of(_in_dtype(read_batch(place), dtype))
    raise CalibrationError(f"{place} is no folder of .npz files, and no such file.")


def _samples_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch as batches of one sample, where each of its arguments has as many rows."""
    counts = {len(x) if isinstance(x, torch.Tensor) and x.ndim else 0 for x in batch.values()}
    if len(counts) != 1 or 0 in counts:
        return [batch]
    return [{name: x[row : row + 1] for name, x in batch.items()} for row in range(counts.pop())]


def _refuse_unknown(place: Path, batch: Mapping[str, Any], model: nn.Module | type[nn.Module]) -> None:
    kind = model if isinstance(model, type) else type(model)
    parameters = positional_parameters(kind.forward)
    names = [parameter.name for parameter in parameters or ()][1:]
    if unknown := [name for name in batch if parameters is not None and name not in names]:
        raise CalibrationError(
            f"{place}: {kind.__name__} takes no {unknown[0]!r}. {did_you_mean(unknown[0], names)} It takes: "
            f"{', '.join(names)}."
        )
