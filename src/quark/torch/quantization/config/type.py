"""Address of the enums."""

from quark.torch.config.enums import *
