"""Address of the helpers of scripts; see also llm."""

from quark.torch.config.not_supported import TPDeviceManager as TPDeviceManager
