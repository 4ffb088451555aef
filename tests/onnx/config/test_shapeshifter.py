"""ShapeShifterYaml: documented passes in a file are the options that ask for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from quark.errors import ConfigError, FormatError, NotSupportedError, OutputExistsError, QuarkError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.config.extra_options import OPTIONS
from quark.onnx.config.lowering.shapeshifter import AFTER, ALIGNED, BEFORE, TEMPLATES
from quark.onnx.passes import PASSES
from tests.models.onnx_zoo import Reader, cnn, images
from tests.onnx.config.test_lowering import new

ON = {row.option: name for name, row in PASSES.items()}


def passes(**options: Any) -> set[str]:
    """The passes that run."""
    return {name for name, value in new(**options).passes.items() if value not in (None, False)}


def test_every_parameter_is_an_option() -> None:
    found = {option for table in (BEFORE, AFTER) for entry in table.values() for option in entry.values()}
    assert found - {"Align"} <= {*OPTIONS} and {*ALIGNED.values()} <= {*OPTIONS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_lists_that_have_a_name(name: str) -> None:
    options = ("ConvertOpsetVersion", "SimplifyModel", "CopyBiasInit", "FoldBatchNorm", "RemoveInputInit")
    expected = {*options, "FuseInstanceNorm", "FuseL2Norm", "FuseGelu", "FuseLayerNorm"}
    if name == "xint8":
        expected |= {"ConvertSplitToSlice", "ConvertBNToConv", "ConvertReduceMeanToGlobalAvgPool"}
        expected |= {"SplitLargeKernelPool"}
    assert passes(ShapeShifterYaml=name) == passes(PreprocessYAML=name) == {ON[option] for option in expected}
    assert new(ShapeShifterYaml=name).passes["convert_opset_version"] == 21


@pytest.mark.slow
def test_the_documented_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "passes.yaml"
    prepared = tmp_path / "prepared.onnx"
    file.write_text(
        f"""
preprocess_passes:
  onnx_convert_opset_version: {{target_opset_version: 21}}
  onnx_fold_batch_norm: {{fold_batch_norm: true}}
  onnx_fix_shapes: {{input_output_name_shapes: {{x: [1, 3, 16, 16], y: [1, 10]}}}}
preprocessed_model_path: {prepared}
postprocess_passes:
  onnx_align_scale: {{align_scale: [Concat, MaxPool]}}
  onnx_adjust_bias_scale: {{adjust_bias_scale: true}}
  onnx_remove_qdq_between_op_types: {{remove_qdq_between_op_types: [[Concat, MaxPool]]}}
""",
        encoding="utf-8",
    )
    options = {"ShapeShifterYaml": str(file)}
    assert passes(**options) == {"convert_opset_version", "fold_batch_norm", "fix_shapes"}
    settings = new(**options)
    assert set(settings.qdq.align) == {"Concat", "Pool"} and ("Concat", "MaxPool") in settings.qdq.fused
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), extra_options=options)
    model = ModelQuantizer(config).quantize_model(cnn(), None, Reader([{"x": f["x"][:1]} for f in images()]))
    assert model is not None and [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 10]
    float_model = onnx.load(prepared)
    kinds = [node.op_type for node in float_model.graph.node]
    assert "BatchNormalization" not in kinds and "QuantizeLinear" not in kinds
    assert float_model.opset_import[0].version == 21
    with pytest.raises(OutputExistsError):
        ModelQuantizer(config).quantize_model(cnn(), prepared, Reader(images()))


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("a: [", FormatError, "is no YAML file"),
        ("- a", FormatError, "holds no mapping"),
        ("preproces_passes: {}", ConfigError, "'preproces_passes'. Did you mean 'preprocess_passes'"),
        ("passes: [a]", ConfigError, "expected pass names"),
        ("passes: {onnx_fold_batchnorm: {}}", NotSupportedError, "Did you mean 'onnx_fold_batch_norm'"),
        ("passes: {onnx_fuse_gelu: {fuse: true}}", ConfigError, "'fuse'"),
        ("passes: {onnx_fuse_gelu: {fuse_gelu: 3}}", ConfigError, "FuseGelu: expected bool, got 3"),
        ("postprocess_passes: {onnx_align_scale: {align_scale: [Conv]}}", ConfigError, "a list of Concat"),
    ],
)
def test_what_is_wrong_is_refused_by_name(text: str, error: type[QuarkError], says: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "passes.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=says):
        new(ShapeShifterYaml=str(file))


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match="a .yaml file, or one of xint8"):
        new(ShapeShifterYaml="xint9")
