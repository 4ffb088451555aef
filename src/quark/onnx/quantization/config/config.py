"""Address of the model configs."""

from quark.onnx.config.config import *
