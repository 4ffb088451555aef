"""Saving and loading of graph models as files of torch.export: `{model_type}_quantized.pth`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import fx, nn

from quark.base.files import atomic_file
from quark.errors import ConfigError, FormatError, NotSupportedError, one_line
from quark.torch.graph.archived_code import refuse_code
from quark.torch.graph.training import allow_training, set_training
from quark.torch.model.folder_files import regular_file


def save_graph(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, path: Path) -> Path:
    """Export the quantized graph once more, quantizers and all, as operators of torch alone, and write it.

    Args:
        model: A graph from `quantize_model`, frozen or not; not changed.
        args, kwargs: Example inputs; sizes that were dynamic in the first export stay so.
        path: The file.

    Raises:
        NotSupportedError: The graph calls an operator of others, which no file may.
    """
    if not isinstance(model, fx.GraphModule) or not getattr(model, "quark_quantized", False):
        raise ConfigError("save_params in fx_graph_mode needs a graph from ModelQuantizer.quantize_model.")
    if args is None:
        raise ConfigError("save_params in fx_graph_mode needs args, the example inputs: it exports the graph again.")
    training = model.training
    set_training(model, False)
    try:
        with torch.no_grad():
            program = torch.export.export(
                model, tuple(args), dict(kwargs or {}), dynamic_shapes=_dynamic_shapes(model, args, kwargs or {})
            )
    finally:
        set_training(model, training)
    with atomic_file(path) as file:
        with file.open("wb") as stream:
            torch.export.save(program, stream)
        with file.open("rb") as stream:
            _require_loadable(stream)
    return path


def _require_loadable(stream: IO[bytes]) -> None:
    """Raise NotSupportedError for a file that `load_graph` would refuse."""
    try:
        refuse_code(stream)
    except FormatError as error:
        raise NotSupportedError(
            f"save_params cannot save this graph, as load_params would refuse it: {error}"
        ) from None


def load_graph(path: str | os.PathLike[str]) -> fx.GraphModule:
    """The model that `save_graph` wrote; it computes with the quantized values, and is not to be quantized again.

    Raises:
        FormatError: The file is missing, no file of torch.export, or would run code; nothing of it is run then.
    """
    try:
        with regular_file(Path(path)).open("rb") as stream:
            refuse_code(stream)
            model = torch.export.load(stream).module()
    except OSError as error:
        raise FormatError(f"{path!s} cannot be read: {error.strerror}.") from None
    except Exception as error:  # noqa: BLE001 - torch documents no error for a damaged file
        raise FormatError(f"{path!s} is not a file of save_params in fx_graph_mode: {one_line(error)}") from None
    assert isinstance(model, fx.GraphModule)
    allow_training(model)
    return model


def _dynamic_shapes(model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The dynamic sizes of the first export, in the nesting of the arguments."""
    sizes = []
    for node in model.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            sizes.append({i: torch.export.Dim.AUTO for i, size in enumerate(shape) if isinstance(size, torch.SymInt)})
    leaves, structure = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))
    if len(leaves) != len(sizes):
        raise ConfigError(f"args and kwargs hold {len(leaves)} inputs; the graph takes {len(sizes)}.")
    by_position, by_name = torch.utils._pytree.tree_unflatten(sizes, structure)
    if not by_name:
        return by_position
    names = list(model.graph._codegen.pytree_info.orig_args)  # type: ignore[attr-defined]
    return {**dict(zip(names, by_position, strict=False)), **by_name}
