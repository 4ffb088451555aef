"""Address of LLMTemplate."""

from quark.torch.config.llm_template import *
