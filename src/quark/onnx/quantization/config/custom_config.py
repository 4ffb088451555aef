"""Address of the named configurations (`XINT8_CONFIG`, `A8W8_QCONFIG`), which are made when they are asked for."""

from quark.onnx.config.presets import *
from quark.onnx.config.presets import __getattr__ as __getattr__
