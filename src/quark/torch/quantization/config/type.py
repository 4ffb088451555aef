"""Address of the enums."""

from quark.torch.config.tensor.enums import *
