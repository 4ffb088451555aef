"""Calibration data of a body of If, Loop or Scan: what it reads, each time that the float model runs it.

The model around gives the inputs of the node and the captured tensors. A branch is fed where the condition chooses it.
A Loop or Scan is run step by step: what one step gives is the state of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import Feed
from quark.onnx.config.settings import Settings
from quark.onnx.flow.body_model import Body, as_model
from quark.onnx.graph.model_file import constant
from quark.onnx.graph.sessions import run_sample

Step = Callable[[Feed], list[NumpyArray]]
"""One run of a body: its outputs."""


def _name(value: ir.Value) -> str:
    return value.name or ""


def _held(values: Iterable[ir.Value]) -> dict[str, NumpyArray]:
    """What constants hold, and inputs that have a default."""
    defaults = {_name(value): value.const_value.numpy() for value in values if value.const_value is not None}
    return defaults | {_name(value): constant(value) for value in values if constant(value) is not None}


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
        held = _held(read)
        with ExitStack() as stack:
            session = stack.enter_context(model_session(self._around, wanted, self._settings))
            step = None if self._body.node.op_type == "If" else self._step(stack)
            for feed in self._data:
                found = run_sample(session, wanted, feed) if wanted else []
                values = {**held, **feed, **dict(zip(wanted, found, strict=True))}
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
            own = self._named([np.asarray(count, np.int64), condition, *states])
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
            own = self._named([*states, *map(np.ascontiguousarray, parts)])
            yield own
            states = step({**captured, **own})[: len(states)]

    def _named(self, arrays: list[Any]) -> Feed:
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
