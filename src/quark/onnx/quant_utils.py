"""Address of the enums, under their older path."""

from quark.onnx.config.enums import *
