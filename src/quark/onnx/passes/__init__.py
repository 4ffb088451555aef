"""Graph passes. A new one is a file here and a row below; each keeps the model's outputs, and twice is once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from quark.onnx.operators import BIASED
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
from quark.onnx.passes.fold_factors import fold_factors
from quark.onnx.passes.fuse_gelu import fuse_gelu
from quark.onnx.passes.fuse_instance_norm import fuse_instance_norm
from quark.onnx.passes.fuse_l2_norm import fuse_l2_norm
from quark.onnx.passes.fuse_layer_norm import fuse_layer_norm
from quark.onnx.passes.remove_input_init import remove_input_init
from quark.onnx.passes.simplify import simplify
from quark.onnx.passes.split_large_pool import split_large_pool
from quark.onnx.passes.store_float16 import store_float16

__all__ = ["PASSES", "Pass", "run_passes"]


@dataclass(frozen=True)
class Pass:
    """A graph pass, and the extra option that asks for it.

    Attributes:
        run: (model), or (model, argument), -> how many places changed. Its name is that of the pass.
        option: The option: True runs the pass, False or None leaves it out, any other value is its argument.
        default: What leaving the option out means.
        meaning: What the option does.
        kind: Type of the option.
        default_option: Another option whose value is the default.
        for_npu: Whether the pass is on by default for NPUs and the extended formats.
        on_quantized: Whether it runs on the quantized graph, not on the float one.
    """

    run: Callable[..., int]
    option: str
    default: bool | tuple[str, ...] | None
    meaning: str
    kind: type = bool
    default_option: str = ""
    for_npu: bool = False
    on_quantized: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.run.__name__

    def __call__(self, model: ir.Model, *argument: object) -> int:
        """Run the pass; return how many places changed."""
        return self.run(model, *argument)


ROWS = [
    Pass(
        convert_opset_version,
        "ConvertOpsetVersion",
        None,
        "the opset to convert to; left out: 13 for a model below it",
        kind=int,
    ),
    Pass(
        fix_shapes, "FixShapes", None, 'shapes of inputs and outputs, as "image:[1,3,224,224];scores:[1,10]"', kind=str
    ),
    Pass(
        convert_fp16_to_fp32,
        "ConvertFP16ToFP32",
        False,
        "turn float16 tensors into float32 first, inputs and outputs included",
    ),
    Pass(convert_nchw_to_nhwc, "ConvertNCHWToNHWC", False, "make image inputs NHWC, and calibration data with them"),
    Pass(
        remove_input_init,
        "RemoveInputInit",
        True,
        "initializers that are inputs too become constants; else they stay in float",
    ),
    Pass(simplify, "SimplifyModel", True, "fold constants, drop Identity, Dropout and what nothing reads"),
    Pass(
        copy_shared_init,
        "CopySharedInit",
        None,
        "op types (empty: all) whose shared initializers are copied for each node",
        kind=list,
    ),
    Pass(copy_bias_init, "CopyBiasInit", BIASED, "op types whose shared biases are copied", kind=list),
    Pass(fuse_instance_norm, "FuseInstanceNorm", True, "fuse its subgraph into one operator, if the opset has it"),
    Pass(fuse_l2_norm, "FuseL2Norm", True, "fuse its subgraph into one operator, if the opset has it"),
    Pass(fuse_layer_norm, "FuseLayerNorm", True, "fuse its subgraph into one operator, if the opset has it"),
    Pass(fuse_gelu, "FuseGelu", True, "fuse its subgraph into one operator, if the opset has it"),
    Pass(
        fold_batch_norm,
        "FoldBatchNorm",
        True,
        "fold BatchNormalization, and what multiplies or adds a constant to each channel, into the layer before it",
        default_option="OptimizeModel",
    ),
    Pass(
        fold_factors,
        "FoldFactors",
        False,
        "move constant factors of tensors into the convolutions that read them",
        for_npu=True,
    ),
    Pass(replace_clip6_relu, "ReplaceClip6Relu", False, "Clip(0, 6) becomes Relu, which changes values over 6"),
    Pass(convert_split_to_slice, "ConvertSplitToSlice", False, "Split becomes Slices", for_npu=True),
    Pass(
        convert_bn_to_conv,
        "ConvertBNToConv",
        False,
        "a BatchNormalization that stands alone becomes a depthwise Conv",
        for_npu=True,
    ),
    Pass(
        convert_reduce_mean,
        "ConvertReduceMeanToGlobalAvgPool",
        False,
        "ReduceMean over height and width becomes GlobalAveragePool",
        for_npu=True,
    ),
    Pass(
        split_large_pool,
        "SplitLargeKernelPool",
        False,
        "a GlobalAveragePool over more than 512 pixels becomes two",
        for_npu=True,
    ),
    Pass(
        convert_clip_to_relu,
        "ConvertClipToRelu",
        False,
        "Clip becomes Relu where the quantized range clips at the upper bound",
        on_quantized=True,
    ),
    Pass(
        store_float16,
        "StoreFloat16",
        False,
        "store large constants that stay in float as float16, cast when the file is loaded (an option of this package)",
        on_quantized=True,
    ),
]
"""All passes in the order in which they run."""

PASSES = {row.name: row for row in ROWS}
"""Name -> pass."""


def run_passes(model: ir.Model, arguments: Mapping[str, object], *, on_quantized: bool = False) -> None:
    """Run passes on a model.

    Args:
        model: The model, changed in place.
        arguments: Name of a pass -> its argument, True, or False or None to leave it out; by default that of its row.
        on_quantized: Run those of the quantized graph; else those of the float one.
    """
    for name, row in PASSES.items():
        argument = arguments.get(name, row.default)
        if row.on_quantized is not on_quantized or argument is None or argument is False:
            continue
        if argument is True:
            row(model)
        else:
            row(model, argument)
