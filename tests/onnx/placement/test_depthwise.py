"""Depthwise convolutions keep float activations where an input is quantized as it comes: one scale loses channels."""

from __future__ import annotations

import numpy as np
import onnx

from quark.core.metrics import sqnr
from quark.onnx import Config, ModelQuantizer, get_default_config
from tests.models.onnx_zoo import Array, Builder, run

SIZES = 10.0 ** np.linspace(-2, 0, 8)
"""Of the channels of the input."""


def uneven(group: int = 8) -> onnx.ModelProto:
    """A depthwise convolution that makes channels of different size alike, and a layer that reads them."""
    b = Builder()
    kernels = b.random.normal(0, 1, (8, 8 // group, 3, 3)) / SIZES[:, None, None, None]
    b.node("Conv", ["x", b.constant("k", kernels)], "each", group=group)
    b.node("Conv", ["each", b.constant("w", b.random.normal(0, 1, (4, 8, 1, 1)))], "y")
    return b.model({"x": [1, 8, 12, 12]}, {"y": [1, 4, 10, 10]})


def images() -> Array:
    return (np.random.default_rng(1).normal(size=(1, 8, 12, 12)) * SIZES[:, None, None]).astype(np.float32)


def quantized(model: onnx.ModelProto, *nodes: str) -> onnx.ModelProto:
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options["NodesToQuantize"] = list(nodes)
    done = ModelQuantizer(Config(config)).quantize_model(model)
    assert done is not None
    return done


def test_the_weight_alone_is_stored_as_integers() -> None:
    source, feed = uneven(), {"x": images()}
    done, named = quantized(source), quantized(source, "each_node", "y_node")
    weights = {t.name: t.data_type for t in done.graph.initializer if list(t.dims) == [8, 1, 3, 3]}
    assert list(weights.values()) in ([onnx.TensorProto.INT8], [onnx.TensorProto.UINT8])
    kinds = [[node.op_type for node in model.graph.node] for model in (done, named)]
    assert [each.count("ConvInteger") for each in kinds] == [1, 2]
    one, both = (sqnr(run(source, feed), run(model, feed)) for model in (done, named))
    assert one > both + 6


def test_a_layer_over_all_channels_stays_in_integers() -> None:
    kinds = [node.op_type for node in quantized(uneven(group=1)).graph.node]
    assert kinds.count("ConvInteger") == 2
