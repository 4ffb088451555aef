"""Address of RuntimeOptions."""

from quark.torch.config.not_supported import RuntimeOptions as RuntimeOptions
