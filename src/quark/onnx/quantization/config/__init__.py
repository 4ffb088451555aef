"""Address of the configs; the named ones (`XINT8_CONFIG`, `A8W8_QCONFIG`) are made when they are asked for."""

from quark.onnx.config.config import *
from quark.onnx.config.presets import *
from quark.onnx.config.presets import __getattr__ as __getattr__
