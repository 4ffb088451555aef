"""Address of the observers."""

from quark.torch.config.tensor.observer_classes import *
