"""Address of the configs and enums; see also config.config, config.type and config.template."""

from quark.torch.config.config import *
from quark.torch.config.tensor.enums import *
from quark.torch.config.tensor.tensor_config import *
