"""ShapeShifterYaml: the documented list of graph passes, as the extra options that ask for the same.

    preprocess_passes:                      # or `passes`
      onnx_fold_batch_norm:
        fold_batch_norm: true
    preprocessed_model_path: prepared.onnx
    postprocess_passes:
      onnx_align_scale:
        align_scale: [Concat]

The listed passes run and no others, in the order of this package, which does not depend on that of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.base.yaml_objects import plain_yaml
from quark.errors import ConfigError, FormatError, NotSupportedError, did_you_mean, one_line, require_packages
from quark.onnx.operators import BIASED

Entries = dict[str, dict[str, Any]]

BEFORE = {
    "onnx_convert_bn_to_conv": {"convert_bn_to_conv": "ConvertBNToConv"},
    "onnx_convert_clip_to_relu": {"convert_clip_to_relu": "ConvertClipToRelu"},
    "onnx_convert_fp16_to_fp32": {"convert_fp16_to_fp32": "ConvertFP16ToFP32"},
    "onnx_convert_nchw_to_nhwc": {"convert_nchw_to_nhwc": "ConvertNCHWToNHWC"},
    "onnx_convert_opset_version": {"target_opset_version": "ConvertOpsetVersion"},
    "onnx_convert_reduce_mean_to_global_avg_pool": {
        "convert_reduce_mean_to_global_avg_pool": "ConvertReduceMeanToGlobalAvgPool"
    },
    "onnx_convert_split_to_slice": {"convert_split_to_slice": "ConvertSplitToSlice"},
    "onnx_copy_bias_init": {"shared_bias_op_types": "CopyBiasInit"},
    "onnx_copy_shared_init": {"shared_init_op_types": "CopySharedInit"},
    "onnx_fix_shapes": {"input_output_name_shapes": "FixShapes"},
    "onnx_fold_batch_norm": {"fold_batch_norm": "FoldBatchNorm"},
    "onnx_fold_batch_norm_after_concat": {"fold_batch_norm_after_concat": "FoldBatchNorm"},
    "onnx_fuse_gelu": {"fuse_gelu": "FuseGelu"},
    "onnx_fuse_instance_norm": {"fuse_instance_norm": "FuseInstanceNorm"},
    "onnx_fuse_l2_norm": {"fuse_l2_norm": "FuseL2Norm"},
    "onnx_fuse_layer_norm": {"fuse_layer_norm": "FuseLayerNorm"},
    # What ONNX Runtime folds and removes there, SimplifyModel does here.
    "onnx_optimize_with_ort": {"optimize_with_ort": "SimplifyModel"},
    "onnx_remove_input_init": {"remove_input_init": "RemoveInputInit"},
    "onnx_simplify": {"simplify": "SimplifyModel", "simplify_Options": "SimplifyModelOptions"},
    "onnx_split_large_kernel_pool": {"split_large_kernel_pool": "SplitLargeKernelPool"},
}
AFTER = {
    "onnx_adjust_bias_scale": {"adjust_bias_scale": "AdjustBiasScale"},
    "onnx_align_scale": {"align_scale": "Align"},
    "onnx_insert_clip_before_bfloat16_qdq": {"insert_clip_before_bfloat16_qdq": "BF16WithClip"},
    "onnx_remove_qdq_between_op_types": {"remove_qdq_between_op_types": "RemoveQDQBetweenOps"},
    "onnx_replace_bfloat16_qdq_with_cast": {"replace_bfloat16_qdq_with_cast": "BF16QDQToCast"},
    "onnx_xint8_adjust": {"xint8_adjust": "NPULimitationCheck"},
    "onnx_xint8_simulate": {"xint8_simulate": "SimulateDPU"},
}
"""Pass -> its parameter -> the option that asks for the same."""
ALIGNED = {
    **{name: f"Align{name}" for name in ("Concat", "Pad", "Slice", "Transpose", "Reshape")},
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool"), "AlignPool"),
}
COMMON = ("fold_batch_norm", "fuse_instance_norm", "fuse_l2_norm", "fuse_gelu", "fuse_layer_norm", "remove_input_init")
NPU = (
    "convert_split_to_slice",
    "convert_bn_to_conv",
    "convert_reduce_mean_to_global_avg_pool",
    "split_large_kernel_pool",
)


def _template(*flags: str) -> Entries:
    return {
        "onnx_convert_opset_version": {"target_opset_version": 21},
        "onnx_simplify": {"simplify": True},
        "onnx_copy_bias_init": {"shared_bias_op_types": [*BIASED]},
        **{f"onnx_{flag}": {flag: True} for flag in flags},
    }


TEMPLATES = {"xint8": _template(*COMMON, *NPU), **{n: _template(*COMMON) for n in ("a8w8", "a16w8", "bf16", "bfp16")}}
"""The documented lists that have a name."""


def expand(options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Options with those that ShapeShifterYaml, or the older PreprocessYAML, stands for.

    Returns:
        The options, and where to write the float model when its passes are done; None: nowhere.

    Raises:
        ConfigError: A pass or parameter that does not exist, or a value that is none of it.
        NotSupportedError: A pass that this version does not have.
        FormatError: The file is no YAML.
        MissingDependencyError: PyYAML is absent.
    """
    name = options.get("ShapeShifterYaml") or options.get("PreprocessYAML")
    if not name:
        return dict(options), None
    content = {"passes": TEMPLATES[name]} if name in TEMPLATES else _read_yaml(name)
    before = _entries(content, "preprocess_passes", name) or _entries(content, "passes", name)
    after = _entries(content, "postprocess_passes", name)
    found = {**_asked(before, BEFORE, name), **_asked(after, AFTER, name)}
    path = content.get("preprocessed_model_path")
    return {**options, "SkipPreprocess": True, **found}, None if path is None else str(path)


def _read_yaml(path: str) -> dict[str, Any]:
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"ShapeShifterYaml={path!r}: a .yaml file, or one of {', '.join(TEMPLATES)}.")
    require_packages("ShapeShifterYaml", "yaml", "yaml")
    import yaml  # of an extra of its own

    try:
        content = plain_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise FormatError(f"{path} is no YAML file: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds no mapping. Possible keys: preprocess_passes, postprocess_passes.")
    known = ("preprocess_passes", "passes", "postprocess_passes", "preprocessed_model_path")
    for key in content:
        if key not in known:
            raise ConfigError(f"{path}: {key!r}. {did_you_mean(str(key), known)}")
    return content


def _entries(content: Mapping[str, Any], group: str, where: str) -> Entries:
    """The passes of a group with their parameters."""
    passes = content.get(group) or {}
    if not isinstance(passes, dict) or not all(isinstance(entry, dict) for entry in passes.values()):
        raise ConfigError(f"{where}: {group}: expected pass names, each with a mapping of parameters.")
    return passes


def _asked(passes: Entries, table: Mapping[str, Mapping[str, str]], where: str) -> dict[str, Any]:
    """The options that a group of passes stands for."""
    options: dict[str, Any] = {}
    for name, parameters in passes.items():
        if name not in table:
            raise NotSupportedError(f"{where}: the pass {name!r}. {did_you_mean(str(name), table)}")
        for key, value in parameters.items():
            if key not in table[name]:
                raise ConfigError(f"{where}: {name}: {key!r}. {did_you_mean(str(key), table[name])}")
            options |= _option(table[name][key], value, f"{where}: {name}")
    return options


def _option(option: str, value: Any, where: str) -> dict[str, Any]:
    if option == "Align":
        kinds = [value] if isinstance(value, str) else value
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= set(ALIGNED):
            raise ConfigError(f"{where}: {value!r}; possible: a list of {', '.join(ALIGNED)}.")
        return {ALIGNED[kind]: True for kind in kinds}
    if option == "FixShapes" and isinstance(value, dict):
        return {option: ";".join(f"{name}:{list(sizes)}" for name, sizes in value.items())}
    if option == "RemoveQDQBetweenOps" and isinstance(value, list):
        return {option: [tuple(pair) for pair in value]}
    return {option: value}
