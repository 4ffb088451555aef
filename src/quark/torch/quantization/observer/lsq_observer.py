"""Address of the observer of learned steps. The code is in quark.torch.config.observer_classes."""

from quark.torch.config.observer_classes import LSQObserver as LSQObserver
