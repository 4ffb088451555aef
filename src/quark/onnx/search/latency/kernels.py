"""Kernels: what ONNX Runtime runs for a model, and how long each takes, from its own profile.

Each is timed in its place: in the layout that its neighbours leave to it, and with their data in the cache. A program
that takes the processor away lengthens some runs of some kernels, which the faster half of the runs of each leaves out;
in the time of a whole run there is no such half.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.errors import FormatError
from quark.onnx.calibration.data.own_time import own_time
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.proto_file import reason
from quark.onnx.graph.sessions import run_sample, session_over
from quark.onnx_ops.custom_libraries import session_options

SUFFIX = "_kernel_time"
TOKEN = re.compile(r"_token_\d+$")
"""The end of a name by which ONNX Runtime tells a node that it makes from others."""
BLOCKED, CHANNELS_LAST = "com.microsoft.nchwc", "com.ms.internal.nhwc"
"""Domains of kernels whose tensors lie otherwise than ONNX says."""


@dataclass(frozen=True)
class TimedKernel:
    """One kernel that the runtime calls.

    Attributes:
        name: Of its node in the optimised graph.
        op_type, domain: What it computes.
        inputs, outputs: Names of tensors.
        signature: Operator, attributes, types, shapes, and what bodies hold: equal kernels take equal times.
        first: Seconds of its first run, which warms up.
        elements: Values of its first output.
        other_layout: Whether its tensors have their channels last, or in blocks.
    """

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: str
    first: float
    elements: int
    other_layout: bool


class ProfiledModel:
    """A session that says which kernels it runs, and what these take.

    Args:
        model: Of any size; its weights are not copied.
        feed: The sample that it runs on.
        threads: Within an operator.

    Attributes:
        feed: The sample.
        kernels: In the order in which they run; those of bodies are part of the node around them.

    Raises:
        FormatError: ONNX Runtime does not load the model.
        CalibrationError: It fails on the sample.
    """

    def __init__(self, model: ir.Model, feed: Mapping[str, Any], threads: int = 1) -> None:
        self._proto, self._weights = split_weights(model)
        self.feed, self._threads = feed, threads
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "optimized.onnx"
            session = self.session(Path(folder), target)
            run_sample(session, None, feed)
            first = dict(reversed(_calls(session)))
            graph = onnx.load(target, load_external_data=False).graph
        self.kernels = [_kernel(node, first[node.name]) for node in graph.node if node.name in first]

    def session(self, folder: Path, optimized: Path | None = None) -> onnxruntime.InferenceSession:
        """A session that writes its profile into a folder."""
        options = session_options()
        options.log_severity_level = 4
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.data")
        try:
            return session_over(self._proto, self._weights, options)
        except Exception as error:
            raise FormatError(f"ONNX Runtime does not load the model to be timed: {reason(error)}") from error


Timer = Callable[[Sequence[ProfiledModel], float], list[dict[str, float]]]
"""Runs models for some seconds, and gives the time of each kernel of each."""


def timed(models: Sequence[ProfiledModel], seconds: float, least: int = 6, most: int = 60) -> list[dict[str, float]]:
    """The time of each kernel of some models, which run by turns, so that what slows the machine slows all.

    Args:
        models: What to run.
        seconds: Of this process, all together.
        least, most: Runs of each.
    """
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(number) for number in range(len(models))]
        for folder in folders:
            folder.mkdir()
        sessions = [model.session(folder) for model, folder in zip(models, folders, strict=True)]
        start, runs = own_time(), 0
        # The first run of a session warms up.
        while runs <= least or (runs <= most and own_time() - start < seconds):
            for model, session in zip(models, sessions, strict=True):
                run_sample(session, None, model.feed)
            runs += 1
        # Each session ends once its profile is read.
        return [_times(sessions.pop(0), model.kernels) for model in models]


def typical(seconds: Sequence[float]) -> float:
    """The mean of the faster half of some runs: finer than the microsecond in which the runtime counts."""
    faster = np.sort(np.asarray(seconds, np.float64))[: (len(seconds) + 1) // 2]
    return float(faster.mean())


def _times(session: onnxruntime.InferenceSession, kernels: Sequence[TimedKernel]) -> dict[str, float]:
    """Seconds of each kernel, the first run left out; of one that this session does not run those of its first run."""
    found: dict[str, list[float]] = {}
    for name, event in _calls(session, ("cat", "name", "dur")):
        found.setdefault(name, []).append(event["dur"] * 1e-6)
    names = same_kernels([kernel.name for kernel in kernels], list(found))
    return {
        kernel.name: typical(found[names[kernel.name]][1:]) if kernel.name in names else kernel.first
        for kernel in kernels
    }


def same_kernels(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """The names of kernels of one session -> those of the same kernels in another session of the model.

    What ONNX Runtime makes of the nodes of a model gets a number after their names, and the numbers of one session may
    be those of other kernels in the next: where they differ, the nth of a name is the nth of it.
    """
    found = {name: name for name in set(names).intersection(others)}
    if len(found) == len(names):
        return found
    numbered = [_by_node(each) for each in (names, others)]
    for node, its in numbered[0].items():
        if len(its) == len(numbered[1].get(node, ())):
            found |= zip(its, numbered[1][node], strict=True)
    return found


def _by_node(names: Sequence[str]) -> dict[str, list[str]]:
    """The names with a number, in order, by what stands before it."""
    found: dict[str, list[str]] = {}
    for name in names:
        if TOKEN.search(name):
            found.setdefault(TOKEN.sub("", name), []).append(name)
    return found


def _calls(session: onnxruntime.InferenceSession, kept: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(name of a kernel, event) of each call so far, of an event what is `kept`; none: all. The profile then ends."""

    def keep(found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in kept if name in found} if kept else found

    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"), object_hook=keep)
    calls = (event for event in events if event.get("cat") == "Node" and event["name"].endswith(SUFFIX))
    return [(event["name"].removesuffix(SUFFIX), event) for event in calls]


def _kernel(node: onnx.NodeProto, event: Mapping[str, Any]) -> TimedKernel:
    shapes = event["args"]
    attributes = sorted(f"{attribute.name}={_text(attribute)}" for attribute in node.attribute)
    described = (_shapes(shapes["input_type_shape"]), _shapes(shapes["output_type_shape"]))
    first: Sequence[int] = next((shape for entry in shapes["output_type_shape"][:1] for shape in entry.values()), [])
    return TimedKernel(
        node.name,
        node.op_type,
        node.domain,
        tuple(node.input),
        tuple(node.output),
        f"{node.domain}:{node.op_type}({', '.join(attributes)}) {described[0]} -> {described[1]}",
        event["dur"] * 1e-6,
        math.prod(first),
        node.domain in (BLOCKED, CHANNELS_LAST)
        or node.op_type == "QLinearConv"
        or any(a.name == "channels_last" and a.i for a in node.attribute),
    )


def _text(attribute: onnx.AttributeProto) -> str:
    """The value of an attribute; of a body or a tensor its hash: two loops of equal shapes may do anything."""
    kind = onnx.AttributeProto
    if attribute.type in (kind.GRAPH, kind.GRAPHS, kind.TENSOR, kind.TENSORS):
        return hashlib.sha256(attribute.SerializeToString(deterministic=True)).hexdigest()[:16]
    return str(onnx.helper.get_attribute_value(attribute))


def _shapes(entries: Sequence[Mapping[str, Sequence[int]]]) -> str:
    return ", ".join(f"{kind}{list(shape)}" for entry in entries for kind, shape in entry.items())
