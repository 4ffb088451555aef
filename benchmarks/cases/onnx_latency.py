"""Speed and output SQNR of quantized files in stock ONNX Runtime, one thread, against the float file.

Float and quantized sessions run in turn, 24 rounds; `time` is the median of the CPU seconds of a quantized call over
those of the float one in the same round, `ratio` its inverse (higher is better). SQNR is over 8 samples that
calibration saw.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
ROUNDS, SAMPLES = 24, 32


class Reader:
    """Yields feeds."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def quantize(name: str, source: Path, output: Path, feeds: list[Any]) -> None:
    """Write the quantized file of this name."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    from quark.onnx import (
        CalibMethod,
        Config,
        Int8Spec,
        ModelQuantizer,
        QConfig,
        QLayerConfig,
        QuantGranularity,
        UInt8Spec,
        get_default_config,
    )

    class TheirReader(Reader, CalibrationDataReader):
        pass

    if name == "ort_default":
        quantize_static(source, output, TheirReader(feeds), quant_format=QuantFormat.QDQ)
    elif name == "ort_best":
        quantize_static(
            source, output, TheirReader(feeds), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
    elif name == "bf16":
        ModelQuantizer(Config(get_default_config("BF16"))).quantize_model(source, output, Reader(feeds))
    else:
        weight = Int8Spec(quant_granularity=QuantGranularity.Channel)
        layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=weight)
        ModelQuantizer(QConfig(layer, Target="ort_x64")).quantize_model(source, output, Reader(feeds))


def measure(model: str, folder: Path) -> dict[str, Any]:
    from benchmarks.onnx_models import samples
    from quark.core.metrics import sqnr

    source, feeds = folder / f"{model}.onnx", samples(model, SAMPLES)
    paths = {"float": source}
    for name in ("ort_x64", "ort_default", "ort_best", "bf16"):
        paths[name] = folder / f"{model}_{name}.onnx"
        quantize(name, source, paths[name], feeds)
    sessions = {name: session(path) for name, path in paths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, one in sessions.items():
            start = time.process_time()
            one.run(None, feeds[0])
            seconds[name].append(time.process_time() - start)
    times = {
        name: statistics.median(one / base for one, base in zip(found, seconds["float"], strict=True))
        for name, found in seconds.items()
    }
    outputs = {name: np.stack([one.run(None, feed)[0] for feed in feeds[:8]]) for name, one in sessions.items()}
    return {
        name: {
            "ratio": 1 / times[name],
            "time": times[name],
            "sqnr": sqnr(outputs["float"], outputs[name]),
            "megabytes": path.stat().st_size / 1e6,
        }
        for name, path in paths.items()
        if name != "float"
    } | {"float_ms": min(seconds["float"]) * 1e3}


def main() -> None:
    from benchmarks.folder import model_folder
    from benchmarks.onnx_models import export

    export(model_folder())
    result = {model: measure(model, model_folder()) for model in ("resnet50", "encoder")}
    print(json.dumps({"benchmark": "onnx_latency", **result}))


if __name__ == "__main__":
    main()
