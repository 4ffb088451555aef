"""Address of the names of native inference."""

from quark.torch.config.not_supported import RuntimeOptions as RuntimeOptions
from quark.torch.config.not_supported import disable_native_inference as disable_native_inference
from quark.torch.config.not_supported import enable_native_inference as enable_native_inference
