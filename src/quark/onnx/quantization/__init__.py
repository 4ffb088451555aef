"""Address of the configs and algorithms."""

from quark.onnx.config.algo_configs import *
from quark.onnx.config.config import *
from quark.onnx.config.presets import *
