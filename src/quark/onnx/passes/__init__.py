"""Graph passes. A new one is a file here and a line below; each keeps the model's outputs, and twice is once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from quark.onnx.config.settings import Settings
from quark.onnx.passes.convert_bn_to_conv import convert_bn_to_conv
from quark.onnx.passes.convert_clip_to_relu import convert_clip_to_relu, replace_clip6_relu
from quark.onnx.passes.convert_float import convert_fp16_to_fp32
from quark.onnx.passes.convert_nchw_to_nhwc import convert_nchw_to_nhwc
from quark.onnx.passes.convert_opset_version import convert_opset_version
from quark.onnx.passes.convert_reduce_mean import convert_reduce_mean
from quark.onnx.passes.convert_split_to_slice import convert_split_to_slice
from quark.onnx.passes.copy_shared_init import copy_bias_init, copy_shared_init
from quark.onnx.passes.fix_shapes import fix_shapes
from quark.onnx.passes.fold_batch_norm import fold_batch_norm
from quark.onnx.passes.fuse_gelu import fuse_gelu
from quark.onnx.passes.fuse_instance_norm import fuse_instance_norm
from quark.onnx.passes.fuse_l2_norm import fuse_l2_norm
from quark.onnx.passes.fuse_layer_norm import fuse_layer_norm
from quark.onnx.passes.remove_input_init import remove_input_init
from quark.onnx.passes.simplify import simplify
from quark.onnx.passes.split_large_pool import split_large_pool

Pass = Callable[..., int]
"""(model) or (model, argument) -> how many places changed."""

PASSES: dict[str, Pass] = {
    "convert_opset_version": convert_opset_version,
    "fix_shapes": fix_shapes,
    "convert_fp16_to_fp32": convert_fp16_to_fp32,
    "convert_nchw_to_nhwc": convert_nchw_to_nhwc,
    "remove_input_init": remove_input_init,
    "simplify": simplify,
    "copy_shared_init": copy_shared_init,
    "copy_bias_init": copy_bias_init,
    "fuse_instance_norm": fuse_instance_norm,
    "fuse_l2_norm": fuse_l2_norm,
    "fuse_layer_norm": fuse_layer_norm,
    "fuse_gelu": fuse_gelu,
    "fold_batch_norm": fold_batch_norm,
    "replace_clip6_relu": replace_clip6_relu,
    "convert_split_to_slice": convert_split_to_slice,
    "convert_bn_to_conv": convert_bn_to_conv,
    "convert_reduce_mean": convert_reduce_mean,
    "split_large_pool": split_large_pool,
}
"""Name of the Settings field -> pass, in the order in which they run before quantization.

A field that is False or None leaves its pass out; True runs it, any other value is its argument.
"""

POST_PASSES: dict[str, Pass] = {"convert_clip_to_relu": convert_clip_to_relu}
"""The same, for those that run on the quantized graph."""


def run_passes(model: ir.Model, settings: Settings, passes: Mapping[str, Pass]) -> None:
    """Run the passes whose Settings field asks for them."""
    for name, step in passes.items():
        asked = getattr(settings, name)
        if asked is True:
            step(model)
        elif asked is not False and asked is not None:
            step(model, asked)


__all__ = ["PASSES", "POST_PASSES", "Pass", "run_passes"]
