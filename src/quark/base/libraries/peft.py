"""The names of peft that quark takes beside its documented ones. Questions about a model import nothing."""

from __future__ import annotations

import sys
from typing import Any

from quark.base.libraries.names import Name

_LAYERS, _COPIES = "tuners.tuners_utils", "utils.other"
NAMES = (
    Name(_LAYERS, "BaseTunerLayer.get_base_layer", "the layer that an adapter stands around"),
    Name(_COPIES, "AuxiliaryTrainingWrapper.original_module", "the module that a trained copy stands beside"),
)


def base_layer(module: object) -> Any | None:
    """The layer that an adapter stands around; None for a module that is no adapter."""
    layers: Any = sys.modules.get(f"peft.{_LAYERS}")
    copies: Any = sys.modules.get(f"peft.{_COPIES}")
    if layers is not None and isinstance(module, layers.BaseTunerLayer):
        return module.get_base_layer()
    if copies is not None and isinstance(module, copies.AuxiliaryTrainingWrapper):
        return module.original_module
    return None


def has_adapter(model: Any) -> bool:
    """Tell if a model of transformers or diffusers was given adapters, by `add_adapter` or `load_lora_weights`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def base_model(model: Any) -> Any:
    """The model inside of a PeftModel; the model itself where it is none."""
    peft: Any = sys.modules.get("peft")
    # A module of that name may still be on its way in.
    kind = getattr(peft, "PeftModel", None)
    return model.get_base_model() if kind is not None and isinstance(model, kind) else model
