"""Address of the check before a quantization. The code is in quark.torch.llm.model_loading."""

from quark.torch.llm.model_loading import (
    check_compatibility_before_quantization as check_compatibility_before_quantization,
)
