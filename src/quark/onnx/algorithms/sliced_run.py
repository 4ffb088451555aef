"""Runs a graph in slices, so that its weights can change between them: each node once for each sample.

A slice is what a wanted tensor still needs. Of what it computes only the tensors that something later reads are kept,
for all samples; codes (what QuantizeLinear or a Cast to bfloat16 gives) are not, but computed again from what is.
A run in codes keeps these, in place of what they stand for: slices then begin and end as the integer kernels of the
runtime do, which compute them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.core.array import NumpyArray
from quark.onnx.calibration.data.samples import Samples, Store
from quark.onnx.graph.edit import reads_of
from quark.onnx.graph.proto_file import PLAIN
from quark.onnx.graph.sessions import integer_kernels_are_exact, open_session, run_sample
from quark.onnx.operators import QDQ
from quark.onnx_ops.saving import SMALL, stand_in

KEPT = ("FLOAT", "FLOAT16", "DOUBLE", "INT64", "INT32", "BOOL")
CODES = ("UINT8", "INT8", "UINT16", "INT16")
"""Types of codes that numpy has, too."""


def holds_codes(value: ir.Value) -> bool:
    """Return True where a QuantizeLinear gives a tensor of codes that numpy has; the type is that of its zero point."""
    node = value.producer()
    if node is None or node.op_type != "QuantizeLinear" or len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    zero = node.inputs[2].const_value
    return zero is not None and zero.dtype.name in CODES


def has_plain_codes(model: ir.Model) -> bool:
    """Return True where all codes of activations have a type of numpy, and are made by operators of every runtime."""
    for node in model.graph:
        if node.domain not in ("", "ai.onnx", "com.microsoft"):
            return False
        if node.op_type == "QuantizeLinear" and not holds_codes(node.outputs[0]):
            return False
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.BFLOAT16:
            return False
    return True


class SlicedRun:
    """One model, run over samples as far as was asked.

    Args:
        model: The model; weights and codes are read when the slice that uses them runs.
        data: The samples.
        count: How many of them are run, from the first.
        store: Where tensors wait; several walks may share it.
        goals: What will be asked for.
        in_codes: Whether codes are kept, of a model that `has_plain_codes`.
    """

    def __init__(
        self,
        model: ir.Model,
        data: Samples,
        count: int,
        store: Store,
        goals: Iterable[ir.Value],
        in_codes: bool = False,
    ) -> None:
        self.model, self.data, self.count, self.store, self.in_codes = model, data, count, store, in_codes
        self.goals = set(goals)
        self._reads = {node: list(reads_of(node)) for node in model.graph}
        self._order = {node: position for position, node in enumerate(self._reads)}
        self._static: set[ir.Node] = set()
        for node, values in self._reads.items():
            # The same for every sample: never kept for each.
            if all(_is_fixed(value) or value.producer() in self._static for value in values):
                self._static.add(node)
        self._readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
        for node, values in self._reads.items():
            for value in values:
                self._readers[value].append(node)
        self._stored: set[ir.Value] = set()
        self._constants: dict[ir.Value, NumpyArray] = {}
        self._todo = set(self._slice(self.goals, self._reads))

    def reach(self, goal: ir.Value) -> None:
        """Compute a goal for every sample; it is kept until it is released."""
        nodes = self._slice([goal], self._todo)
        if not nodes:
            return
        self._todo.difference_update(nodes)
        kept, again = self._frontier(nodes)
        for sample, arrays in enumerate(self._compute(nodes, kept)):
            for value, array in zip(kept, arrays, strict=True):
                self.store[self, sample, value] = array
        self._stored.update(kept)
        self._todo |= again
        self._forget()

    def peek(self, goal: ir.Value) -> Iterator[NumpyArray]:
        """A tensor of each sample in turn, with the weights of now; nothing is kept of it."""
        for (array,) in self._compute(self._slice([goal], self._reads), [goal]):
            yield array

    def release(self, goal: ir.Value) -> None:
        """Forget a goal, once nothing that is to come reads it."""
        self.goals.discard(goal)
        self._forget()

    def value(self, sample: int, value: ir.Value) -> NumpyArray:
        """A goal that was reached, or what needs no run."""
        if _is_fixed(value) and value.const_value is not None:
            return value.const_value.numpy()
        if value.is_graph_input():
            return self.data[sample][value.name or ""]
        return self.store[self, sample, value]

    def constant(self, value: ir.Value) -> NumpyArray:
        """An initializer as the next slice that reads it will: codes are computed once for both."""
        assert value.const_value is not None
        self._constants[value] = value.const_value.numpy()
        return self._constants[value]

    def _slice(self, goals: Iterable[ir.Value], among: Container[ir.Node]) -> list[ir.Node]:
        """The nodes, in order, that tensors need and that are not before a tensor that is stored."""
        found: set[ir.Node] = set()
        stack = [*goals]
        while stack:
            value = stack.pop()
            producer = value.producer()
            if value in self._stored or producer is None or producer in found or producer not in among:
                continue
            found.add(producer)
            stack += self._reads[producer]
        return sorted(found, key=self._order.__getitem__)

    def _frontier(self, nodes: Sequence[ir.Node]) -> tuple[list[ir.Value], set[ir.Node]]:
        """Return the tensors that are kept of a slice, and its nodes that run again, as their outputs are not."""
        inside, again = set(nodes), set[Any]()
        stack = [value for node in nodes for value in node.outputs if self._is_needed(value)]
        kept: dict[ir.Value, None] = {}
        while stack:
            value = stack.pop()
            producer = value.producer()
            if producer not in inside or producer in again or value in kept:
                continue
            assert producer is not None
            if self._is_kept(value, producer):
                kept[value] = None
            else:
                again.add(producer)
                stack += self._reads[producer]
        return list(kept), again

    def _is_kept(self, value: ir.Value, producer: ir.Node) -> bool:
        """Return True where a tensor is kept, False where it is computed again."""
        if value in self.goals:
            return True
        if producer in self._static:
            return False
        if self.in_codes and producer.op_type in QDQ:
            return holds_codes(value)
        return value.dtype is not None and value.dtype.name in KEPT

    def _forget(self) -> None:
        for value in [value for value in self._stored if not self._is_needed(value)]:
            for sample in range(self.count):
                self.store.pop((self, sample, value))
            self._stored.discard(value)

    def _is_needed(self, value: ir.Value) -> bool:
        """Return True for a goal, and for what a node reads that is yet to run."""
        return value in self.goals or any(node in self._todo for node in self._readers.get(value, ()))

    def _compute(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> Iterator[list[NumpyArray]]:
        """The outputs of a slice, sample by sample."""
        made = set(chain.from_iterable(node.outputs for node in nodes))
        read = dict.fromkeys(chain.from_iterable(self._reads[node] for node in nodes))
        inputs = [value for value in read if not _is_fixed(value) and value not in made]
        proto, weights = self._proto(nodes, inputs, [value for value in read if _is_fixed(value)], outputs)
        # A slice that begins after a DequantizeLinear, as one not in codes may, has no integers to compute with.
        in_float = not (self.in_codes and integer_kernels_are_exact())
        session = open_session(proto, threads=os.cpu_count() or 1, in_float=in_float, weights=weights)
        names = [value.name or "" for value in outputs]
        for sample in range(self.count):
            yield run_sample(session, names, {value.name or "": self.value(sample, value) for value in inputs})

    def _proto(
        self,
        nodes: Sequence[ir.Node],
        inputs: Sequence[ir.Value],
        constants: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
    ) -> tuple[onnx.ModelProto, dict[str, NumpyArray]]:
        """Nodes as a model that names its large constants as external, and their arrays by name."""
        proto = onnx.ModelProto(ir_version=self.model.ir_version)
        proto.opset_import.extend(
            onnx.helper.make_opsetid(domain, version) for domain, version in self.model.opset_imports.items()
        )
        proto.functions.extend(ir.to_proto(function) for function in self.model.functions.values())
        graph = proto.graph
        graph.name = "slice"
        # Not `ir.to_proto`, which first finds out what it has: a third of the time of a sweep over small layers.
        graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
        for value in inputs:
            rank = None if value.shape is None else [None] * len(value.shape)
            graph.input.append(onnx.helper.make_tensor_value_info(value.name or "", self._kind(value), rank))
        weights: dict[str, NumpyArray] = {}
        for value in constants:
            tensor, name = value.const_value, value.name or ""
            assert tensor is not None
            # Read now: what is mapped from a file, or computed when it is read, becomes part of the slice.
            array = self._constants.pop(value, None)
            own: ir.TensorProtocol = ir.Tensor(
                tensor.numpy() if array is None else array, dtype=tensor.dtype, name=name
            )
            if tensor.dtype in PLAIN and own.nbytes >= SMALL:
                weights[name] = np.asarray(own.numpy(), order="C")
                own = stand_in(own, name)
            graph.initializer.append(ir.serde.serialize_tensor(own))
        graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in outputs)
        return proto, weights

    def _kind(self, value: ir.Value) -> int:
        """Element type, of TensorProto: that of the stored array where no inference knows the operator after it."""
        if value.dtype is not None:
            return value.dtype.value
        return onnx.helper.np_dtype_to_tensor_dtype(self.value(0, value).dtype)


def _is_fixed(value: ir.Value) -> bool:
    return value.producer() is None and value.const_value is not None and not value.is_graph_input()
