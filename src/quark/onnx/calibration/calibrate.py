"""Calibration: one pass over the data, graph optimisation on, for exactly those tensors that will be quantized.

The model runs in slices, and the activations of one are reduced while the next runs; memory holds two slices.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.base.log import logger
from quark.base.progress import progress
from quark.core.dtypes import DTYPES
from quark.core.observers import Observer
from quark.core.observers.min_max import MinMaxObserver
from quark.core.observers.real_rows import rows_at
from quark.core.scales import QParams
from quark.core.spec import TensorSpec
from quark.errors import CalibrationError, QuarkError
from quark.onnx.calibration.byproducts import Collector, with_byproducts
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.padding import Padding, mask_values
from quark.onnx.calibration.data.random_reader import RandomDataReader
from quark.onnx.calibration.data.readers import samples, usable
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.histogram_figures import FOLDER, check_figures, save_figures
from quark.onnx.calibration.left_in_float import final_range, leave_masks_in_float, with_values
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.qparams import largest, make_observer, refuse_subnormal
from quark.onnx.calibration.sliced_session import SlicedSession
from quark.onnx.calibration.statistics import (
    EverythingObserver,
    SolvedObserver,
    Statistics,
    load_or_start,
    read_ranges,
    write_ranges,
)
from quark.onnx.config.settings import Settings
from quark.onnx.graph.model_file import is_constant, split_weights
from quark.onnx.graph.proto_file import reason
from quark.onnx.graph.sessions import DECODED, ask_for, integer_kernels_are_exact, run_sample, session_over
from quark.onnx.operators import RULES, rule_of
from quark.onnx.operators.targets import TARGETS
from quark.onnx.placement.dual_pairs import REQUANTIZED, source_name
from quark.onnx.placement.placement import Placement
from quark.onnx_ops.custom_libraries import session_options


def activation_params(prepared: Prepared, placement: Placement, settings: Settings) -> dict[ir.Value, QParams]:
    """Scale and zero point of each class of activations.

    Args:
        prepared: The float model, which is not changed; its data may be None where the statistics have everything.
        placement: Tensors with their specs.
        settings: Limits, providers, the statistics file.

    Raises:
        CalibrationError: No data, or a sample that does not fit the inputs: says what was expected and what came.
        NonFiniteError: A tensor has NaN or Inf.
    """
    classes = range_classes(placement)
    if not classes:
        return {}
    # A search that has its statistics in memory compares schemes, of which each has ranges of its own.
    range_file = settings.calibration.range_file if prepared.statistics is None else None
    restored = _restored(settings, range_file, classes, placement)
    observers = {root: restored.get(root) or make_observer(placement.activations[root], settings) for root in classes}
    open_classes = {root: names for root, names in classes.items() if root not in restored}
    if settings.calibration.figures:
        check_figures(_by_name({root: observers[root] for root in open_classes}))
    statistics = _observe(prepared, open_classes, observers, settings)
    if TARGETS[settings.qdq.target].unsigned_positive:
        for root, free in _from_zero(observers, placement).items():
            if statistics is not None and open_classes.get(root):
                observers[root] = solved_observer(open_classes[root], free, settings, statistics)
            else:
                seen, observers[root] = observers[root], make_observer(free, settings)
                observers[root].restore(seen.state())
    observers = with_values(observers, placement)
    masks = leave_masks_in_float(prepared.model.graph, observers, placement, mask_values(prepared.model))
    params = {root: _solved(root.name, observer) for root, observer in observers.items() if root not in masks}
    _keep(observers, masks, range_file, settings)
    return params


def _keep(
    observers: Mapping[ir.Value, Observer], masks: Container[ir.Value], range_file: str | None, settings: Settings
) -> None:
    """Write the file of the ranges, if there is none yet, and the figures that are asked for."""
    if range_file is not None and not Path(range_file).exists():
        ranges = {root.name or "": final_range(seen, root in masks) for root, seen in observers.items()}
        write_ranges(range_file, ranges)
    if settings.calibration.figures:
        files = save_figures(_by_name(observers))
        logger.info(f"{len(files)} histograms are in {FOLDER}.")


def _by_name(observers: Mapping[ir.Value, Observer]) -> dict[str, Observer]:
    return {root.name or "": observer for root, observer in observers.items()}


def _observe(
    prepared: Prepared, classes: Mapping[ir.Value, list[str]], observers: dict[ir.Value, Observer], settings: Settings
) -> Statistics | None:
    """Let the observers of these classes see the data, or replace them by what statistics say.

    Returns the statistics: those given, those of the file, or such of a tensor that is quantized twice, which is looked
    at once; None where each observer saw its tensors by itself.
    """
    statistics = prepared.own_statistics
    path = settings.calibration.statistics if statistics is None else None
    tensors = [(name, root) for root, names in classes.items() for name in names]
    if not classes:
        return statistics
    if statistics is None and path is None and len(dict(tensors)) == len(tensors):
        own = {root: observers[root] for root in classes}
        if not prepared.byproducts.fill(own):
            make = partial(make_observer, settings=settings)
            collect(prepared, prepared.byproducts.collectors(classes, own, make), settings)
        return None
    if statistics is None:
        identity = prepared.identity
        statistics = Statistics(identity) if path is None else load_or_start(path, identity)
    _complete(statistics, path, prepared, list(dict(tensors)), settings)
    for root, names in classes.items():
        observers[root] = solved_observer(names, observers[root].spec, settings, statistics)
    return statistics


def _observer_of(names: list[str], spec: TensorSpec, settings: Settings, statistics: Statistics) -> Observer:
    """The statistic that a spec asks for, of all values of these tensors; those without any count for nothing."""
    return _merged(names, statistics, lambda: make_observer(spec, settings))


def _merged(names: Sequence[str], statistics: Statistics, make: Callable[[], Observer]) -> Observer:
    observer = make()
    for name in names:
        if name in statistics.states:
            part = make()
            part.restore(statistics.states[name])
            observer.merge(part)
    return observer


def solved_observer(names: list[str], spec: TensorSpec, settings: Settings, statistics: Statistics) -> Observer:
    """The statistic of a spec over these tensors, solved once for all decisions on the statistics.

    Figures show the counts, which nothing else needs.
    """
    if settings.calibration.figures:
        return _observer_of(names, spec, settings, statistics)
    present = tuple(name for name in names if name in statistics.states)
    key = (present, spec, settings.calibration.of_one_tensor)
    if key not in statistics.solved:
        # The counts of all tensors would take more memory than all else: each is looked at as its range is solved.
        extremes = _merged(names, statistics, lambda: Observer(spec))
        solve = partial(_observer_of, names, spec, settings, statistics)
        own_qparams = type(make_observer(spec, settings)).qparams is not Observer.qparams
        statistics.solved[key] = solve() if own_qparams else SolvedObserver(extremes, solve)
    return statistics.solved[key]


def _restored(
    settings: Settings, path: str | None, classes: Mapping[ir.Value, list[str]], placement: Placement
) -> dict[ir.Value, Observer]:
    """Return an observer of each class whose range is in the file, if there is one, or was chosen by a search."""
    ranges = dict(read_ranges(path)) if path is not None and Path(path).exists() else {}
    if ranges:
        logger.info(f"{len(ranges)} ranges are those of {path}; other tensors are calibrated.")
    ranges |= dict(settings.calibration.ranges)
    found: dict[ir.Value, Observer] = {}
    for root, members in classes.items():
        names = [root.name or ""] if root.name in ranges else members
        if all(name in ranges for name in names):
            found[root] = MinMaxObserver(placement.activations[root])
            low = np.float32(min(ranges[name][0] for name in names))
            high = np.float32(max(ranges[name][1] for name in names))
            found[root].restore({"count": np.asarray(1), "low": np.asarray(low), "high": np.asarray(high)})
    return found


def _from_zero(observers: Mapping[ir.Value, Observer], placement: Placement) -> dict[ir.Value, TensorSpec]:
    """The classes where no value was negative, at the unsigned type with 0 as the smallest code, which they get."""
    found = dict[ir.Value, TensorSpec]()
    for root, observer in observers.items():
        spec = placement.activations[root]
        low = None if observer.low is None else float(np.min(np.asarray(observer.low)))
        if low is None or low < 0 or not spec.has_zero_point or not spec.symmetric or spec.dtype.name.startswith("u"):
            continue
        found[root] = replace(spec, dtype=DTYPES[f"u{spec.dtype.name}"], symmetric=False)
        for value in [value for value in placement.activations if placement.root(value) is root]:
            placement.activations[value] = found[root]
    return found


def range_classes(placement: Placement) -> dict[ir.Value, list[str]]:
    """The tensor that stands for a class -> names of the tensors whose values count."""
    classes: dict[ir.Value, list[str]] = {}
    for value, spec in placement.activations.items():
        if not spec.needs_calibration:
            continue
        root = placement.root(value)
        names = classes.setdefault(root, [])
        producer = value.producer()
        moved = producer is not None and REQUANTIZED not in producer.meta and rule_of(producer.op_type).moves(producer)
        if value is root or not moved:
            names.append(source_name(value))
    return classes


def _complete(
    statistics: Statistics, path: str | None, prepared: Prepared, tensors: list[str], settings: Settings
) -> None:
    """Collect what statistics lack of these tensors, and keep it in their file, if they have one."""
    missing = [name for name in tensors if name not in statistics.states]
    if not missing:
        return
    if statistics.states and prepared.data is None and not settings.calibration.random_data:
        raise CalibrationError(
            f"{path or 'The statistics'} lacks {len(missing)} tensors that this scheme needs "
            f"({missing[0]}, ...): other passes or targets have other tensors. "
            "Possible: pass the calibration data once more."
        )
    others = [name for name in _all_tensors(prepared.model) if name not in statistics.states]
    found = {name: EverythingObserver() for name in dict.fromkeys([*missing, *others])}
    collect(prepared, found, settings)
    statistics.add(found)
    if path is not None:
        statistics.save(path)


def _all_tensors(model: ir.Model) -> list[str]:
    """The float tensors that some scheme may quantize: what the ops with a rule read and write."""
    values = [value for node in model.graph if node.op_type in RULES for value in (*node.inputs, *node.outputs)]
    live = [value for value in values if value is not None and not is_constant(value) and value.dtype is not None]
    names = dict.fromkeys(source_name(value) for value in live if str(value.dtype) in ("FLOAT", "FLOAT16"))
    return [name for name in names if name]


def _solved(name: str | None, observer: Observer) -> QParams:
    try:
        amax = largest(observer)
        refuse_subnormal(amax, "all values observed")
        params = observer.qparams()
        step = float(np.min(params.scale))
        if params.zero_point is not None and amax is not None and 0 < 2 * amax < step:
            raise CalibrationError(
                f"the values observed reach {amax:.2g} at most and would all become zero: the smallest scale is "
                f"{step:.2g}. Possible: exclude the nodes that read it, or scale the model."
            )
    except QuarkError as error:
        raise type(error)(f"{name}: {error}") from None
    return params


def repeatable(reader: Any, model: ir.Model, settings: Settings) -> Samples | None:
    """The data for algorithms, which read them more than once; None where there are none."""
    if isinstance(reader, Samples) or (reader is None and not settings.calibration.random_data):
        return reader
    return Samples(
        _random(model, settings) if reader is None else reader, model_inputs(model), settings.calibration.samples
    )


def _random(model: ir.Model, settings: Settings) -> RandomDataReader:
    return RandomDataReader(model, dict(settings.calibration.random_shapes), dict(settings.calibration.random_ranges))


def run_random(model: ir.Model, names: list[str], settings: Settings) -> dict[str, Any]:
    """The values of tensors of a model for one random sample. Raises CalibrationError where the model fails on it."""
    feed = _random(model, settings).get_next()
    assert feed is not None
    with model_session(model, names, settings) as session:
        return dict(zip(names, run_sample(session, names, feed), strict=True))


def collect(prepared: Prepared, observers: Mapping[str, Collector], settings: Settings) -> None:
    """Run the data through the float model once; each tensor's observer (several may share one) sees its values.

    Args:
        prepared: The model and its data; its byproducts are completed.
        observers: Of tensors, by name.
        settings: Limits, providers.
    """
    model, reader = prepared.model, prepared.data
    if reader is None and settings.calibration.random_data:
        reader = _random(model, settings)
    if reader is None:
        raise CalibrationError(
            f"{len(observers)} activations ({next(iter(observers))}, ...) have static scales, which need a calibration "
            "data reader. Possible: pass one (--calib on the command line), or weight-only quantization."
        )
    inputs, padding = model_inputs(model), Padding.of(model)
    model, observers = with_byproducts(prepared.byproducts, model, observers, padding)
    wanted = [name for name in observers if name not in inputs]
    count = 0
    seen: dict[str, Any] = {}
    sliced: SlicedSession | None = None
    with ThreadPoolExecutor(1) as ahead:
        for feed in progress(usable(samples(reader, inputs, settings.calibration.samples)), "calibration"):
            real = [*padding.real(feed).values()]
            if sliced is None:
                sliced = sliced_session(model, wanted, feed, settings)
            parts = sliced.run(feed)
            running = ahead.submit(next, parts, None) if wanted else None
            # The runtime computes the next slice while the one before is counted. Inputs are looked at now: a reader
            # may use their memory again.
            _update(observers, seen)
            _update(observers, _at_real({name: feed[name] for name in observers if name in inputs}, real))
            while running is not None and (made := running.result()) is not None:
                running = ahead.submit(next, parts, None)
                _update(observers, seen)
                seen = _at_real(made, real)
            count += 1
        _update(observers, seen)
    prepared.byproducts.complete()
    if count == 0:
        raise CalibrationError("The calibration reader yields nothing: static quantization needs at least one sample.")


def _at_real(values: dict[str, Any], real: Sequence[Any]) -> dict[str, Any]:
    """The values at real positions, where a sample that the model takes whole has masked ones."""
    if not real:
        return values
    found = {name: rows_at(np.asarray(array), real) for name, array in values.items()}
    return {name: array for name, array in found.items() if array.size}


def _update(observers: Mapping[str, Collector], values: dict[str, Any]) -> None:
    """Let each tensor be seen once; its array is freed then."""
    while values:
        name = next(iter(values))
        observers[name].update(np.asarray(values.pop(name)))


def sliced_session(model: ir.Model, wanted: Sequence[str], feed: Feed, settings: Settings) -> SlicedSession:
    """Sessions that give the wanted tensors slice by slice; the first sample says how large these are."""
    return SlicedSession(model, wanted, feed, partial(_open, settings))


@contextmanager
def model_session(
    model: ir.Model, wanted: list[str], settings: Settings, once: bool = False
) -> Iterator[onnxruntime.InferenceSession]:
    """A session that can give the wanted tensors too, over the weights of the model where they are.

    Args:
        model: The model.
        wanted: Names of the tensors.
        settings: The execution providers.
        once: Whether a single run is to come, which is over before weights would be laid out anew for it.
    """
    proto, weights = split_weights(model)
    ask_for(proto, wanted)
    yield _open(settings, proto, weights, prepack=not once)


def _open(
    settings: Settings, proto: onnx.ModelProto, weights: Mapping[str, Any], arena: bool = True, prepack: bool = True
) -> onnxruntime.InferenceSession:
    """A session for calibration. Raises QuarkError where ONNX Runtime does not load the model."""
    options = session_options()
    options.log_severity_level = 3
    # A plan of where tensors lie saves nothing where nearly all of them are outputs, and costs a tenth of the time.
    options.enable_mem_pattern = False
    # An arena is faster, and keeps for each session what it once had.
    options.enable_cpu_mem_arena = arena
    if not integer_kernels_are_exact():
        options.add_session_config_entry(*DECODED)
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    # Threads that wait leave their core to the counting.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return session_over(proto, weights, options, settings.calibration.providers)
    except Exception as error:
        raise QuarkError(f"ONNX Runtime does not load the model: {reason(error)}") from error
