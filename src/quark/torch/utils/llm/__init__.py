"""Address of the helpers of language-model scripts. The code is in quark.torch.llm."""

from quark.torch.config.llm_template import *
from quark.torch.llm.calibration_batch import *
from quark.torch.llm.calibration_text import *
from quark.torch.llm.model_loading import *
from quark.torch.llm.preprocessors import *
from quark.torch.llm.training_text import *
