"""save_params and load_params: any quantized module as one JSON file and one safetensors file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from quark.base.files import atomic_file, digest_of
from quark.base.json_objects import plain_json
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.importer import load_into
from quark.torch.checkpoint.loading import FAKE_QUANTIZED, REAL_QUANTIZED
from quark.torch.checkpoint.shards import entries, save_tensors
from quark.torch.config.config import QConfig
from quark.torch.config.tensor.enums import QuantizationMode
from quark.torch.formats import FORMATS
from quark.torch.graph.saving import load_graph, save_graph
from quark.torch.layers.low_rank import record_branches
from quark.torch.layers.online_rotation import record_rotations
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks.offloading import with_weights
from quark.torch.model.folder_files import regular_file
from quark.torch.plan import Plan


@with_weights
def save_params(
    model: nn.Module,
    model_type: str,
    args: Any = None,
    kwargs: Any = None,
    export_dir: str | os.PathLike[str] | None = None,
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> Path:
    """Write `{model_type}.json` (config and structure) and `{model_type}.safetensors`.

    In fx_graph_mode: `{model_type}_quantized.pth`, a file of torch.export that needs no quark to be loaded.

    Args:
        model: A model from `quantize_model`; not changed.
        model_type: Stem of the two file names.
        args, kwargs: Example inputs: graph mode exports the graph once more. Eager mode does not use them.
        export_dir: Folder; default: the system's temporary folder.
        quant_mode: How the model was quantized.
        compressed: Store codes; False stores float values that were quantized, which is all that graph mode can.
        reorder: Order of 4-bit codes in a word.

    Returns:
        The JSON file, or the .pth file.
    """
    folder = Path(export_dir if export_dir is not None else tempfile.gettempdir())
    if quant_mode is QuantizationMode.fx_graph_mode:
        if compressed:
            raise NotSupportedError("save_params(compressed=True): fx_graph_mode stores float values.")
        return save_graph(model, args, kwargs, folder / f"{model_type}_quantized.pth")
    if isinstance(model, fx.GraphModule):
        raise ConfigError("save_params of a graph: pass quant_mode=QuantizationMode.fx_graph_mode.")
    config = getattr(model, "quant_config", None)
    if not isinstance(config, QConfig) or not quantized_layers(model):
        raise ConfigError("save_params needs a model from ModelQuantizer.quantize_model; this one is not quantized.")
    pack_method = "reorder" if reorder else "order"
    tensors = {
        FORMATS["quark"].stored_name(source, suffix, None): tensor
        for source, make, _ in entries(model, pack_method, compressed)
        for suffix, tensor in make().items()
    }
    plan: Plan = model.quant_plan  # type: ignore[assignment]
    written = record_branches(record_rotations(config.to_dict(), model), model)
    description: dict[str, Any] = {
        # Resolved: a model to load into has no data, by which layers are found that have to stay in float.
        "config": {**written, "exclude": list(plan.to_exclude)},
        "export": {"pack_method": pack_method, "weight_format": REAL_QUANTIZED if compressed else FAKE_QUANTIZED},
        "structure": _structure(model),
    }
    with atomic_file(folder / f"{model_type}.safetensors") as file:
        save_tensors(tensors, file)
        # Two files cannot be replaced in one step: each says which the other is.
        description["sha256"] = digest_of(file)
    with atomic_file(folder / f"{model_type}.json") as file:
        file.write_text(json.dumps(description, indent=2) + "\n")
    return folder / f"{model_type}.json"


@own_arithmetic()
@with_weights
def load_params(
    model: nn.Module | None = None,
    json_path: str | os.PathLike[str] = "",
    safetensors_path: str | os.PathLike[str] = "",
    pth_path: str = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> nn.Module:
    """Load what `save_params` wrote into a float model.

    Args:
        model: The float model; its layers are replaced in place, and on any error it is as it was.
        json_path, safetensors_path: The two files.
        pth_path: The file of graph mode, which holds the whole model: `model` is not needed.
        quant_mode: As in save_params.
        compressed, reorder: Written in the JSON file, which decides.

    Raises:
        FormatError: A file is missing, corrupt, or of another model.
    """
    if (quant_mode is QuantizationMode.fx_graph_mode) is not bool(pth_path):
        raise ConfigError("load_params: pth_path goes with fx_graph_mode, json_path and safetensors_path do not.")
    if pth_path:
        return load_graph(pth_path)
    if model is None:
        raise ConfigError("load_params needs the float model to load into.")
    try:
        description = plain_json(Path(json_path).read_text())
        config, export = QConfig.from_dict(description["config"]), description["export"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{json_path!s} is not a file of save_params: {error}.") from None
    tensors = regular_file(Path(safetensors_path))
    # Files of former versions do not say it.
    if description.get("sha256", None) not in (None, digest_of(tensors)):
        raise FormatError(
            f"{tensors} is not what {json_path!s} was saved with: save_params was stopped between the two, or one was "
            "replaced. Possible: save both again."
        )
    load_into(model, config, export, [tensors])
    return model


def _structure(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Per quantized layer: its class, the key of its weight, and what is quantized."""
    out = {}
    for name, layer in quantized_layers(model).items():
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        out[name] = {
            "type": type(layer).__name__,
            "weight": f"{name}.weight",
            "shape": list(weight.shape),
            "quantized": str(layer.spec),
        }
    return out
