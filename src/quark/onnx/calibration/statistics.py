"""Statistics: what calibration saw of each tensor, enough for every method; saved, reused, merged.

For each tensor: how many samples, exact minimum and maximum, their sums over samples (moving average), and the counts
of the upper 16 bits of every value (percentile, entropy, errors). A file serves every scheme of the same float model.

The documented file of calibrated ranges (SaveAndRestore, TensorsRangeFile) is JSON, to be read and edited.

    {"quark_version": "...", "tensors_range": {"conv1_out": [[-1.5], [2.0]], ...}}

A range is [low, high]; each side may be a list of one number. The documented system also writes the state of a
fine-tuning that was stopped. That is not taken up: fine-tuning begins with the float weights, which a warning says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.base.data_files.arrays import read_npz
from quark.base.files import atomic_file, require_regular
from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.core.array import Array, NumpyArray
from quark.core.observers.base import Observer
from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.moving_average import MovingAverageObserver
from quark.core.scales import QParams
from quark.core.spec import spec
from quark.errors import CalibrationError, FormatError, one_line
from quark.onnx.calibration.byproducts import SampleRows

SCALARS = ("count", "low", "high", "low_sum", "high_sum")
BINS = 1 << 16
FORMAT = "quark statistics 2"
KINDS = {"fingerprint": "U", "names": "U", **dict.fromkeys(SCALARS, "f"), "ends": "i", "bins": "u", "counts": "iuf"}
"""Array of a file -> the kinds of numpy that it may have; all but the first have one dimension."""


class EverythingObserver(HistogramBasedObserver, MovingAverageObserver):
    """Collects what any method needs; decides nothing."""

    def __init__(self) -> None:
        super().__init__(spec("int8"))


class SolvedObserver(Observer):
    """The range that an observer found, without the counts that it was found in.

    Args:
        extremes: What was seen, smallest and largest.
        observer: Gives the observer, which is asked for its range once, where one is wanted.
    """

    def __init__(self, extremes: Observer, observer: Callable[[], Observer]) -> None:
        super().__init__(extremes.spec)
        self.merge(extremes)
        self._observer = observer
        self._range: tuple[Array, Array] | None = None
        self._qparams: QParams | None = None

    def qparams(self) -> QParams:
        if self._qparams is None:
            self._qparams = super().qparams()
        return self._qparams

    def range(self) -> tuple[Array, Array]:
        if self._range is None:
            self._range = self._observer().range()
        return self._range


class Statistics:
    """States of observers by tensor name, of one float model.

    Args:
        fingerprint: Of the model; see `fingerprint`.
        states: Tensor name -> `EverythingObserver.state()`.

    Attributes:
        solved: (tensors, spec, calibration settings) -> the range of these, once one decision has asked for it.
        weights: (id of a constant, spec, calibration settings) -> that constant, which clones of a model share, and
            its scale and zero point, once one decision has asked for them.
        means: Tensor name -> the means of its channels, of each sample, once a correction has asked for them.
    """

    def __init__(self, fingerprint: str, states: Mapping[str, Mapping[str, NumpyArray]] | None = None) -> None:
        self.fingerprint = fingerprint
        self.states = dict(states or {})
        self.solved: dict[Hashable, Observer] = {}
        self.weights: dict[Hashable, tuple[object, QParams]] = {}
        self.means: dict[str, SampleRows] = {}

    def of_no_sample(self) -> Statistics:
        """Statistics of the same model that know its weights alone."""
        found = Statistics(self.fingerprint)
        found.weights = dict(self.weights)
        return found

    @classmethod
    def joined(cls, first: Statistics, second: Statistics) -> Statistics:
        """The statistics of the samples of both, in this order, of the tensors that both know."""
        found = first.of_no_sample()
        for name in [name for name in first.states if name in second.states]:
            both = EverythingObserver()
            both.restore(first.states[name])
            other = EverythingObserver()
            other.restore(second.states[name])
            both.merge(other)
            found.states[name] = both.state()
        for name in [name for name in first.means if name in second.means]:
            found.means[name] = SampleRows()
            for rows in (first.means[name], second.means[name]):
                found.means[name].add(rows.array, rows.samples)
        found.weights |= second.weights
        return found

    def add(self, observers: Mapping[str, EverythingObserver]) -> None:
        """Take over what observers saw; a tensor that was always empty has nothing to keep."""
        for name, observer in observers.items():
            if observer.count:
                self.states[name] = observer.state()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .npz, whole or not at all; counts are stored sparsely. Raises OutputError."""
        arrays: dict[str, NumpyArray] = {"format": np.array(FORMAT), "fingerprint": np.array(self.fingerprint)}
        states = self.states.values()
        arrays["names"] = np.array(list(self.states), dtype=str)
        for key in SCALARS:
            arrays[key] = np.array([state[key] for state in states], dtype=np.float64)
        used = [np.flatnonzero(state["counts"]) for state in states]
        arrays["ends"] = np.cumsum([len(bins) for bins in used], dtype=np.int64)
        arrays["bins"] = np.concatenate([*used, np.zeros(0, np.int64)]).astype(np.uint16)
        arrays["counts"] = np.concatenate([s["counts"][b] for s, b in zip(states, used, strict=True)] or [np.zeros(0)])
        arrays["digest"] = np.array(_digest(arrays))
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            # numpy before 2.2 takes every keyword for an array: allow_pickle would be one of the file.
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str], fingerprint: str) -> Statistics:
        """Read a file.

        Raises:
            FormatError: It is no statistics file.
            CalibrationError: It was collected on another model.
        """
        try:
            arrays = read_npz(Path(path))
        except FormatError as error:
            raise FormatError(f"{path} is not a statistics file: {error}") from error
        if str(arrays.get("format")) != FORMAT:
            raise FormatError(f"{path} is not a statistics file of this version ({FORMAT}).")
        if str(arrays.pop("digest", "")) != _digest(arrays):
            raise FormatError(
                f"{path} was changed after it was written, or is damaged. Possible: collect the statistics again."
            )
        _check_arrays(arrays, path)
        if str(arrays["fingerprint"]) != fingerprint:
            raise CalibrationError(
                f"{path} was collected on another float model, or on this one before an algorithm (CLE, SmoothQuant, "
                "QuaRot, BiasCorrection) or the simulation of an NPU (SimulateDPU, on in XINT8) changed it, or after. "
                "Possible: another file name, or the same settings."
            )
        states: dict[str, dict[str, NumpyArray]] = {}
        ends = arrays["ends"].tolist()
        for index, name in enumerate(arrays["names"].tolist()):
            part = slice(ends[index - 1] if index else 0, ends[index])
            counts = np.zeros(BINS, np.int64)
            counts[arrays["bins"][part]] = arrays["counts"][part]
            states[name] = {key: arrays[key][index].astype(np.float32) for key in ("low", "high")}
            states[name] |= {key: arrays[key][index] for key in ("count", "low_sum", "high_sum")} | {"counts": counts}
        return cls(fingerprint, states)


def _check_arrays(arrays: Mapping[str, NumpyArray], path: str | os.PathLike[str]) -> None:
    """Raise FormatError for arrays that `Statistics.save` never writes, whatever digest stands beside them."""
    for key, kinds in KINDS.items():
        if key not in arrays:
            raise FormatError(f"{path} is not a statistics file: it has no array {key!r}.")
        if arrays[key].dtype.kind not in kinds or arrays[key].ndim != (key != "fingerprint"):
            raise FormatError(f"{path} is damaged: {key} is {arrays[key].dtype} {list(arrays[key].shape)}.")
    names, ends = arrays["names"], arrays["ends"]
    for key in (*SCALARS, "ends"):
        if len(arrays[key]) != len(names):
            raise FormatError(f"{path} is damaged: {key} has {len(arrays[key])} values for {len(names)} tensors.")
    used = int(ends[-1]) if len(ends) else 0
    wrong = {
        "names: one stands twice": len(set(names.tolist())) != len(names),
        "ends: they go down": (np.diff(ends, prepend=0) < 0).any(),
        f"bins and counts: {len(arrays['bins'])} and {len(arrays['counts'])} values for {used}": not (
            len(arrays["bins"]) == len(arrays["counts"]) == used
        ),
        f"bins: not all lie from 0 to {BINS - 1}": ((arrays["bins"] < 0) | (arrays["bins"] >= BINS)).any(),
        "counts: one is no number of values": not (arrays["counts"] >= 0).all(),
        "count: one is no number of samples": not ((arrays["count"] >= 1) & np.isfinite(arrays["count"])).all(),
        "low: one is above its high": (arrays["low"] > arrays["high"]).any(),
        "low_sum: one is above its high_sum": (arrays["low_sum"] > arrays["high_sum"]).any(),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise FormatError(f"{path} is damaged: {what}. Possible: collect the statistics again.")


def _digest(arrays: Mapping[str, NumpyArray]) -> str:
    """A hash of all that a file holds: values that stand under another name, or in another order, have another."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def load_or_start(path: str | os.PathLike[str], fingerprint: str) -> Statistics:
    """The statistics of a file, or empty ones where there is none yet."""
    return Statistics.load(path, fingerprint) if Path(path).exists() else Statistics(fingerprint)


def fingerprint(model: ir.Model) -> str:
    """A hash of the model: its inputs and outputs, its nodes and functions, and all values of its weights."""
    digest = hashlib.sha256()
    for value in (*model.graph.inputs, *model.graph.outputs):
        digest.update(repr((value.name, str(value.type), str(value.shape))).encode())
    for node in model.graph:
        inputs = [value.name if value is not None else "" for value in node.inputs]
        digest.update(repr((node.domain, node.op_type, node.name, inputs, [v.name for v in node.outputs])).encode())
        for _, attribute in sorted(node.attributes.items()):
            digest.update(ir.to_proto(attribute).SerializeToString(deterministic=True))
    for _, function in sorted(model.functions.items()):
        digest.update(ir.to_proto(function).SerializeToString(deterministic=True))
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest.update(repr((name, str(tensor.dtype), tensor.shape.numpy())).encode())
            array = np.ascontiguousarray(tensor.numpy())
            text = array.dtype.hasobject
            digest.update(repr(array.tolist()).encode() if text else array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# The documented file of ranges ----------------------------------------------------------------------------------------


Range = tuple[float, float]
KEY = "tensors_range"


def read_ranges(path: str | os.PathLike[str]) -> dict[str, Range]:
    """Tensor name -> (low, high).

    Raises:
        FormatError: It is no JSON of this form, or a range is not finite, or its low is above its high.
    """
    require_regular(Path(path))
    try:
        content = plain_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON file of tensor ranges: {one_line(error)}") from error
    entries = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise FormatError(f"{path} holds no {KEY!r}. Possible: another file name, to calibrate and write it.")
    if "model_to_finetune" in content:
        logger.warning(f"{path}: its ranges are used; fine-tuning, if any, begins with the float weights.")
    return {name: _range(entry, f"{path}: {name}") for name, entry in entries.items()}


def write_ranges(path: str | os.PathLike[str], ranges: Mapping[str, Range]) -> None:
    """Write a file, whole or not at all. Raises OutputError."""
    from quark.__version__ import __version__

    entries = {name: [[low], [high]] for name, (low, high) in ranges.items()}
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps({"quark_version": __version__, KEY: entries}, indent=2), encoding="utf-8")


def _range(entry: Any, where: str) -> Range:
    sides = entry if isinstance(entry, list) and len(entry) == 2 else []
    numbers = [side[0] if isinstance(side, list) and len(side) == 1 else side for side in sides]
    if len(numbers) != 2 or not all(type(number) in (int, float) for number in numbers):
        raise FormatError(f"{where}: expected [low, high], got {one_line(json.dumps(entry))[:80]}.")
    with np.errstate(over="ignore"):
        low, high = (float(np.float32(number)) for number in numbers)
    if not (np.isfinite([low, high]).all() and low <= high):
        raise FormatError(f"{where}: [{numbers[0]}, {numbers[1]}] is no range of float32.")
    return low, high
