"""The quantizer that diffusers calls to load a network of quark: in its table, under the name `quark`.

    config.json: {"_class_name": ..., "quantization_config": {"quant_method": "quark", ...}}
    tensors of the folder  ->  layers that hold them, as in a model of transformers

diffusers has no entry of its own for the name: `quark.compat.of_diffusers` adds this one once diffusers is read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.checkpoint.loading import REAL_QUANTIZED, map_to_stored, mark_loaded
from quark.torch.checkpoint.shards import read_tensors
from quark.torch.checkpoint.stored_tensors import is_wide, name_in, stored_tensors
from quark.torch.config.config import QConfig
from quark.torch.diffusion.network import set_types
from quark.torch.formats import FORMATS
from quark.torch.layers.replace import quantized_layers
from quark.torch.layers.stored_codes.layer import codes_of

_ALIGNMENT = 64
"""Bytes to which torch aligns what it allocates."""
HALF = {torch.float16, torch.bfloat16}


class QuantizationMethod(str, Enum):
    """The name in the table; diffusers asks for its `value`."""

    QUARK = "quark"


class QuarkNetworkConfig:
    """The `quantization_config` of a folder, as diffusers carries it."""

    quant_method = QuantizationMethod.QUARK

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.stored = dict(stored)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> QuarkNetworkConfig:
        """The object of what config.json holds."""
        return cls(config_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return copy.deepcopy(self.stored)


class CodedNetworkQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """The common rules for networks that are loaded with codes, whether these are read or made on the way."""

    use_keep_in_fp32_modules = True
    supports_parallel_loading = False

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Refuse a part on the disk: what diffusers writes there has lost the types of scales and codes."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise NotSupportedError("A quantized network has no part on the disk. Possible: a device_map with 'cpu'.")

    @property
    def is_serializable(self) -> bool:
        """`save_pretrained` of such a model is quark's own; see `mark_loaded`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on it train; codes have no gradients."""
        return True


class QuarkNetworkQuantizer(CodedNetworkQuantizer):
    """Turns an empty network into one with the layers of a quantized folder, and gives each tensor its place there."""

    def __init__(self, quantization_config: QuarkNetworkConfig, **options: Any) -> None:
        if not options.get("pre_quantized", True):
            raise NotSupportedError("diffusers loads what quark quantized. Possible: `quark quantize FOLDER -o OUT`.")
        super().__init__(quantization_config, **options)
        self._stored = quantization_config.stored
        self._files: list[Path] = []
        self._names: list[str] = []
        self._places: dict[str, str] = {}
        self._coded: set[str] = set()

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the type that is asked for, else the one that the network was quantized in."""
        said = getattr(torch, str(self._stored.get("torch_dtype")), torch.float32)
        self._dtype: torch.dtype = torch_dtype or said
        if self._dtype != said and {self._dtype, said} <= HALF:
            raise NotSupportedError(
                f"The network was quantized in {said}, and {self._dtype} cannot represent all its values. Possible: "
                f"torch_dtype={said}, or torch.float32."
            )
        return self._dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """A list of the names, which `preprocess_model`, the next that is called, fills with their places."""
        self._files, self._names = [Path(file) for file in checkpoint_files], list(loaded_keys)
        return self._names

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        export = self._stored.get("export") or {}
        set_types(model, self._dtype)
        config = QConfig.from_dict(self._stored)
        map_to_stored(
            model, config, export.get("pack_method", "reorder"), export.get("weight_format") or REAL_QUANTIZED
        )
        mark_loaded(model, config, "quark")
        # diffusers makes up what is missing, and casts what is of another dtype: all is checked before it loads.
        stored_tensors(model, FORMATS["quark"], read_tensors(self._files), self._dtype)
        keep_codes_apart(model)
        find = name_in(model)
        self._places = {name: find(name) or name for name in self._names}
        self._names[:] = self._places.values()
        layers = quantized_layers(model)
        inside = tuple(f"{name}." for name in layers)
        self._coded = {name for name in model.state_dict() if name.startswith(inside)}
        model.register_to_config(quantization_config=self._stored)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a file by their names in the model."""
        return {self._places.get(name, name): tensor for name, tensor in state_dict.items()}

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, state_dict: Any, **options: Any
    ) -> bool:
        """Return True where a tensor is of a quantized layer: diffusers would cast its scale to the model's type."""
        return param_name in self._coded

    def create_quantized_param(
        self,
        model: Any,
        param_value: Any,
        param_name: str,
        target_device: Any,
        state_dict: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        """Put a tensor of a quantized layer in its place, as it is stored."""
        parent, _, leaf = param_name.rpartition(".")
        module = model.get_submodule(parent)
        present = codes_of(module, leaf)
        tensor: torch.Tensor = state_dict[param_name].reshape(present.shape)
        wanted = present.dtype
        tensor = tensor.to(target_device, wanted if is_wide(wanted) else tensor.dtype)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        align_tensors(model)
        return model


def align_tensors(model: nn.Module) -> None:
    """Take tensors out of the mapped file that lie there as no allocator puts them: CPUs round sums otherwise."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def keep_codes_apart(model: nn.Module) -> None:
    """Let codes be buffers: networks cast their inputs to the type of the first parameter of a part of theirs."""
    for layer in quantized_layers(model).values():
        for leaf, value in list(layer._parameters.items()):
            if value is not None and not is_wide(value.dtype):
                del layer._parameters[leaf]
                layer.register_buffer(leaf, value.detach())
