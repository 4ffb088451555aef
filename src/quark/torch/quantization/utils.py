"""Address of RuntimeOptions."""

from quark.torch.later import RuntimeOptions

__all__ = ["RuntimeOptions"]
