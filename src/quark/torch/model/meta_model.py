"""The float model of a folder without its weights: built from config.json with parameters on the meta device.

It says what a checkpoint cannot: which tensor belongs to which layer, which are tied, what dtype each has once loaded.
So plans, excludes and formats are found by the same code as for a model in memory.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.libraries.diffusers import is_network
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import draw_missing, dtype_plan, empty_of_class, has_values, set_folder
from quark.torch.diffusion.component import CLASS, is_component
from quark.torch.diffusion.network import empty_network, network_class
from quark.torch.model.model_folder import model_class

_LOCAL = {
    **dict.fromkeys(("generation_config", "from_pipeline", "cache_dir", "proxies", "token", "revision")),
    **dict.fromkeys(("force_download", "trust_remote_code"), False),
    **dict.fromkeys(("from_auto_class", "local_files_only"), True),
    "subfolder": "",
}
"""How transformers looks for the generation config of a folder."""


def named_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of a model as its config.json has it, or None; of the networks of diffusers quantized ones have it."""
    if is_component(config):
        name = (config.get("quantization_config") or {}).get("torch_dtype")
    else:
        name = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def build_skeleton(folder: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model of the class that the config of a folder names, in evaluation mode; nothing of it is allocated.

    Args:
        folder: Of a model of transformers; its weight files are not read.
        config: As transformers reads it; it becomes the model's.
        dtype: To load in where the config has none.
        trust_remote_code: See `model_class`.

    Raises:
        FormatError: The config is wrong, or transformers has no class for it.
    """
    # What the skeleton stands for is the float model, whatever the files hold.
    config.__dict__.pop("quantization_config", None)
    chosen = model_class(folder, config, trust_remote_code)
    with as_format_error(folder, trusted=trust_remote_code):
        dtype = config.dtype or dtype
        model = empty_model(chosen, config, dtype)
        read_generation_config(model, folder)
    plan = dtype_plan(model, dtype)  # parameters and stored buffers that transformers keeps in float32
    for name, tensor in model.state_dict(keep_vars=True).items():
        for pattern, wide in plan.items():
            if re.search(pattern, name) and tensor.is_floating_point():
                tensor.data = tensor.data.to(wide)
    set_folder(model, str(folder))
    return model.eval()


def build_network(folder: Path, stored: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The network of diffusers of a folder in a dtype, without its weights, by its config.json."""
    kind = network_class(folder / "config.json", stored[CLASS])
    with as_format_error(folder):
        model = empty_network(kind, stored, dtype)
    model.register_to_config(_name_or_path=str(folder))
    return model


def read_generation_config(model: Any, folder: Path) -> None:
    """Give a model the generation config of a folder, as transformers does when it loads one."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):  # SpeechT5 has a generate of its own
        model.adjust_generation_fn(**_LOCAL, pretrained_model_name_or_path=str(folder))


def meta_copy(model: Any) -> Any:
    """A float model of the class and config of a model of transformers or diffusers, on the meta device: what a loader
    begins with.
    """
    if is_network(model):
        return empty_network(type(model), model.config, model.dtype)
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    return empty_model(type(model), config, model.dtype)


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model, as it is now, on the meta device and without hooks; itself where it has no values or cannot
    be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                memo[id(value)] = nn.Parameter(empty, value.requires_grad) if type(value) is nn.Parameter else empty
    if not memo:
        return model
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = OrderedDict()
            elif not isinstance(value, (torch.Tensor, nn.Module, list, tuple, dict, set)):
                memo[id(value)] = value  # configs, and what holds the weights of an offloaded part
    with suppress(Exception):
        made = copy.deepcopy(model, memo)
        for module in made.modules():
            vars(module).pop("forward", None)  # of the module that is copied
        return made
    return model


def empty_model(chosen: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of a class of transformers on the meta device."""
    with torch.device("meta"):
        model = empty_of_class(chosen, config, dtype)
    _empty(model)
    return model


def _empty(model: nn.Module) -> None:
    """Put what a legacy constructor (`torch.FloatTensor(n)`) made in memory on the meta device; ties stay."""
    memo: dict[int, torch.Tensor] = {}
    for module in model.modules():
        kept = module._non_persistent_buffers_set
        for tensors in (module._parameters, {n: b for n, b in module._buffers.items() if n not in kept}):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in memo:
                    memo[id(tensor)] = (
                        nn.Parameter(tensor.to("meta"), tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else tensor.to("meta")
                    )
                (module._parameters if name in module._parameters else module._buffers)[name] = memo[id(tensor)]  # type: ignore[assignment]


def fill_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables, position ids) as transformers does when it loads."""
    if is_network(model):  # which has them from the beginning
        return
    for module in model.modules():
        has_values(module, False)
    for tensor in model.state_dict(keep_vars=True).values():
        has_values(tensor)
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    draw_missing(model)
