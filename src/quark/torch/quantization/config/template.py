"""Address of LLMTemplate."""

from quark.torch.config.llm_template import LLMTemplate

__all__ = [
    "LLMTemplate",
]
