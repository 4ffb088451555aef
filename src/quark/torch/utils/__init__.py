"""Address of the helpers of scripts; see also llm."""

from quark.torch.config.not_supported import TPDeviceManager
from quark.torch.layers.replace import set_submodule as setattr_recursive

__all__ = ["TPDeviceManager", "setattr_recursive"]
