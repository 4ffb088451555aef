"""Address: where transformers looks for QuantConfigParser."""

from quark.torch.config.export_config import QuantConfigParser as QuantConfigParser
