"""One pass over the data, graph optimisation on: the statistics of exactly those tensors that will be quantized.

Each sample's activations are reduced at once; memory holds one sample.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from quark.core.observers import Observer
from quark.core.scales import QParams
from quark.errors import CalibrationError, QuarkError
from quark.log import progress
from quark.onnx.inputs import model_inputs
from quark.onnx.masks import MASK
from quark.onnx.model import PROTOBUF_LIMIT, to_proto, weight_bytes
from quark.onnx.operators import rule_of
from quark.onnx.parameters import make_observer
from quark.onnx.placement import Placement
from quark.onnx.random_reader import RandomDataReader
from quark.onnx.readers import samples
from quark.onnx.settings import Settings
from quark.onnx.statistics import EverythingObserver, Statistics, load_or_start

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime


def activation_params(
    model: ir.Model, placement: Placement, settings: Settings, reader: Any, fingerprint: str = ""
) -> dict[ir.Value, QParams]:
    """Scale and zero point of each class of activations.

    Args:
        model: The float model, not changed.
        placement: Which tensors, with which spec.
        settings: Limits, providers, the statistics file.
        reader: Anything with `get_next()`, or an iterable of samples; None where the statistics file has everything.
        fingerprint: Of the float model; for the statistics file.

    Raises:
        CalibrationError: No data, or a sample that does not fit the inputs: says what was expected and what came.
        NonFiniteError: A tensor held NaN or Inf.
    """
    classes = _classes(placement)
    if not classes:
        return {}
    observers = {root: make_observer(placement.activations[root], settings) for root in classes}
    tensors = {name: root for root, names in classes.items() for name in names}
    if settings.statistics is None:
        collect(model, {name: observers[root] for name, root in tensors.items()}, reader, settings)
    else:
        statistics = _statistics(model, list(tensors), reader, settings, fingerprint)
        for name in [name for name in tensors if name in statistics.states]:
            part = make_observer(observers[tensors[name]].spec, settings)
            part.restore(statistics.states[name])
            observers[tensors[name]].merge(part)
    masks = {root for root, observer in observers.items() if _is_mask(observer)}
    for value in [value for value in placement.activations if placement.root(value) in masks]:
        del placement.activations[value]
    return {root: _solved(root.name, observer) for root, observer in observers.items() if root not in masks}


def _is_mask(observer: Observer) -> bool:
    """Whether a tensor carries an attention mask: no scale serves both -3e38 and its other values."""
    extremes = [np.asarray(side) for side in (observer.low, observer.high) if side is not None]
    return any(bool(np.isfinite(side).all() and (abs(side) > MASK).any()) for side in extremes)


def _classes(placement: Placement) -> dict[ir.Value, list[str]]:
    """The tensor that stands for a class -> names of the tensors whose values count."""
    classes: dict[ir.Value, list[str]] = {}
    for value, spec in placement.activations.items():
        if not spec.needs_calibration:
            continue
        root = placement.root(value)
        names = classes.setdefault(root, [])
        producer = value.producer()
        moved = producer is not None and rule_of(producer.op_type).shares_scale
        if value is root or not moved:
            names.append(value.name or "")
    return classes


def _statistics(model: ir.Model, tensors: list[str], reader: Any, settings: Settings, fingerprint: str) -> Statistics:
    """The statistics file with all of these tensors: what it lacks is collected and added to it."""
    assert settings.statistics is not None
    statistics = load_or_start(settings.statistics, fingerprint)
    missing = {name: EverythingObserver() for name in tensors if name not in statistics.states}
    if missing:
        collect(model, missing, reader, settings)
        statistics.add(missing)
        statistics.save(settings.statistics)
    return statistics


def _solved(name: str | None, observer: Observer) -> QParams:
    try:
        return observer.qparams()
    except QuarkError as error:
        raise type(error)(f"{name}: {error}") from None


def collect(model: ir.Model, observers: Mapping[str, Observer], reader: Any, settings: Settings) -> None:
    """Run the data through the float model once; each tensor's observer (several may share one) sees its values."""
    if reader is None and settings.random_data:
        reader = RandomDataReader(model, dict(settings.random_shapes), dict(settings.random_ranges))
    if reader is None:
        raise CalibrationError(
            f"{len(observers)} activations ({next(iter(observers))}, ...) have static scales, which need a calibration "
            "data reader. Possible: pass one (--calib on the command line), or weight-only quantization."
        )
    inputs = model_inputs(model)
    wanted = [name for name in observers if name not in inputs]
    shared: dict[int, tuple[Observer, list[str]]] = {}
    for name, observer in observers.items():
        shared.setdefault(id(observer), (observer, []))[1].append(name)
    count = 0
    with _Session(model, wanted, settings) as session, ThreadPoolExecutor(os.cpu_count()) as pool:
        for feed in progress(samples(reader, inputs, settings.calibration_samples), "calibration"):
            values = {**feed, **(dict(zip(wanted, session.run(wanted, feed), strict=True)) if wanted else {})}

            def see(entry: tuple[Observer, list[str]], values: Mapping[str, Any] = values) -> None:
                for name in entry[1]:
                    entry[0].update(np.asarray(values[name]))

            # Counting lets go of the interpreter lock; an observer is in one thread only.
            list(pool.map(see, shared.values()))
            count += 1
    if count == 0:
        raise CalibrationError("The calibration reader yields nothing: static quantization needs at least one sample.")


class _Session:
    """A session whose outputs are the wanted tensors; over a temporary file where the model passes protobuf's 2 GB."""

    def __init__(self, model: ir.Model, wanted: list[str], settings: Settings) -> None:
        self.model, self.wanted, self.settings = model, wanted, settings
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> onnxruntime.InferenceSession:
        # onnxruntime is imported when a session is made, onnx_ir with it.
        import onnx_ir as ir
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        weights = [value.const_value for value in self.model.graph.initializers.values()]
        outside = [tensor for tensor in weights if isinstance(tensor, ir.ExternalTensor)]
        inside = weight_bytes(self.model) - sum(tensor.nbytes for tensor in outside)
        folders = {str(Path(tensor.base_dir or ".").resolve()) for tensor in outside}
        if inside > PROTOBUF_LIMIT or len(folders) > 1:
            source: str | bytes = self._written()
        else:
            proto = to_proto(self.model)
            self._add_outputs(proto)
            source = proto.SerializeToString()
            # Weights beside the model stay there: the runtime maps the same file.
            for folder in folders:
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        try:
            return onnxruntime.InferenceSession(source, options, providers=list(self.settings.providers))
        except Exception as error:
            raise QuarkError(f"ONNX Runtime does not load the float model: {error}") from error

    def _written(self) -> str:
        import onnx_ir as ir

        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "model.onnx"
        ir.save(self.model, path, external_data="model.data")
        proto = onnx.load(path, load_external_data=False)
        self._add_outputs(proto)
        onnx.save(proto, path)
        return str(path)

    def _add_outputs(self, proto: onnx.ModelProto) -> None:
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.wanted if name not in present)

    def __exit__(self, *exception: object) -> None:
        if self.folder is not None:
            self.folder.cleanup()
