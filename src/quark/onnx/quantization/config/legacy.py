"""Address of the older config classes."""

from quark.onnx.config.legacy import *
