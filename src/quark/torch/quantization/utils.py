"""Address of native inference, of what serving engines take for MX formats, and of the setter of a module by name."""

from quark.torch.kernels.mx_emulation import even_round, reshape_to_blocks
from quark.torch.kernels.native import RuntimeOptions, disable_native_inference, enable_native_inference
from quark.torch.layers.replace import set_submodule as set_op_by_name

__all__ = [
    "RuntimeOptions",
    "disable_native_inference",
    "enable_native_inference",
    "even_round",
    "reshape_to_blocks",
    "set_op_by_name",
]
