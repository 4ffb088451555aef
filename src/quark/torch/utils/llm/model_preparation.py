"""Address of the models of language-model scripts. The code is in quark.torch.llm."""

from quark.torch.llm.calibration_batch import *
from quark.torch.llm.model_loading import *
