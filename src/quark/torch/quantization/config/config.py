"""Address of the configs of all generations of names, and of the enums that they take."""

from quark.torch.config.algo_configs import *
from quark.torch.config.config import *
from quark.torch.config.named_algorithms import *
from quark.torch.config.tensor.enums import *
from quark.torch.config.tensor.shorthand_specs import *
from quark.torch.config.tensor.tensor_config import *
