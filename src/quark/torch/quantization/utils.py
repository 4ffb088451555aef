"""Address of the names of native inference."""

from quark.torch.kernels.native import RuntimeOptions as RuntimeOptions
from quark.torch.kernels.native import disable_native_inference as disable_native_inference
from quark.torch.kernels.native import enable_native_inference as enable_native_inference
