"""Address of the algorithm configs."""

from quark.onnx.config.algo_configs import *
from quark.onnx.config.algo_configs import from_dict as from_dict
