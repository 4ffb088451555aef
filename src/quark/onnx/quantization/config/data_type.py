"""Address of the data types."""

from quark.onnx.config.tensor_specs import *
from quark.onnx.config.tensor_specs import parse_data_type as parse_data_type
