"""Gives a model fixed shapes: of the inputs and outputs that are named, and of all tensors that follow from them."""

from __future__ import annotations

import onnx_ir as ir

from quark.errors import ConfigError
from quark.onnx.graph.model_file import infer_shapes
from quark.onnx.passes import PASSES
from quark.onnx.passes.fix_shapes import parse_shapes


def assign_shapes(model: ir.Model, fix_shapes: str = "") -> int:
    """Assign the shapes that are asked for and all that follow from them; return how many tensors changed.

    Raises:
        ConfigError: A name is neither an input nor an output, or a shape contradicts the model.
    """
    before = _shapes(model)
    wanted = parse_shapes(fix_shapes) if fix_shapes.strip() else {}
    outputs = {value.name: value for value in model.graph.outputs}
    inputs = {name: sizes for name, sizes in wanted.items() if name not in outputs}
    if inputs:
        PASSES["fix_shapes"](model, ";".join(f"{name}:{sizes}" for name, sizes in inputs.items()))
    for name, sizes in wanted.items():
        if name in outputs:
            value = outputs[name]
            old = [None] * len(sizes) if value.shape is None else list(value.shape)
            if len(old) != len(sizes) or any(isinstance(k, int) and k != s for k, s in zip(old, sizes, strict=True)):
                raise ConfigError(f"The output {name} is {value.shape}, not {sizes}.")
            value.shape = ir.Shape(sizes)
    infer_shapes(model)
    after = _shapes(model)
    return sum(after[name] != before.get(name) for name in after)


def _shapes(model: ir.Model) -> dict[str | None, str]:
    values = (*model.graph.inputs, *(value for node in model.graph for value in node.outputs))
    return {value.name: str(value.shape) for value in values}
