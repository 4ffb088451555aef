"""Statistics: what calibration saw of each tensor, enough for every method; saved, reused, merged.

For each tensor: how many samples, exact minimum and maximum, their sums over samples (moving average), and the counts
of the upper 16 bits of every value (percentile, entropy, errors). A file serves every scheme of the same float model.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.core.observers.histograms.base import HistogramBasedObserver
from quark.core.observers.moving_average import MovingAverageObserver
from quark.core.spec import spec
from quark.errors import CalibrationError, FormatError
from quark.files import atomic_file

SCALARS = ("count", "low", "high", "low_sum", "high_sum")
BINS = 1 << 16
FORMAT = "quark statistics 1"


class EverythingObserver(HistogramBasedObserver, MovingAverageObserver):
    """Collects what any method needs; decides nothing."""

    def __init__(self) -> None:
        super().__init__(spec("int8"))


class Statistics:
    """States of observers by tensor name, of one float model.

    Args:
        fingerprint: Of the model; see `fingerprint`.
        states: Tensor name -> `EverythingObserver.state()`.
    """

    def __init__(self, fingerprint: str, states: Mapping[str, Mapping[str, NumpyArray]] | None = None) -> None:
        self.fingerprint = fingerprint
        self.states = dict(states or {})

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
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], fingerprint: str) -> Statistics:
        """Read a file.

        Raises:
            FormatError: It is no statistics file.
            CalibrationError: It was collected on another model.
        """
        try:
            # numpy leaves a file open that it opened itself and that is none of its archives.
            with Path(path).open("rb") as opened, np.load(opened) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise FormatError(f"{path} is not a statistics file: {error}.") from None
        if str(arrays.get("format")) != FORMAT:
            raise FormatError(f"{path} is not a statistics file of this version ({FORMAT}).")
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


def load_or_start(path: str | os.PathLike[str], fingerprint: str) -> Statistics:
    """The statistics of a file, or empty ones where there is none yet."""
    return Statistics.load(path, fingerprint) if Path(path).exists() else Statistics(fingerprint)


def fingerprint(model: ir.Model) -> str:
    """A hash of the model: its nodes, and of each weight name, type, shape and up to 4,096 values spread over it."""
    digest = hashlib.sha256()
    for node in model.graph:
        inputs = [value.name if value is not None else "" for value in node.inputs]
        digest.update(repr((node.op_type, node.name, inputs, [value.name for value in node.outputs])).encode())
        digest.update(repr(sorted((name, str(value)[:200]) for name, value in node.attributes.items())).encode())
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest.update(repr((name, str(tensor.dtype), tensor.shape.numpy())).encode())
            flat = tensor.numpy().reshape(-1)
            digest.update(np.ascontiguousarray(flat[:: max(1, flat.size // 4096)]).tobytes())
    return digest.hexdigest()
