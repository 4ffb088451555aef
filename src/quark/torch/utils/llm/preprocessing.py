"""Address of the saving of preprocessors. The code is in quark.torch.llm.preprocessors."""

from quark.torch.llm.preprocessors import *
