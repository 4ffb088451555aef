"""The tools of the ONNX flow on models of each kind, and the readers of calibration data."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx

import quark.onnx.tools
from benchmarks.fingerprint.onnx_models import NETWORKS
from benchmarks.fingerprint.onnx_presets import config
from benchmarks.fingerprint.outputs import add, hash_arrays
from benchmarks.fingerprint.program import run
from quark.onnx import ModelQuantizer, PathDataReader, RandomDataReader

TOOLS = sorted(module.name for module in pkgutil.iter_modules(quark.onnx.tools.__path__) if not module.ispkg)
FLAGS: dict[str, tuple[str, ...]] = {
    "convert_dynamic_to_fixed": ("--fix_shapes", "x:[2,3,16,16]"),
    "convert_fp32_to_bf16": ("--format", "bf16"),
    "convert_fp32_to_fp16": ("--keep_io_types",),
    "convert_opset_version": ("--target_opset", "21"),
    "convert_shared_initializer_to_unique": ("--op_types", "Conv, Gemm"),
    "fix_shapes": ("--fix_shapes", "x:[2,3,16,16]"),
    "random_quantize": ("--config", "A8W8", "--exclude_nodes", "y_node"),
    "remove_qdq_between_ops": ("--between_ops", "Conv,Relu;Mul,Add"),
    "replace_inf_weights": ("--replace_inf_value", "7"),
}
"""What tools need, or may be given."""


def plain(network: str) -> onnx.ModelProto:
    """A float model."""
    return NETWORKS[network]()[0]


def infinite() -> onnx.ModelProto:
    """A model with infinite weights."""
    model = plain("mlp")
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, :2] = np.inf, -np.inf
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, model.graph.initializer[0].name))
    return model


@cache
def under(preset: str) -> onnx.ModelProto:
    """A quantized model."""
    model, feeds = NETWORKS["cnn"]()
    made = ModelQuantizer(config(preset)).quantize_model(model, None, feeds)
    assert made is not None
    return made


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: partial(plain, name) for name in ("cnn", "pools", "half", "shared", "legacy")},
    "infinite": infinite,
    **{name: partial(under, name) for name in ("A8W8", "S16S8_ASWS", "U16S8_AAWS", "U8U8_AAWA", "BF16", "BFP16")},
}


def converted(tool: str) -> str:
    """Each model, converted; and what the tool says."""
    said = []
    for name, make in MODELS.items():
        onnx.save(make(), "in.onnx")
        paths = ("--input", "in.onnx", "--output", f"out/{name}.onnx")
        said.append(run(f"quark.onnx.tools.{tool}", *paths, *FLAGS.get(tool, ())))
    return "".join(said)


def text() -> str:
    """A model as text, and back."""
    onnx.save(MODELS["cnn"](), "in.onnx")
    shown = run("quark.onnx.tools.convert_onnx_to_onnxtxt", "in.onnx", "out/model.onnxtxt")
    return shown + run("quark.onnx.tools.convert_onnxtxt_to_onnx", "out/model.onnxtxt", "out/model.onnx")


def compared() -> str:
    """Two folders of results."""
    random = np.random.default_rng(0)
    for folder, noise in (("float", 0.0), ("quantized", 0.1)):
        Path(folder).mkdir()
        for name in ("a", "b"):
            np.save(f"{folder}/{name}.npy", np.arange(12.0) + noise * random.normal(size=12))
    return run(
        "quark.onnx.tools.evaluate", "--baseline_results_folder", "float", "--quantized_results_folder", "quantized"
    )


def read() -> str:
    """Samples from a file, from a folder, and at random."""
    model, feeds = NETWORKS["cnn"]()
    batch = np.concatenate([sample["x"] for sample in feeds])
    np.savez("samples.npz", x=batch)
    Path("samples").mkdir()
    for index, image in enumerate(batch[:3]):
        np.save(f"samples/{index}.npy", image)
    readers = (
        PathDataReader(model, "samples.npz", batch_size=4),
        PathDataReader(model, "samples"),
        RandomDataReader(model, input_shape={"x": [2, 3, 16, 16]}),
    )
    found = [hash_arrays(sample.values()) for reader in readers for sample in iter(reader.get_next, None)]
    for path in ("samples.npz", "samples"):
        ModelQuantizer(config("A8W8")).quantize_model(model, f"out/{path}.onnx", None, path)
    return "\n".join(found)


for _tool in TOOLS:
    add(f"onnx/tools/{_tool}", converted, _tool)
add("onnx/tools/text", text)
add("onnx/tools/evaluate", compared)
add("onnx/readers", read)
