"""Turns a graph between evaluation and training: torch.export records the mode in the arguments of operators."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import fx

from quark.torch.graph.operators import BATCH_NORM, DROPOUT, is_call

FLAGS = {BATCH_NORM: 5, DROPOUT: 2}
"""Position of the argument `training`."""
PRESERVED = "_user_preserved_attributes"
"""Key of GraphModule.meta under which torch.fx keeps attributes that a deep copy takes along."""


def set_training(model: fx.GraphModule, mode: bool = True) -> fx.GraphModule:
    """Switch the dropouts and norms of a graph as `train` and `eval` of an nn.Module do, and return the graph."""
    for node in model.graph.nodes:
        if is_call(node, *FLAGS):
            node.update_arg(FLAGS[str(node.target)], mode)
    model.recompile()
    for module in model.modules():
        module.training = mode
    return model


def allow_training(model: fx.GraphModule) -> None:
    """Give the model `train` and `eval`, which those of torch.export refuse."""

    def train(self: fx.GraphModule, mode: bool = True) -> fx.GraphModule:
        return set_training(self, mode)

    def evaluate(self: fx.GraphModule) -> fx.GraphModule:
        return set_training(self, False)

    keep(model, "train", MethodType(train, model))
    keep(model, "eval", MethodType(evaluate, model))


def keep(model: fx.GraphModule, name: str, value: Any) -> None:
    """Set an attribute that a deep copy keeps."""
    model.meta.setdefault(PRESERVED, {})[name] = value
    setattr(model, name, value)


def drop_counters(model: fx.GraphModule) -> None:
    """Remove what a graph exported in training mode counts: batches seen by its norms."""
    for node in reversed(list(model.graph.nodes)):
        counter = node.args[0] if is_call(node, "aten.add_.Tensor") else None
        if isinstance(counter, fx.Node) and str(counter.target).endswith("num_batches_tracked") and not node.users:
            model.graph.erase_node(node)
