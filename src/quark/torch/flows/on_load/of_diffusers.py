"""The quantizer of diffusers that quantizes each layer of a network when its tensors have been read.

    from_pretrained(folder, quantization_config=QuantizeOnLoad("int8_wo"))

`quark.compat.of_diffusers` adds it to the table of diffusers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quark.torch.checkpoint.float_model import check_network
from quark.torch.checkpoint.hooks.of_diffusers import (
    CodedNetworkQuantizer,
    QuantizationMethod,
    align_tensors,
    keep_codes_apart,
)
from quark.torch.checkpoint.quantization_config import quantization_config
from quark.torch.diffusion.network import common_dtype, set_types
from quark.torch.flows.on_load.arrivals import Arrivals, float_metas
from quark.torch.flows.on_load.mapped_files import MappedFiles


class QuarkOnLoadNetworkQuantizer(CodedNetworkQuantizer):
    """Gives each layer of the plan its codes; all other tensors are loaded as ever."""

    _arrivals: Arrivals
    _files: list[Path]
    _dtype: torch.dtype | None

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._mapped = MappedFiles()

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        """The type that is asked for; else diffusers keeps the types of the network that is made."""
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """The names, unchanged; the files are looked at by `preprocess_model`, the next that is called."""
        self._files = [Path(file) for file in checkpoint_files]
        return loaded_keys

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        folder, stored = float_metas(self._files)
        check_network(folder, model, stored)
        if self._dtype is None:
            set_types(model, common_dtype(stored.values()))
        self._arrivals = Arrivals(model, self.quantization_config.config(), self._files, self._mapped)

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, state_dict: Any, **options: Any
    ) -> bool:
        """True for a tensor that goes to `create_quantized_param`."""
        return self._arrivals.wants(param_name)

    def create_quantized_param(
        self,
        model: Any,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        state_dict: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        """Take a tensor that was read."""
        for module in self._arrivals.receive(param_name, param_value.to(target_device)):
            keep_codes_apart(module)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        arrivals = self._arrivals
        arrivals.finish()
        align_tensors(model)
        stored = quantization_config(model, arrivals.config, arrivals.plan)
        dtype = str(model.dtype).removeprefix("torch.")
        model.register_to_config(quantization_config={**stored, "torch_dtype": dtype})
        model.quantization_method = QuantizationMethod.QUARK
        return model
