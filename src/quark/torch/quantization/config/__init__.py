"""Address of the configs and enums; see also config.config, config.type and config.template."""

from quark.torch.config.config import *
from quark.torch.config.enums import *
from quark.torch.config.tensor_config import *
