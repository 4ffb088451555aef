"""Address of LLMTemplate."""

from quark.torch.template import LLMTemplate

__all__ = [
    "LLMTemplate",
]
