"""Tensors that stay in float for what calibration saw of them: masks, and what is empty in every sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.base.log import logger
from quark.core.observers import Observer
from quark.errors import CalibrationError
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.masks import Range, added_masks, limit
from quark.onnx.placement.placement import Placement


def with_values(observers: Mapping[ir.Value, Observer], placement: Placement) -> dict[ir.Value, Observer]:
    """The observers of tensors that have values in some sample; others stay in float, as no range is theirs.

    A cache of keys and values before the first token is such a tensor, and has values later.

    Raises:
        CalibrationError: None has any.
    """
    empty = {root for root, observer in observers.items() if observer.low is None}
    if len(empty) == len(observers):
        raise CalibrationError("No calibration sample has values: every tensor of a static scale is empty in all.")
    if empty:
        placement.leave_in_float(empty)
        names = ", ".join(sorted(root.name or "" for root in empty))
        logger.info("These tensors have no values in any calibration sample, and stay in float: %s.", names)
    return {root: observer for root, observer in observers.items() if root not in empty}


def leave_masks_in_float(
    graph: ir.Graph, observers: Mapping[ir.Value, Observer], placement: Placement, made: Collection[ir.Value]
) -> set[ir.Value]:
    """Take what carries an attention mask, or NaN that is meant, out of a placement: no scale serves it.

    Args:
        graph: Of the float model.
        observers: What was seen of the tensors that stand for a class.
        placement: Changed in place: activations and constants.
        made: The tensors on the way from an input that masks to a Softmax, which bare samples do not show.

    Returns:
        Those of the observed tensors that are taken out.
    """
    masks = {root for root, observer in observers.items() if _carries_mask(observer, placement.half)}
    ends = {root: (np.asarray(observer.low), np.asarray(observer.high)) for root, observer in observers.items()}
    nan = {root for root, (low, high) in ends.items() if np.isnan(low).any() or np.isnan(high).any()}
    if nan:
        members = [value for value in placement.activations if placement.root(value) in nan]
        masks |= nan - {placement.root(value) for value in set(members) - _meant_nan(graph)}
    added = added_masks(graph, partial(_observed_range, observers, placement)) | set(made)
    masks |= {placement.root(value) for value in added} & set(observers)
    placement.leave_in_float(masks | added)
    return masks


def _observed_range(observers: Mapping[ir.Value, Observer], placement: Placement, value: ir.Value) -> Range | None:
    observer = observers.get(placement.root(value)) if value in placement.activations else None
    if observer is None or observer.low is None or observer.high is None:
        return None
    return float(np.min(np.asarray(observer.low))), float(np.max(np.asarray(observer.high)))


def _carries_mask(observer: Observer, half: bool) -> bool:
    """True for a tensor with -3e38 or -inf, which is an attention mask wherever it stands.

    NaN and +inf are no mask: an observer refuses them.
    """
    low, high = np.asarray(observer.low), np.asarray(observer.high)
    if np.isnan(low).any() or np.isnan(high).any() or (high == np.inf).any():
        return False
    largest = limit("float16" if half else "float32")
    return bool((abs(low) > largest).any() or (abs(high) > largest).any())


def _meant_nan(graph: ir.Graph) -> set[ir.Value]:
    """The tensors in which NaN is meant: the model replaces it wherever it gets to, or gives it as an output at once.

    A Softmax of rows that are masked as a whole is NaN, and exporters write Where(IsNaN(p), 0, p) after it.
    """
    meant: set[ir.Value] = set()

    def is_replaced(value: ir.Value, node: ir.Node, beside: set[str]) -> bool:
        if is_op(node, "IsNaN") or (is_op(node, "Where") and "IsNaN" in beside):
            return True
        return all(output in meant and output.uses() for output in node.outputs)

    for node in reversed(graph):
        for value in node.outputs:
            beside = {use.node.op_type for use in value.uses()}
            if all(is_replaced(value, use.node, beside) for use in value.uses()):
                meant.add(value)
    return meant


def final_range(observer: Observer, mask: bool) -> tuple[float, float]:
    """The range that a scale is made of; of a mask, the one that shows that it is none of a scale."""
    if not mask:
        low, high = observer.range()
        return float(low), float(high)
    largest = float(np.finfo(np.float32).max)
    low, high = np.clip(np.asarray([observer.low, observer.high], np.float64).reshape(2), -largest, largest)
    return float(low), float(high)
