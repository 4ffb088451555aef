"""Outputs of the ONNX flow: every named configuration on models with convolutions and with matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from tests.models.onnx_zoo import cnn, images, mlp, vectors

from benchmarks.fingerprint.outputs import MODELS, OUT, add
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, custom_config, get_default_config_mapping

Feeds = list[dict[str, np.ndarray]]


def digits() -> tuple[onnx.ModelProto, Feeds]:
    """The embedded classifier and 32 of its images."""
    data = np.load(MODELS / "digits_cnn" / "data.npz")
    seen = (data["calibration_images"][:32] / 16).astype(np.float32)
    return onnx.load(MODELS / "digits_cnn" / "model.onnx"), [{"image": batch} for batch in np.split(seen, 8)]


NETWORKS: dict[str, Callable[[], tuple[onnx.ModelProto, Feeds]]] = {
    "digits": digits,
    "cnn": lambda: (cnn(), images()),
    "mlp": lambda: (mlp(), vectors()),
}
NAMES = list(get_default_config_mapping())
QNAMES = [f"{name}_QCONFIG" for name in NAMES if hasattr(custom_config, f"{name}_QCONFIG")]


def config(name: str) -> Any:
    """The configuration, where it learns with few iterations."""
    if name in NAMES:
        made = get_default_config_mapping()[name]
        if made.include_fast_ft:
            made.extra_options["FastFinetune"] = {**made.extra_options["FastFinetune"], "NumIterations": 3}
        return Config(global_quant_config=made)
    full = getattr(custom_config, name)
    return replace(full, algo_config=[replace(algorithm, num_iterations=3) for algorithm in full.algo_config])


def preset(name: str, network: str) -> None:
    model, feeds = NETWORKS[network]()
    ModelQuantizer(config(name)).quantize_model(model, str(OUT / "model.onnx"), feeds)


for _name in (*NAMES, *QNAMES):
    for _network in NETWORKS:
        add(f"onnx/presets/{_name}/{_network}", preset, _name, _network)
