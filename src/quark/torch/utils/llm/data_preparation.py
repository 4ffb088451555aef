"""Address of the texts of language-model scripts. The code is in quark.torch.llm."""

from quark.torch.llm.calibration_text import *
from quark.torch.llm.training_text import *
