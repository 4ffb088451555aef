"""Address of the configs. The code is in quark.torch.config."""

from quark.torch.quantization.config.config import *
