"""Address of the observers."""

from quark.torch.config.observer_classes import *
