"""Splits a GlobalAveragePool over more than 512 pixels in two: a mean of means of equally many values is their mean."""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.edit import dims, insert, is_op

_LARGEST_KERNEL = 512


def split_large_pool(model: ir.Model) -> int:
    """Put an AveragePool before every large GlobalAveragePool whose size has the factors; return how many."""
    count = 0
    for node in [node for node in model.graph if is_op(node, "GlobalAveragePool")]:
        shape = dims(node.inputs[0])
        if shape is None or len(shape) != 4 or shape[2] is None or shape[3] is None:
            continue
        kernel = _first_kernel(shape[2], shape[3])
        if kernel is None:
            continue
        attributes = {"kernel_shape": kernel, "strides": kernel}
        value = insert(node, "AveragePool", [node.inputs[0]], attributes, f"{node.name}_first")
        value.type = node.outputs[0].type
        node.replace_input_with(0, value)
        value.shape = ir.Shape([*shape[:2], shape[2] // kernel[0], shape[3] // kernel[1]])
        count += 1
    return count


def _first_kernel(height: int, width: int) -> list[int] | None:
    """The smallest kernel that divides the image and leaves one of at most 512 pixels, itself no larger."""
    if height * width <= _LARGEST_KERNEL:
        return None
    sizes = [(h * w, h, w) for h in _divisors(height) for w in _divisors(width)]
    fitting = [s for s in sizes if s[0] <= _LARGEST_KERNEL and height * width // s[0] <= _LARGEST_KERNEL]
    return list(min(fitting, key=lambda s: (s[0], abs(s[1] - s[2])))[1:]) if fitting else None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
