"""The float model of a folder without its weights: built from config.json with parameters on the meta device.

It says what a checkpoint cannot: which tensor belongs to which layer, which are tied, what dtype each has once loaded.
So plans, excludes and formats are found by the same code as for a model in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import FormatError, require_packages

_LOCAL = {
    **dict.fromkeys(("generation_config", "from_pipeline", "cache_dir", "proxies", "token", "revision")),
    **dict.fromkeys(("force_download", "trust_remote_code"), False),
    **dict.fromkeys(("from_auto_class", "local_files_only"), True),
    "subfolder": "",
}
"""How transformers looks for the generation config of a folder."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises FormatError when it is not one."""
    path = folder / "config.json"
    if not path.is_file():
        raise FormatError(f"{folder} is no model folder: it has no config.json.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise FormatError(f"{path} is not the config of a transformers model: it has no model_type.")
    return config


def build_skeleton(folder: Path, stored_dtype: torch.dtype = torch.float32) -> Any:
    """The model of the class that config.json names, in evaluation mode; nothing of it is allocated.

    Args:
        folder: Model folder; its weight files are not read.
        stored_dtype: The dtype to load in where config.json has none: that of the first float tensor on disk.

    Raises:
        FormatError: config.json is absent or wrong, or transformers has no class for it.
    """
    read_config(folder)
    transformers = import_transformers()
    with as_format_error(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        # What the skeleton stands for is the float model, whatever the files hold.
        config.__dict__.pop("quantization_config", None)
        named = (config.architectures or [""])[0]
        model_class = getattr(transformers, named, None) or transformers.AutoModelForCausalLM
        dtype = config.dtype or stored_dtype
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype) if hasattr(model_class, "_from_config") else None
            model = model or model_class.from_config(config, dtype=dtype)
        if model.can_generate():
            model.adjust_generation_fn(**_LOCAL, pretrained_model_name_or_path=str(folder))
    _keep_wide(model, model._get_dtype_plan(dtype))
    model.config._name_or_path = str(folder)
    return model.eval()


def fill_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables, position ids) as transformers does when it loads."""
    for module in model.modules():
        module._is_hf_initialized = False
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()


@contextmanager
def as_format_error(folder: Path) -> Iterator[None]:
    """transformers, safetensors and tokenizers raise many kinds of error for a bad folder; here it is one."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, FormatError):
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FormatError(f"{folder} cannot be loaded: {first}") from error


def _keep_wide(model: nn.Module, plan: dict[str, torch.dtype]) -> None:
    """Give parameters that transformers keeps in float32 that dtype."""
    for name, parameter in model.named_parameters():
        for pattern, dtype in plan.items():
            if re.search(pattern, name) and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def import_transformers() -> Any:
    """The transformers package. Raises MissingDependencyError."""
    require_packages("Reading a model folder", "torch", "transformers")
    import transformers  # costs seconds: imported when a folder is really read

    return transformers
