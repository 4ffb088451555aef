"""Address of TPDeviceManager."""

from quark.torch.config.not_supported import TPDeviceManager as TPDeviceManager
