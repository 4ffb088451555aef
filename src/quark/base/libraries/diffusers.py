"""The names of diffusers that quark takes beside its documented ones. Questions about a model import nothing."""

from __future__ import annotations

import sys
from typing import Any

from quark.base.libraries.names import Name

_LOADER = "models.modeling_utils"
NAMES = (
    Name(_LOADER, "ModelMixin._keep_in_fp32_modules", "tensors that are always float32"),
    Name(_LOADER, "no_init_weights", "an empty network"),
    Name("quantizers.base", "DiffusersQuantizer", "how a quantized folder is loaded"),
    Name("quantizers.auto", "AUTO_QUANTIZER_MAPPING", "where such a loader is looked for"),
    Name("quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING", "where its config is looked for"),
)


def is_network(model: object) -> bool:
    """Tell if a model is one of diffusers."""
    modeling: Any = sys.modules.get(f"diffusers.{_LOADER}")
    return modeling is not None and isinstance(model, modeling.ModelMixin)


def always_float32(model: Any) -> set[str]:
    """Parts of names of tensors that are loaded in float32 whatever is asked for."""
    return set(model._keep_in_fp32_modules or ())


def without_values() -> Any:
    """A context in which networks are made without drawing weights."""
    from diffusers.models.modeling_utils import no_init_weights

    return no_init_weights()
