"""Address of ModelPruner."""

from quark.torch.config.not_supported import ModelPruner as ModelPruner
