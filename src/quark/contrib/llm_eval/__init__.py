"""Address of the evaluation of language-model scripts. The code is in quark.torch.llm."""

from quark.torch.llm.evaluation import *
from quark.torch.llm.generated_text import *
