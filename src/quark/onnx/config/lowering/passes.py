"""Lowering of the options that change the graph before and after quantization.

SkipPreprocess leaves out every pass that no option asks for by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.onnx.config.extra_options import value_of

OPTION_OF = {
    "convert_opset_version": "ConvertOpsetVersion",
    "fix_shapes": "FixShapes",
    "convert_fp16_to_fp32": "ConvertFP16ToFP32",
    "convert_nchw_to_nhwc": "ConvertNCHWToNHWC",
    "remove_input_init": "RemoveInputInit",
    "simplify": "SimplifyModel",
    "copy_shared_init": "CopySharedInit",
    "copy_bias_init": "CopyBiasInit",
    "fuse_instance_norm": "FuseInstanceNorm",
    "fuse_l2_norm": "FuseL2Norm",
    "fuse_layer_norm": "FuseLayerNorm",
    "fuse_gelu": "FuseGelu",
    "fold_batch_norm": "FoldBatchNorm",
    "replace_clip6_relu": "ReplaceClip6Relu",
    "convert_split_to_slice": "ConvertSplitToSlice",
    "convert_bn_to_conv": "ConvertBNToConv",
    "convert_reduce_mean": "ConvertReduceMeanToGlobalAvgPool",
    "split_large_pool": "SplitLargeKernelPool",
    "convert_clip_to_relu": "ConvertClipToRelu",
}
"""Name of the Settings field, which is that of the pass -> its option."""

FOR_NPU = ("convert_split_to_slice", "convert_bn_to_conv", "convert_reduce_mean", "split_large_pool")


def lower_passes(options: Mapping[str, Any], npu: bool, extended: bool) -> dict[str, Any]:
    """The Settings fields of all passes.

    Args:
        options: The extra options.
        npu: Whether this is the XINT8 path, or that of NPU transformers.
        extended: Whether an extended format is written.
    """
    casts = value_of(options, "BF16QDQToCast") or value_of(options, "EnableVaimlBF16")
    unnamed: dict[str, Any] = dict.fromkeys(FOR_NPU, npu or (extended and not casts))
    unnamed["fold_batch_norm"] = value_of(options, "OptimizeModel")
    fields: dict[str, Any] = {}
    for field, option in OPTION_OF.items():
        value = value_of(options, option)
        if options.get(option) is None:
            value = False if value_of(options, "SkipPreprocess") else unnamed.get(field, value)
        fields[field] = tuple(value) if isinstance(value, list) else value
    for field in ("convert_opset_version", "fix_shapes", "copy_shared_init", "copy_bias_init"):
        fields[field] = None if fields[field] is False else fields[field]
    return fields
