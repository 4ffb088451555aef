"""export_for_training: a model as the exported program that graph mode takes, under the name that scripts use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def export_for_training(
    mod: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """`torch.export.export`, of which every version of torch has the operators that training can run.

    Args:
        mod: The model, in evaluation mode for quantization without training.
        args, kwargs: Example arguments of its forward.
        dynamic_shapes: Axes of any length, as for `torch.export.export`.

    Returns:
        The program; its `.module()` is what `quantize_model` takes in fx_graph_mode.
    """
    return torch.export.export(mod, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
