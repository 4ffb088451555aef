"""Bounds that owe nothing to quark: what plain rounding, written out here, leaves of the undamaged model.

    step = 2^ceil(log2(max |x| / 127))      x' = step * floor(x / step + 1/2)      8 bits, the coarsest grid of a preset
    step = max |row| / 127                                                         8 bits, a scale for each row

Each tensor of an ONNX model is rounded so, by operators that ONNX Runtime computes; a quantized one rounds fewer, and
finer. Of a folder the matrices are, by NumPy, and transformers runs it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.oracles import architecture, folder_outputs, onnx_outputs, sqnr

LEVELS = 127
"""Positive codes of 8 bits."""


def rounded_rows(x: Any, levels: int = LEVELS, group: int | None = None) -> Any:
    """An array, symmetrically rounded with a scale for each row, or each `group` of it where that divides it."""
    parts = x.reshape(-1, group) if group and x.shape[-1] % group == 0 else x.reshape(x.shape[0], -1)
    step = np.abs(parts).max(axis=1, keepdims=True) / levels
    return (np.rint(parts / np.where(step > 0, step, 1)) * step).reshape(x.shape).astype(x.dtype)


def folder_bound(source: Path, levels: int = LEVELS, group: int | None = None) -> float:
    """SQNR in dB of a float folder whose matrices are rounded, against itself; embeddings stay as they are."""
    import torch
    import transformers

    named = architecture(source)
    model = getattr(transformers, named).from_pretrained(source)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and id(parameter) not in tables:
                x = parameter.double().numpy().reshape(-1, parameter.shape[-1])
                parameter.copy_(torch.from_numpy(rounded_rows(x, levels, group)).reshape(parameter.shape))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sqnr(folder_outputs(source, named), folder_outputs(Path(folder), named))


def onnx_bound(file: Path, samples: Mapping[str, Any], rows: int) -> float:
    """SQNR in dB of a float ONNX model of which every tensor is rounded, against itself, on the first rows.

    Args:
        file: The model.
        samples: What the ranges are taken from.
        rows: How many of them are one feed.
    """
    import onnx

    model = onnx.load(file)
    _round_weights(model)
    feeds = [
        {name: array[at : at + rows] for name, array in samples.items()} for at in range(0, _length(samples), rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model.onnx"
        _round_activations(model, _ranges(model, feeds, copy))
        onnx.save(model, copy)
        both = onnx_outputs(file, feeds[0]), onnx_outputs(copy, feeds[0])
    return sqnr(*zip(*((x, y) for x, y in zip(*both, strict=True) if x.dtype.kind == "f"), strict=True))


def _length(samples: Mapping[str, Any]) -> int:
    return len(next(iter(samples.values())))


def _step(largest: float) -> float:
    return float(2.0 ** math.ceil(math.log2(largest / LEVELS))) if largest > 0 else 1.0


def _round_weights(model: Any) -> None:
    """Round what has two axes or more."""
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        x = numpy_helper.to_array(tensor)
        if x.dtype.kind == "f" and x.ndim > 1:
            step = _step(float(np.abs(x).max()))
            tensor.CopyFrom(numpy_helper.from_array((np.floor(x / step + 0.5) * step).astype(x.dtype), tensor.name))


def _ranges(model: Any, feeds: list[dict[str, Any]], file: Path) -> dict[str, tuple[float, int]]:
    """Largest absolute value and element type of what the nodes of the graph write, in float, over all feeds."""
    import onnx
    from onnx import TensorProto, helper, shape_inference

    inferred = shape_inference.infer_shapes(model)
    types = {
        info.name: info.type.tensor_type.elem_type for info in (*inferred.graph.value_info, *inferred.graph.output)
    }
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    names = [name for node in model.graph.node for name in node.output if types.get(name) in floats]
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    present = {info.name for info in model.graph.output}
    shown.graph.output.extend(helper.make_tensor_value_info(n, types[n], None) for n in names if n not in present)
    onnx.save(shown, file)
    order = [info.name for info in shown.graph.output]
    found = dict.fromkeys(names, 0.0)
    for feed in feeds:
        for name, array in zip(order, onnx_outputs(file, feed), strict=True):
            if name in found and array.size:
                found[name] = max(found[name], float(np.abs(array.astype(np.float64)).max()))
    return {name: (largest, types[name]) for name, largest in found.items() if math.isfinite(largest)}


def _round_activations(model: Any, ranges: Mapping[str, tuple[float, int]]) -> None:
    """Put the formula behind each node, under the name of what it wrote."""
    from onnx import helper

    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        rounded = []
        for index, name in enumerate(node.output):
            if name not in ranges:
                continue
            largest, kind = ranges[name]
            raw, step, half, a, b, c = (f"{name}_rounding_{part}" for part in ("raw", "step", "half", "a", "b", "c"))
            node.output[index] = raw
            for constant, value in ((step, _step(largest)), (half, 0.5)):
                model.graph.initializer.append(helper.make_tensor(constant, kind, [], [value]))
            rounded += [
                helper.make_node("Div", [raw, step], [a]),
                helper.make_node("Add", [a, half], [b]),
                helper.make_node("Floor", [b], [c]),
                helper.make_node("Mul", [c, step], [name]),
            ]
        model.graph.node.append(node)
        model.graph.node.extend(rounded)
