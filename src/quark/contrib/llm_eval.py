"""Address of the evaluation of language-model scripts. The code is in quark.torch.llm.evaluation."""

from quark.torch.llm.evaluation import *
