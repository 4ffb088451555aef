"""Address of the observer of trained thresholds. The code is in quark.torch.config.tensor.observer_classes."""

from quark.torch.config.tensor.observer_classes import TQTObserver as TQTObserver
