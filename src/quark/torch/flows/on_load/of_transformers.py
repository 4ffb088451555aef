"""The quantizer of transformers that quantizes each layer when its tensors have been read.

from_pretrained(folder, quantization_config=QuantizeOnLoad("int8_wo"))
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationMethod, QuarkConfig

from quark.base.libraries.transformers import has_values
from quark.errors import NotSupportedError
from quark.torch.checkpoint.hooks.of_transformers import keep_from_drawing
from quark.torch.checkpoint.quantization_config import quantization_config
from quark.torch.flows.on_load.arrivals import Arrivals
from quark.torch.flows.on_load.mapped_files import MappedFiles


class QuarkOnLoadQuantizer(HfQuantizer):  # type: ignore[misc]
    """Gives each layer of the plan its codes; all other tensors are loaded as ever."""

    requires_calibration = False
    _arrivals: Arrivals

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._mapped = MappedFiles()
        self._built: tuple[Any, list[str] | None] | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Refuse a part on the disk: what transformers writes there has lost the types of codes."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise NotSupportedError(
                "A model that is quantized while it loads has no part on the disk. Possible: a device_map with 'cpu'."
            )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **options: Any
    ) -> None:
        self._built = (model, checkpoint_files)

    def get_weight_conversions(self) -> list[Any]:
        """No conversions. Of all that is called before tensors are read, this is the first where the model can run.

        It is built under modes of torch that its forward fails in, and which layers a forward reads itself is seen in
        one.
        """
        if self._built is not None:
            model, files = self._built
            self._built = None
            model.tie_weights(recompute_mapping=False)  # as in the float model, which is planned for
            self._arrivals = Arrivals(model, self.quantization_config.config(), files, self._mapped)
            model.all_tied_weights_keys = self._arrivals.ties
            keep_from_drawing(model, self._arrivals.unfused)
        return []

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """True for a tensor that goes to `get_quantize_ops`."""
        return self._arrivals.wants(param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of a number as it will be stored, by which `device_map="auto"` is made."""
        return self._arrivals.bytes_of(param_name, param) / max(1, param.numel())

    def get_quantize_ops(self) -> ConversionOps:
        """The step of the loader that takes a tensor that was read."""
        return _Receive(self._arrivals)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
        arrivals = self._arrivals
        arrivals.finish()
        # The model is one of a quark folder from here on, for transformers and for those that ask what it is.
        stored = quantization_config(model, arrivals.config, arrivals.plan)
        model.config.quantization_config = WrittenQuarkConfig(stored)
        model.quantization_method = QuantizationMethod.QUARK

    def is_serializable(self) -> bool:
        """`save_pretrained` of such a model is quark's own; see `mark_loaded`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on it train; codes have no gradients."""
        return True


class WrittenQuarkConfig(QuarkConfig):  # type: ignore[misc]
    """The `quantization_config` of a quark folder, which is written again as it was given: transformers' own is not."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        super().__init__(**copy.deepcopy(dict(stored)))
        self.stored = dict(stored)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return copy.deepcopy(self.stored)


class _Receive(ConversionOps):  # type: ignore[misc]
    """A step of transformers' loader after which a float tensor is gone."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def convert(
        self, input_dict: Mapping[str, Any], *, missing_keys: set[str] | None = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        """The tensors that are still to be put into the model, which are found when it is looked through."""
        return _LookedThrough(self._arrivals, input_dict, missing_keys)


class _LookedThrough(dict[str, torch.Tensor]):
    """Work that is done when the loader looks at its result: what a conversion raises, transformers keeps for its log.

    Args:
        arrivals: Take the tensors.
        tensors: Name in the float model -> tensor, or a list of one.
        missing: Names that the loader has seen no tensor for; those that got one are taken out.
    """

    def __init__(self, arrivals: Arrivals, tensors: Mapping[str, Any], missing: set[str] | None) -> None:
        super().__init__()
        self._arrivals, self._tensors, self._missing = arrivals, dict(tensors), missing

    def items(self) -> Any:
        """Nothing: all of it is in its place."""
        while self._tensors:
            name, value = self._tensors.popitem()
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            for module in self._arrivals.receive(name, tensor):
                # Of what has values, transformers draws no random ones; the factor of a table its class computes.
                parts = [part for part in module.modules() if not part._non_persistent_buffers_set]
                for part in (*parts, *module.parameters(), *module.buffers()):
                    has_values(part)
            if self._missing is not None:
                self._missing.difference_update(self._arrivals.places(name))
        return super().items()


def register(method: str) -> None:
    """Make the quantizer known to transformers under a name."""
    if method not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(method)(QuarkOnLoadQuantizer)
