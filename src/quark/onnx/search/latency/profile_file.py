"""Profile file: the times of kernels on one machine, as JSON that may be carried to another.

    {"format": "quark profile 1", "machine": {"cpu", "onnxruntime", "threads"},
     "kernels": {operator, attributes, types and shapes: seconds}, "conversions": {kind: [fixed, per value]}}

What a machine measured before, be it for another model, is not measured again. Times that are added to such are told at
the pace that those were taken at: a busy machine is slower in all,

    seconds = seconds now / pace        pace = median of (seconds now / seconds known) of the kernels that are known

On another machine a profile is used as it is: nothing of this one is mixed into it. What it takes to quantize, to
decode and to lay out a tensor anew follows from a few that are timed:

    seconds = fixed + per_value * values

The two numbers are those of least squares of the relative errors, neither of them below zero.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.base.files import atomic_file, require_regular
from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.base.native import cache_folder
from quark.errors import ConfigError, FormatError, OutputError, QuarkError
from quark.onnx.config.settings import MeasurementSettings
from quark.onnx.search.latency.kernels import ProfiledModel, Timer

KINDS = {
    "QuantizeLinear": "QuantizeLinear",
    "DequantizeLinear": "DequantizeLinear",
    "Transpose": "Transpose",
    "ReorderInput": "Reorder",
    "ReorderOutput": "Reorder",
}
"""Op type of a kernel -> the conversion that it is."""
_SIDES = (8, 32, 128, 256)
"""Heights of the images that are converted: from what fits the first cache to what fits none."""
CHANNELS = 16
"""A multiple of what blocked layouts have in a block."""


@dataclass(frozen=True)
class Line:
    """Seconds of a conversion: `fixed + per_value * values`."""

    fixed: float
    per_value: float

    def __call__(self, values: int) -> float:
        return self.fixed + self.per_value * values


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (values, seconds)."""
    if not points:
        return Line(0.0, 0.0)
    values, seconds = (np.asarray(column, np.float64) for column in zip(*points, strict=True))
    weights = 1 / np.maximum(seconds, 1e-7)  # the runtime counts in microseconds
    columns = np.stack([np.ones_like(values), values], axis=1) * weights[:, None]
    fixed, slope = np.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if slope < 0:
        return Line(float(seconds.mean()), 0.0)
    if fixed < 0:
        relative = columns[:, 1]
        return Line(0.0, float(relative @ (seconds * weights) / (relative @ relative)))
    return Line(float(fixed), float(slope))


def probes(threads: int) -> Iterator[ProfiledModel]:
    """Convolutions in float and in integers, whose runs have every conversion."""
    for side in _SIDES:
        feed = {"x": np.linspace(-1, 1, CHANNELS * side * side, dtype=np.float32).reshape(1, CHANNELS, side, side)}
        for quantized in (False, True):
            yield ProfiledModel(_convolution(side, quantized), feed, threads)


def lines(models: Sequence[ProfiledModel], times: Sequence[Mapping[str, float]]) -> dict[str, Line]:
    """The line of each conversion, from the kernels of the probes."""
    points: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS.values()}
    for model, seconds in zip(models, times, strict=True):
        for kernel in model.kernels:
            if kernel.op_type in KINDS:
                points[KINDS[kernel.op_type]].append((kernel.elements, seconds[kernel.name]))
    return {kind: fit(found) for kind, found in points.items()}


def _convolution(side: int, quantized: bool) -> ir.Model:
    shape = [1, CHANNELS, side, side]
    x = ir.val("x", ir.DataType.FLOAT, shape)
    weight = np.linspace(-1, 1, CHANNELS * CHANNELS, dtype=np.float32).reshape(CHANNELS, CHANNELS, 1, 1)
    constants, nodes = dict[str, ir.Value](), list[ir.Node]()

    def add(name: str, array: Any) -> ir.Value:
        constants[name] = ir.val(name, const_value=ir.tensor(array, name=name))
        return constants[name]

    def node(op_type: str, *inputs: ir.Value) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, name=f"{op_type}_{len(nodes)}"))
        nodes[-1].outputs[0].name = f"t{len(nodes)}"
        return nodes[-1].outputs[0]

    if quantized:
        scale = add("scale", np.float32(0.01))
        zero, signed = add("zero", np.uint8(128)), add("signed", np.int8(0))
        codes = add("codes", np.round(weight * 100).astype(np.int8))
        data = node("DequantizeLinear", node("QuantizeLinear", x, scale, zero), scale, zero)
        y = node("Conv", data, node("DequantizeLinear", codes, scale, signed))
        y = node("DequantizeLinear", node("QuantizeLinear", y, scale, zero), scale, zero)
    else:
        y = node("Conv", x, add("weight", weight))
    y.type, y.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph = ir.Graph([x], [y], nodes=nodes, initializers=list(constants.values()), opset_imports={"": 17}, name="probe")
    return ir.Model(graph, ir_version=8)


# The file ------------------------------------------------------------------------------------------------------------


SECONDS, PROBE_SECONDS = 1.5, 0.5
"""How long models run where none of their kernels is known, and how long the probes of conversions."""
FEWEST_KNOWN, LEAST_KNOWN = 3, 5e-6
"""Known kernels that tell the pace, and the seconds that each takes at least: the runtime counts in microseconds."""
MOST_KERNELS = 20_000
"""That are kept, the last ones: a few megabytes."""
FORMAT = "quark profile 1"
VARIABLE, OFF, NEW = "QUARK_KERNEL_TIMES", "off", "new"
"""The environment variable of the cache: off, it is neither read nor written; new, it begins anew with this process."""
CPU_INFO = Path("/proc/cpuinfo")
_VECTORS = re.compile(r"\b(?:avx\w*|amx\w*|asimd\w*|sve\w*|i8mm)\b")
"""The instructions that integer kernels are made of."""


@dataclass
class Profile:
    """The known times of the kernels of one machine.

    Attributes:
        path: Its file.
        machine: Its processor, version of ONNX Runtime, threads.
        kernels: Signature -> seconds.
        conversions: Kind -> the line of its time.
        cache: Whether nobody asked for the file: where it cannot be written, the times serve this run alone.
        kept: Whether it is written at all.
    """

    path: Path
    machine: dict[str, str]
    kernels: dict[str, float] = field(default_factory=dict)
    conversions: dict[str, Line] = field(default_factory=dict)
    cache: bool = False
    kept: bool = True

    def seconds(self, model: ProfiledModel) -> dict[str, float]:
        """The time of each kernel of a model, by its name."""
        return {kernel.name: self.kernels[kernel.signature] for kernel in model.kernels}

    def complete(
        self, models: Sequence[ProfiledModel], timer: Timer, seconds: float = SECONDS, conversions: bool = True
    ) -> None:
        """Time the kernels of some models that are not known yet, and the conversions, and write the file.

        Args:
            models: What to time.
            timer: Runs them.
            seconds: How long they run.
            conversions: Whether those are needed.

        Raises:
            ConfigError: It was measured on another machine.
        """
        missing = {kernel.signature for model in models for kernel in model.kernels} - set(self.kernels)
        conversions = conversions and not self.conversions
        if not missing and not conversions:
            logger.info("Times of kernels: all were known: %s.", self.path)
            return
        threads = int(self.machine["threads"])
        here = this_machine(threads)
        if self.machine != here:
            first = min(missing, default="conversions")
            raise ConfigError(
                f"{self.path} was measured on {self.machine}, and this is {here}. It lacks {len(missing)} kernels of "
                f"the model, which cannot be timed here: {first:.200}. Possible: quantize it once there, or another "
                "file."
            )
        if missing:
            self._time(models, missing, timer, seconds)
        if conversions:
            tests = list(probes(threads))
            self.conversions = lines(tests, timer(tests, PROBE_SECONDS))
        if self.kept:
            with suppress(OutputError) if self.cache else nullcontext():
                self.save()

    def _time(self, models: Sequence[ProfiledModel], missing: set[str], timer: Timer, seconds: float) -> None:
        """Add the missing times of kernels."""
        running = self._to_run(models, missing)
        found: dict[str, list[float]] = defaultdict(list)
        kernels = [kernel for model in running for kernel in model.kernels]
        new = sum(kernel.first for kernel in kernels if kernel.signature in missing)
        share = new / max(sum(kernel.first for kernel in kernels), 1e-9)
        for model, times in zip(running, timer(running, seconds * share), strict=True):
            for kernel in model.kernels:
                found[kernel.signature].append(times[kernel.name])
        now = {signature: sum(times) / len(times) for signature, times in found.items()}
        telling = self._telling(now)
        few = len(telling) < FEWEST_KNOWN
        paces = [now[signature] / self.kernels[signature] for signature in telling]
        pace = 1.0 if few else median(paces) or 1.0
        if self.kernels:
            logger.info("Times of kernels: %d are taken now; the others were known: %s.", len(missing), self.path)
        self.kernels |= {signature: now[signature] / pace for signature in missing}

    def _to_run(self, models: Sequence[ProfiledModel], missing: set[str]) -> Sequence[ProfiledModel]:
        """The models that have missing kernels; all of them where these have too few known ones to tell the pace."""
        lacking = [model for model in models if any(kernel.signature in missing for kernel in model.kernels)]
        signatures = {kernel.signature for model in lacking for kernel in model.kernels}
        return models if len(self._telling(signatures)) < FEWEST_KNOWN else lacking

    def _telling(self, signatures: Iterable[str]) -> list[str]:
        """Those that are known, and that take long enough to tell the pace."""
        return [signature for signature in signatures if self.kernels.get(signature, 0.0) >= LEAST_KNOWN]

    def save(self) -> None:
        """Write it, whole or not at all, with what another process may have added. Raises OutputError."""
        kernels, lines = self.kernels, self.conversions
        with suppress(QuarkError, OSError):
            other = Profile.load(self.path)
            if other.machine == self.machine:
                kernels, lines = other.kernels | kernels, other.conversions | lines
        conversions = {kind: [line.fixed, line.per_value] for kind, line in lines.items()}
        last = dict(list(kernels.items())[-MOST_KERNELS:])
        content = {"format": FORMAT, "machine": self.machine, "kernels": last, "conversions": conversions}
        with atomic_file(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file. Raises FormatError for one that is no profile."""
        require_regular(path)
        try:
            content = plain_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FormatError(f"{path} is no profile: {error}.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FormatError(f"{path} is no profile of this version ({FORMAT}). Possible: another name, or remove it.")
        parts = [content.get(key) for key in ("machine", "kernels", "conversions")]
        machine, kernels, conversions = (part if isinstance(part, dict) else {} for part in parts)
        valid = all(map(_is_time, kernels.values())) and all(map(_is_line, conversions.items()))
        if not (valid and all(isinstance(part, dict) for part in parts) and str(machine.get("threads")).isdecimal()):
            raise FormatError(f"{path} is damaged: its times are numbers of seconds, none of them below 0.")
        if conversions and (lacking := sorted({*KINDS.values()} - conversions.keys())):
            raise FormatError(f"{path} is damaged: of its conversions it lacks {', '.join(lacking)}.")
        return cls(path, machine, kernels, {kind: Line(*line) for kind, line in conversions.items()})


def open_profile(settings: MeasurementSettings) -> Profile:
    """The profile that is asked for; an empty one of this machine where there is no file yet.

    Raises:
        FormatError: The file was named, and is no profile.
        ConfigError: It is of another number of threads; or the variable of the cache has a value without a meaning.
    """
    machine = this_machine(settings.threads)
    if settings.profile is None:
        return _cached(default_path(machine), machine)
    path = Path(settings.profile)
    profile = Profile.load(path) if _exists(path) else Profile(path, machine)
    if profile.machine["threads"] != machine["threads"]:
        raise ConfigError(
            f"{path} was measured with {profile.machine['threads']} threads, and MeasureThreads is {settings.threads}. "
            "Possible: the same number, or another file."
        )
    return profile


def _cached(path: Path, machine: dict[str, str]) -> Profile:
    """The profile of the cache, which nobody asked for: one that cannot be read is measured again.

    Raises:
        ConfigError: Its variable has a value without a meaning.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", OFF, NEW):
        raise ConfigError(
            f"{VARIABLE} is {asked!r}. Possible: {OFF}, to keep no times of kernels; {NEW}, to time all again; or "
            "not set."
        )
    if asked == OFF:
        return Profile(path, machine, cache=True, kept=False)
    if asked == NEW:
        _clear_once(path)
    try:
        profile = Profile.load(path) if _exists(path) else Profile(path, machine)
        if profile.machine != machine:
            raise FormatError(f"{path} was measured on another machine.")
    except QuarkError as error:
        logger.info("Kernels are timed again: %s", error)
        profile = Profile(path, machine)
    profile.cache = True
    return profile


@cache
def _clear_once(path: Path) -> None:
    """Remove a cache, before the first times of this process: models that follow share what it measures."""
    with suppress(OSError):
        path.unlink()


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for a folder that may not be entered


def this_machine(threads: int) -> dict[str, str]:
    """Return what the times of kernels depend on beside their signature."""
    return {"cpu": _cpu(), "onnxruntime": onnxruntime.__version__, "threads": str(threads)}


def default_path(machine: dict[str, str]) -> Path:
    """The profile of a machine in the user's cache folder."""
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"profile_{name}.json"


def _cpu() -> str:
    """Name and vector instructions: virtual machines give one name to different processors."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    name = named.group(1) if named else platform.processor() or platform.machine()
    return " ".join([name, *sorted(set(_VECTORS.findall(text)))])


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_line(item: tuple[str, Any]) -> bool:
    kind, line = item
    return kind in KINDS.values() and isinstance(line, list) and len(line) == 2 and all(map(_is_time, line))
