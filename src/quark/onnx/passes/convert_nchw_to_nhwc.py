"""Makes the image inputs of a model NHWC: a Transpose to NCHW stands after each."""

from __future__ import annotations

import onnx_ir as ir

from quark.errors import ConfigError
from quark.onnx.graph.edit import is_op

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


def convert_nchw_to_nhwc(model: ir.Model) -> int:
    """Convert every input of four dimensions; return how many were not NHWC yet. The model then takes NHWC data.

    Raises:
        ConfigError: No input has four dimensions.
    """
    images = channels_first(model)
    for value in images:
        _convert(model.graph, value)
    return len(images)


def channels_first(model: ir.Model) -> list[ir.Value]:
    """Return the inputs of four dimensions that are not NHWC yet. Raises ConfigError where none has four."""
    images = [v for v in model.graph.inputs if v.shape is not None and len(v.shape) == 4 and not v.is_initializer()]
    if not images:
        shapes = ", ".join(f"{value.name} {value.shape}" for value in model.graph.inputs)
        raise ConfigError(f"ConvertNCHWToNHWC: no input has four dimensions; the model has {shapes}.")
    return [value for value in images if not _is_nhwc(value)]


def _is_nhwc(value: ir.Value) -> bool:
    """Return True where all that reads an input is a Transpose to NCHW."""
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(
        is_op(node, "Transpose") and tuple(node.attributes.get_ints("perm", ())) == TO_NCHW for node in readers
    )


def _convert(graph: ir.Graph, value: ir.Value) -> None:
    readers = list(value.uses())
    node = ir.node("Transpose", [value], {"perm": list(TO_NCHW)}, name=f"{value.name}_to_nchw")
    output = node.outputs[0]
    output.name, output.type, output.shape = f"{value.name}_nchw", value.type, value.shape
    assert value.shape is not None
    value.shape = ir.Shape([value.shape[axis] for axis in TO_NHWC])
    graph.insert_before(graph[0], [node])
    for use in readers:
        use.node.replace_input_with(use.idx, output)
