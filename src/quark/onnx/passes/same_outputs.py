"""Checks that two forms of one model compute the same: both run on a sample of noise in ONNX Runtime, as they stand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quark.errors import StructureError
from quark.onnx.graph.model_file import split_weights
from quark.onnx.graph.sessions import session_over
from quark.onnx_ops.custom_libraries import session_options

_OPEN_SIZES = (4, 1)
"""Sizes for open dimensions of inputs: the first with which the model runs is taken."""
_NOISE = {"float16": 2e-2}
_FLOAT_NOISE = 1e-3
"""Relative to the norm of an output: kernels of two opsets may sum in different orders."""


def require_same(source: ir.Model, changed: ir.Model, what: str) -> None:
    """Compare the outputs of a model before and after a change; a model that does not run on noise gets no verdict.

    Raises:
        StructureError: An output differs by more than noise. The message begins with `what`.
    """
    before = _session(source)
    feed, expected = _first_run(before)
    if before is None or not expected or not _are_close(expected, _run(before, feed)):  # or it draws random numbers
        return
    names = [output.name for output in before.get_outputs()]
    del before
    found = _run(_session(changed), feed)
    for name, one, other in zip(names, expected, found, strict=False):
        if not _are_close([one], [other]):
            raise StructureError(
                f"{what}: its output {name!r} would change, as ONNX Runtime computes it. Possible: export the model "
                "again for this opset, or leave its opset unchanged."
            )


def _session(model: ir.Model) -> onnxruntime.InferenceSession | None:
    options = session_options()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    with suppress(Exception):  # of a model that the runtime does not load: it has no say
        return session_over(*split_weights(model), options)
    return None


def _first_run(session: onnxruntime.InferenceSession | None) -> tuple[dict[str, Any], list[Any]]:
    """The first sample on which a model runs, and its outputs."""
    for size in _OPEN_SIZES if session is not None else ():
        assert session is not None
        feed = {entry.name: _noise(entry, size, index) for index, entry in enumerate(session.get_inputs())}
        if any(array is None for array in feed.values()):
            break
        found = _run(session, feed)
        if found:
            return feed, found
    return {}, []


def _noise(entry: onnxruntime.NodeArg, size: int, seed: int) -> Any:
    """Normal floats, or zeros and ones; None for an input that is no tensor of numbers."""
    kind = entry.type.removeprefix("tensor(").removesuffix(")")
    shape = [n if isinstance(n, int) else size for n in entry.shape]
    generator = np.random.default_rng(seed)
    if kind in ("float", "float16", "double"):
        return generator.standard_normal(shape).astype({"float": "float32", "double": "float64"}.get(kind, kind))
    if kind == "bool" or kind.removeprefix("u").startswith("int"):
        return generator.integers(0, 2, shape).astype(kind)
    return None


def _run(session: onnxruntime.InferenceSession | None, feed: dict[str, Any]) -> list[Any]:
    """The outputs; none where the model fails."""
    with suppress(Exception):  # whatever the runtime says about noise that a model was not made for
        return list(session.run(None, feed)) if session is not None else []
    return []


def _are_close(expected: list[Any], found: list[Any]) -> bool:
    return all(_near(one, other) for one, other in zip(expected, found, strict=False))


def _near(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray) or one.dtype.kind not in "fiub":
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return bool(np.mean(one != other) <= 0.01) if one.size else True  # ties of noise may fall either way
    one, other, noise = one.astype(np.float64), other.astype(np.float64), _NOISE.get(one.dtype.name, _FLOAT_NOISE)
    finite = np.isfinite(one) & np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    return bool(np.linalg.norm(one[finite] - other[finite]) <= noise * np.linalg.norm(one[finite]) + 1e-6)
