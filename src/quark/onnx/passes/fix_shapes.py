"""Gives inputs and outputs fixed shapes: `name:[1,3,224,224];other:[1,10]`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from quark.errors import ConfigError, did_you_mean
from quark.onnx.graph.model_file import infer_shapes

ENTRY = re.compile(r"\s*(?P<name>.+?)\s*:\s*\[(?P<sizes>\s*\d+(\s*,\s*\d+)*)\s*\]\s*")


def _by_name(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    return {value.name or "": value for value in values}


def fix_shapes(model: ir.Model, shapes: str) -> int:
    """Fix the shapes of inputs and outputs, and of everything that has a dimension of the same name.

    Returns:
        How many inputs and outputs changed.

    Raises:
        ConfigError: The text is of another form, or a name or shape does not fit the model.
    """
    inputs = _by_name(value for value in model.graph.inputs if not value.is_initializer())
    ends = {**_by_name(model.graph.outputs), **inputs}
    asked = parse_shapes(shapes)
    for name in asked:
        if name not in ends:
            raise ConfigError(f"FixShapes names {name!r}, no input and no output. {did_you_mean(name, ends)}")
    known: dict[str, int] = {}
    before = {name: ends[name].shape for name in asked}
    for name, sizes in asked.items():
        _bind(ends[name], sizes, known)
    changed = [name for name, sizes in asked.items() if before[name] is None or list(before[name] or ()) != sizes]
    if not changed:
        return 0
    for name in asked.keys() & inputs:
        inputs[name].shape = ir.Shape(asked[name])
    _substitute(model, known)
    _infer_outputs(model, {name: sizes for name, sizes in asked.items() if name not in inputs})
    return len(changed)


def _infer_outputs(model: ir.Model, asked: dict[str, list[int]]) -> None:
    """Infer all shapes anew; the asked ones of outputs stand where they follow from nothing.

    Raises:
        ConfigError: What follows from the inputs is another shape than the one asked for.
    """
    outputs = {value.name or "": value for value in model.graph.outputs if value.name in asked}
    for value in outputs.values():
        value.shape = None
    infer_shapes(model)
    for name, sizes in asked.items():
        _bind(outputs[name], sizes, {})
        outputs[name].shape = ir.Shape(sizes)


def parse_shapes(text: str) -> dict[str, list[int]]:
    """Input name -> shape. Raises ConfigError for a text of another form."""
    shapes = {}
    for entry in filter(str.strip, text.split(";")):
        parsed = ENTRY.fullmatch(entry)
        if parsed is None:
            raise ConfigError(f"{entry.strip()!r} is no shape of an input; for one: 'input:[1,3,224,224]'.")
        shapes[parsed["name"]] = [int(size) for size in parsed["sizes"].split(",")]
    if not shapes:
        raise ConfigError(f"FixShapes={text!r} names no input; for one: 'input:[1,3,224,224]'.")
    return shapes


def _bind(value: ir.Value, sizes: list[int], known: dict[str, int]) -> None:
    """Learn what named dimensions become. Raises ConfigError where a shape contradicts the model."""
    if value.shape is None:
        return
    fits = len(value.shape) == len(sizes)
    for dimension, size in zip(value.shape, sizes, strict=False):
        symbol = dimension if isinstance(dimension, int) else dimension.value
        fixed = symbol if isinstance(symbol, int) else known.setdefault(symbol, size) if symbol else size
        fits = fits and fixed == size
    if not fits:
        given = ", ".join(f"{name}={size}" for name, size in known.items())
        raise ConfigError(f"FixShapes: {value.name} is {value.shape}{given and f' with {given}'}, not {sizes}.")


def _substitute(model: ir.Model, known: dict[str, int]) -> None:
    """Put numbers for named dimensions everywhere."""
    values = [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            sizes = [d if isinstance(d, int) else known.get(d.value or "", d) for d in value.shape]
            value.shape = ir.Shape(sizes)
