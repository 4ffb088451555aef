"""Address of the names of native inference, and of what serving engines take for MX formats."""

from quark.torch.kernels.mx_emulation import even_round as even_round
from quark.torch.kernels.mx_emulation import reshape_to_blocks as reshape_to_blocks
from quark.torch.kernels.native import RuntimeOptions as RuntimeOptions
from quark.torch.kernels.native import disable_native_inference as disable_native_inference
from quark.torch.kernels.native import enable_native_inference as enable_native_inference
