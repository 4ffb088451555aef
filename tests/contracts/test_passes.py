"""Every graph pass on every model of the zoo: same outputs, twice = once, valid, bodies untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from quark.onnx.graph.model_file import infer_shapes, opset, read, to_proto
from quark.onnx.passes import PASSES
from tests.models.onnx_zoo import ZOO, feed, outputs

CHANGES: dict[str, dict[str, int]] = {
    "convert_opset_version": {"cnn": 1, "cnn11": 1, "branches11": 1, "legacy": 1, "shared": 1},
    "fix_shapes": {"cnn": 1, "half": 1, "branches": 1, "legacy": 1},
    "convert_fp16_to_fp32": {"half": 6},
    "convert_nchw_to_nhwc": {"cnn": 1, "pools": 1, "legacy": 1},
    "remove_input_init": {"legacy": 7},
    "simplify": {"clutter": 10, "branches": 1, "legacy": 1, "half": 1},
    "copy_shared_init": {"shared": 4},
    "copy_bias_init": {"shared": 2},
    "fuse_instance_norm": {"instance_norms": 2},
    "fuse_l2_norm": {"l2_norms": 2},
    "fuse_layer_norm": {"layer_norms": 2, "layer_norms18": 2, "gelus": 0},
    "fuse_gelu": {"gelus": 3, "gelus19": 0},
    "fold_batch_norm": {"cnn": 6, "cnn11": 6, "pools": 1, "legacy": 0},
    "fold_factors": {"hard_swish": 2, "gelus": 0},
    "replace_clip6_relu": {"cnn": 1, "pools": 1, "legacy": 1},
    "convert_split_to_slice": {"pools": 1, "pools11": 1},
    "convert_bn_to_conv": {"pools": 2, "cnn": 6, "mlp": 0},
    "convert_reduce_mean": {"pools": 2, "pools11": 2},
    "split_large_pool": {"pools": 1},
}
"""How many places a pass changes in a model, counted by hand."""

CHANGES_VALUES = ("replace_clip6_relu", "store_float16")


def apply(name: str, model: Any, *arguments: Any) -> int:
    return PASSES[name](model, *arguments)


def argument(name: str, model: onnx.ModelProto) -> list[Any]:
    if name == "convert_opset_version":
        return [21]
    if name == "fix_shapes":
        return [";".join(f"{key}:{list(value.shape)}" for key, value in feed(model).items())]
    return []


def has_images(model: onnx.ModelProto) -> bool:
    return any(value.ndim == 4 for value in feed(model).values())


def fitting(sample: dict[str, Any], model: onnx.ModelProto, name: str) -> dict[str, Any]:
    """The same data in the types and the layout that the changed model takes."""
    kinds = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    nhwc = name == "convert_nchw_to_nhwc"
    return {k: (v.transpose(0, 2, 3, 1) if nhwc and v.ndim == 4 else v).astype(kinds[k]) for k, v in sample.items()}


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_outputs_and_twice_is_once(name: str, model: str) -> None:
    proto = ZOO[model]()
    if name == "convert_nchw_to_nhwc" and not has_images(proto):
        pytest.skip("refused: no images")
    before = proto.SerializeToString()
    loaded = read(proto)
    infer_shapes(loaded)
    count = apply(name, loaded, *argument(name, proto))
    assert isinstance(count, int) and count >= 0
    expected = CHANGES.get(name, {}).get(model, count)
    assert count == expected
    changed = to_proto(loaded)
    onnx.checker.check_model(changed, full_check=True)
    assert [v.name for v in changed.graph.output] == [v.name for v in proto.graph.output]
    assert proto.SerializeToString() == before, "the user's model was changed"
    assert apply(name, loaded, *argument(name, proto)) == 0
    assert to_proto(loaded).SerializeToString() == changed.SerializeToString()
    if count and name in CHANGES_VALUES:
        return
    sample = feed(proto)
    tolerance = 5e-3 if model == "half" else 2e-5
    found = outputs(changed, fitting(sample, changed, name))
    for one, other in zip(outputs(proto, sample), found, strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


def test_every_pass_changes_some_model() -> None:
    busy = {name for name, models in CHANGES.items() if any(models.values())}
    # Those of the quantized graph have tests of their own in tests/onnx.
    assert busy == {name for name, row in PASSES.items() if not row.on_quantized}


@pytest.mark.parametrize("name", PASSES)
def test_bodies_of_if_stay_as_they_are(name: str) -> None:
    if name in ("convert_opset_version", "convert_nchw_to_nhwc"):
        pytest.skip("changes operators everywhere, or refuses the model")
    proto = ZOO["branches"]()
    loaded = read(proto)
    apply(name, loaded, *argument(name, proto))
    assert opset(loaded) == 17

    def bodies(model: onnx.ModelProto) -> list[Any]:
        (node,) = [node for node in model.graph.node if node.op_type == "If"]
        # The Identity that makes "hidden" may go: what the bodies then read is its input.
        reads = {"hidden": "product"}
        return [[(n.op_type, [reads.get(i, i) for i in n.input], n.name) for n in a.g.node] for a in node.attribute]

    assert bodies(to_proto(loaded)) == bodies(proto)
