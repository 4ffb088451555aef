"""FloatBodies: the bodies of If, Loop and Scan, each quantized as a model of its own.

Its calibration data are what the body reads when the float model around it runs; bodies within it come after it. What
no calibration sample runs stays in float, where ranges are needed: nothing says which.

The model around gives the inputs of the node and the captured tensors. A branch is fed where the condition chooses it.
A Loop or Scan is run step by step: what one step gives is the state of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.errors import CalibrationError, NothingToQuantizeError, QuarkError
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.calibration.data.readers import is_alive
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.calibration.statistics import fingerprint
from quark.onnx.config.settings import Settings
from quark.onnx.flow.body_model import Body, as_model, bodies_of, put_back
from quark.onnx.flow.prepare import prepare_body
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.scopes import nodes_of
from quark.onnx.graph.sessions import run_sample

Convert = Callable[[Prepared, Settings], ir.Model]
"""Quantizes a prepared model: `search/settle.py`, which calls this."""


class FloatBodies:
    """The bodies of a model, beside a copy of the float model, whose nodes give them their data.

    Args:
        model: The float model; what becomes of it later does not change the copy.
        settings: Which nodes stay in float, and so do their bodies.
    """

    def __init__(self, model: ir.Model, settings: Settings) -> None:
        bodies = bodies_of(model.graph)
        excluded = nodes_of(settings.specs.exclude, model, "exclude", bodies=True) if bodies else set[ir.Node]()
        self._float = model.clone() if bodies else model
        pairs = zip(bodies, bodies_of(self._float.graph), strict=True)
        self._pairs = [(body, original) for body, original in pairs if body.node not in excluded]

    def __len__(self) -> int:
        return len(self._pairs)

    def quantize(self, around: Prepared, settings: Settings, convert: Convert) -> int:
        """Quantize them within a model.

        Args:
            around: The model, by now quantized, which is changed in place, with its calibration data.
            settings: Those of the model.
            convert: Quantizes a body as a model.

        Returns:
            How many were quantized.
        """
        count = 0
        for body, original in self._pairs:
            if body.node.graph is None:
                continue  # nothing reads what the node gives
            copied = as_model(original, self._float)
            feeds = None if around.data is None else BodyFeeds(self._float, original, around.data, settings)
            if _quantize_body(Prepared(copied.model, feeds, "", around.statistics), original, settings, convert):
                put_back(body, original, copied, around.model)
                count += 1
        return count


def _quantize_body(prepared: Prepared, body: Body, settings: Settings, convert: Convert) -> bool:
    """Quantize a body as a model, in place; False where there is nothing to quantize, or no data for it."""
    model, own = prepared.model, _settings(settings, body)
    feeds = None if _takes_others(model) else prepared.data
    first = None if feeds is None else next(iter(feeds), None)
    for value in model.graph.inputs:
        if value.type is None and first is not None:
            value.type = ir.TensorType(ir.DataType.from_numpy(first[value.name or ""].dtype))
    identity = fingerprint(model) if own.calibration.statistics else ""
    try:
        prepare_body(model, own)
        convert(replace(prepared, data=None if first is None else feeds, identity=identity), own)
    except NothingToQuantizeError:
        return False
    except QuarkError as error:
        why = _why_without_data(model, feeds, settings, own) if isinstance(error, CalibrationError) else None
        if why is None:
            raise type(error)(f"{body}: {error}") from error
        logger.warning("%s stays in float: %s.", body, why)
        return False
    return True


def _takes_others(model: ir.Model) -> bool:
    """Return True where an input is a sequence or an optional, which no sample holds."""
    return any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in model.graph.inputs)


def _why_without_data(model: ir.Model, feeds: BodyFeeds | None, settings: Settings, own: Settings) -> str | None:
    """Why a body has no calibration data, by no fault of the data; None where it has some, or should have."""
    if _takes_others(model):
        return "an input of it is a sequence or an optional, of which there are no samples"
    if feeds is None:
        # Whether statistics were written for the graph around a body, and none for it, as no sample ran it.
        around, inside = settings.calibration.statistics, own.calibration.statistics
        never_seen = around is not None and inside is not None and Path(around).exists() and not Path(inside).exists()
        return "there are no statistics of it" if never_seen else None
    if next(iter(feeds), None) is None:
        return "no calibration sample runs it"
    # An initial state is zero in every sample of a model that is used step by step.
    return None if any(map(is_alive, feeds)) else "all that it reads is zero in the calibration samples"


def _settings(settings: Settings, body: Body) -> Settings:
    """The settings of a body: as those around it, files of calibration apart."""
    calibration = replace(
        settings.calibration,
        samples=None,
        random_data=False,
        statistics=_file_of_body(settings.calibration.statistics, body),
        range_file=_file_of_body(settings.calibration.range_file, body),
    )
    # Names that a search adds are of nodes around the body; what a user names is resolved to nodes by now.
    inside = {node.name for node in body.graph.all_nodes()}
    exclude = tuple(scope for scope in settings.specs.exclude if not isinstance(scope, str) or scope in inside)
    specs = replace(settings.specs, exclude=exclude, bodies=True, is_body=True)
    # Presets and scripts name algorithms for all: not each body has something for them.
    return replace(settings, specs=specs, calibration=calibration, allow_noop=True)


def _file_of_body(path: str | None, body: Body) -> str | None:
    """The file of a body beside that of the graph around it: bodies may have tensors of the same names."""
    if path is None:
        return None
    file = Path(path)
    return str(file.with_name(f"{file.stem}.{quote(str(body), safe='')}{file.suffix}"))


# What bodies read -----------------------------------------------------------------------------------------------------


Step = Callable[[Feed], list[NumpyArray]]
"""One run of a body: its outputs."""


def _name(value: ir.Value) -> str:
    return value.name or ""


class BodyFeeds:
    """The samples of a body, as often as they are asked for; computed anew each time.

    Args:
        around: The float model whose node holds the body. It must stay as it is.
        body: The body.
        data: Samples of `around`.
        settings: Providers.
    """

    def __init__(self, around: ir.Model, body: Body, data: Iterable[Feed], settings: Settings) -> None:
        self._around, self._body, self._data, self._settings = around, body, data, settings
        self._copy = as_model(body, around)
        self._inputs = list(self._copy.model.graph.inputs)

    def __iter__(self) -> Iterator[Feed]:
        read = [value for value in (*self._body.node.inputs, *self._copy.captured.values()) if value is not None]
        given = {value.name for value in self._around.graph.inputs}
        wanted = list(dict.fromkeys(_name(v) for v in read if constant(v) is None and v.name not in given))
        known = _known_values(read)
        with ExitStack() as stack:
            session = stack.enter_context(model_session(self._around, wanted, self._settings))
            step = None if self._body.node.op_type == "If" else self._step(stack)
            for feed in self._data:
                found = run_sample(session, wanted, feed) if wanted else []
                values = {**known, **feed, **dict(zip(wanted, found, strict=True))}
                captured = {name: values[_name(value)] for name, value in self._copy.captured.items()}
                inputs = [None if value is None else values[_name(value)] for value in self._body.node.inputs]
                yield from ({**captured, **own} for own in self._runs(inputs, captured, step))

    def _step(self, stack: ExitStack) -> Step:
        model = self._copy.model
        session = stack.enter_context(model_session(model, [], self._settings))
        outputs = [value.name or "" for value in model.graph.outputs]
        return lambda feed: run_sample(session, outputs, feed)

    def _runs(self, inputs: list[Any], captured: Feed, step: Step | None) -> Iterator[Feed]:
        """The body's own inputs at each of its runs for one sample."""
        if step is None:
            if bool(np.ravel(inputs[0])[0]) == (self._body.attribute == "then_branch"):
                yield {}
        elif self._body.node.op_type == "Loop":
            yield from self._loop(inputs, captured, step)
        else:
            yield from self._scan(inputs, captured, step)

    def _loop(self, inputs: list[Any], captured: Feed, step: Step) -> Iterator[Feed]:
        trips = None if inputs[0] is None else int(np.ravel(inputs[0])[0])
        condition = np.asarray(True if len(inputs) < 2 or inputs[1] is None else np.ravel(inputs[1])[0])
        states, count = inputs[2:], 0
        while bool(condition) and (trips is None or count < trips):
            own = self._own_inputs([np.asarray(count, np.int64), condition, *states])
            yield own
            outputs = step({**captured, **own})
            condition, states, count = np.ravel(outputs[0])[0], outputs[1 : 1 + len(states)], count + 1

    def _scan(self, inputs: list[Any], captured: Feed, step: Step) -> Iterator[Feed]:
        attributes = self._body.node.attributes
        scanned = attributes["num_scan_inputs"].as_int()
        states, sequences = inputs[: len(inputs) - scanned], inputs[len(inputs) - scanned :]
        axes = _integers(attributes, "scan_input_axes", scanned)
        backwards = _integers(attributes, "scan_input_directions", scanned)
        sequences = [np.moveaxis(array, axis, 0) for array, axis in zip(sequences, axes, strict=True)]
        sequences = [array[::-1] if back else array for array, back in zip(sequences, backwards, strict=True)]
        for parts in zip(*sequences, strict=True):
            own = self._own_inputs([*states, *map(np.ascontiguousarray, parts)])
            yield own
            states = step({**captured, **own})[: len(states)]

    def _own_inputs(self, arrays: list[Any]) -> Feed:
        """Arrays under the names of the body's own inputs, single values in the shape that it says."""
        feed: Feed = {}
        for value, array in zip(self._inputs[: self._copy.own], arrays, strict=True):
            single = np.size(array) == 1 and value.shape is not None and len(value.shape) < 2
            shape = np.shape(array) if value.shape is None or not single else (1,) * len(value.shape)
            feed[value.name or ""] = np.asarray(array).reshape(shape)
        return feed


def _integers(attributes: Mapping[str, ir.Attr], name: str, count: int) -> list[int]:
    """A list of an attribute, zeros where it is left out."""
    return list(attributes[name].as_ints()) if name in attributes else [0] * count


def _known_values(values: Iterable[ir.Value]) -> dict[str, NumpyArray]:
    """Values of constants, and of inputs that have a default, by name."""
    defaults = {_name(value): value.const_value.numpy() for value in values if value.const_value is not None}
    return defaults | {_name(value): constant(value) for value in values if constant(value) is not None}
