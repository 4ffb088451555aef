"""Address: where transformers looks for QuantConfigParser."""

from quark.torch.export_config import QuantConfigParser

__all__ = ["QuantConfigParser"]
