"""The folder of one network of diffusers: config.json names its class, weights lie in diffusion_pytorch_model files.

    {"_class_name": "SD3Transformer2DModel", "_diffusers_version": "0.42.1", "num_layers": 24, ...}

diffusers keeps no type of numbers in config.json: its loader takes float32 unless it is told another. A folder is read
here in the type that most of its numbers are stored in.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.base.garbage import without_collection
from quark.base.libraries.diffusers import always_float32, without_values
from quark.errors import FormatError, require_packages
from quark.torch.diffusion.component import TIMESTEPS


def is_denoiser(kind: type) -> bool:
    """Return True where a class is called once a step: its forward takes a time step, which an encoder's does not."""
    return not {*TIMESTEPS}.isdisjoint(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


def import_diffusers() -> Any:
    """The diffusers package. Raises MissingDependencyError."""
    require_packages("Reading a folder of an image or video model", "diffusers", "diffusers")
    with without_collection():
        import diffusers  # seconds: imported when such a folder is really read

    return diffusers


def network_class(path: Path, name: Any) -> Any:
    """The class of diffusers of a name. Raises FormatError where it has no such network.

    Args:
        path: The file that names it, for the message.
        name: What stands there.
    """
    diffusers = import_diffusers()
    with without_collection():
        found = getattr(diffusers, name, None) if isinstance(name, str) else None
        base = diffusers.ModelMixin
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise FormatError(f"{path} names the class {name!r}, which diffusers {diffusers.__version__} does not have.")
    return found


def empty_network(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A network as diffusers' loader begins with it: parameters on the meta device, buffers computed.

    Args:
        kind: Its class.
        config: The content of config.json.
        dtype: Of parameters and stored buffers, but those that the class keeps in float32.
    """
    import accelerate

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with without_values(), accelerate.init_empty_weights():
            model = kind.from_config({name: value for name, value in config.items() if name != "quantization_config"})
    finally:
        torch.set_default_dtype(before)
    set_types(model, dtype)
    return model.eval()


def set_types(model: Any, dtype: torch.dtype) -> None:
    """Give parameters and stored buffers the type that diffusers loads each in."""
    wide = always_float32(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype if wide.isdisjoint(name.split(".")) else torch.float32)


def common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The type of values that most numbers of these tensors are stored in; without any, float32."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.numel()
    return max((dtype for dtype in VALUES if counts[dtype]), key=counts.__getitem__, default=torch.float32)


VALUES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of values, where others are codes."""
