"""Address of the automatic search."""

from quark.onnx.auto_search import *
