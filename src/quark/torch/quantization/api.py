"""Address of the quantizer, and of the reader of what `save_params` wrote."""

from quark.torch.checkpoint.save_params import load_params as load_params
from quark.torch.quantizer import ModelQuantizer as ModelQuantizer
