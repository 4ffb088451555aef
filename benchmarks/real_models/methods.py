"""The methods: `python methods.py METHOD MODEL SAMPLES OUTPUT` quantizes one model in a process of its own.

Documented names only, and no import of this package, so that each method runs with the interpreter that has it.
Prints CPU seconds and the peak memory of the process in MB.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import numpy as np


def preset(name: str, **options: Any) -> Any:
    """A named configuration of quark, ours or the peer's."""

    def run(model: str, feeds: list[dict[str, Any]], output: str) -> None:
        from quark.onnx import ModelQuantizer
        from quark.onnx.quantization.config.config import Config
        from quark.onnx.quantization.config.custom_config import get_default_config

        config = get_default_config(name)
        config.extra_options.update(options)
        ModelQuantizer(Config(global_quant_config=config)).quantize_model(model, output, Reader(feeds))

    return run


def command(data: bool) -> Any:
    """The command line without a configuration, with or without samples."""

    def run(model: str, feeds: list[dict[str, Any]], output: str) -> None:
        from quark.cli import main as quark

        (name,) = feeds[0]
        np.savez(output + ".npz", **{name: np.concatenate([feed[name] for feed in feeds])})
        calibration = ["--calib", output + ".npz", "--batch-size", "1"] if data else []
        sys.argv = ["quark", "quantize", model, *calibration, "-o", output]
        try:
            quark()
        except SystemExit as done:
            if done.code:
                raise

    return run


def channels(target: str, kind: str) -> Any:
    """Quark for a runtime: activations of a type, int8 weights per channel, ranges by MinMax."""

    def run(model: str, feeds: list[dict[str, Any]], output: str) -> None:
        from quark import onnx

        activation = getattr(onnx, kind)(calibration_method=onnx.CalibMethod.MinMax)
        weight = onnx.Int8Spec(quant_granularity=onnx.QuantGranularity.Channel)
        layer = onnx.QLayerConfig(input_tensors=activation, weight=weight)
        onnx.ModelQuantizer(onnx.QConfig(layer, Target=target)).quantize_model(model, output, feeds)

    return run


def dynamic(model: str, feeds: list[dict[str, Any]], output: str) -> None:
    """Quark without samples."""
    from quark.onnx import quantize_dynamic

    quantize_dynamic(model, output, per_channel=True)


def ort_static(model: str, feeds: list[dict[str, Any]], output: str) -> None:
    """ONNX Runtime's own, as its documentation recommends for CPUs; its scales of channels take opset 13."""
    import onnx
    from onnx.version_converter import convert_version
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source = onnx.load(model)
    if next(entry.version for entry in source.opset_import if not entry.domain) < 13:
        model = output + ".opset"
        onnx.save(convert_version(source, 17), model)
    quant_pre_process(model, output + ".pre", skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(output + ".pre", output, Reader(feeds), QuantFormat.QDQ, per_channel=True, **types)


def ort_dynamic(model: str, feeds: list[dict[str, Any]], output: str) -> None:
    """The same without samples."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(model, output)


def nncf(model: str, feeds: list[dict[str, Any]], output: str) -> None:
    """NNCF with its defaults."""
    import onnx
    from nncf import Dataset, quantize

    onnx.save(quantize(onnx.load(model), Dataset(feeds), subset_size=len(feeds)), output)


class Reader:
    """A calibration data reader."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        """The next sample."""
        return next(self._feeds, None)


METHODS: dict[str, tuple[str, Any]] = {
    "quark": ("quark", command(data=True)),
    "quark, no data": ("quark", command(data=False)),
    "quark ort_x64": ("quark", channels("ort_x64", "UInt8Spec")),
    "quark openvino": ("quark", channels("openvino", "Int8Spec")),
    "quark XINT8": ("quark", preset("XINT8")),
    "quark dynamic": ("quark", dynamic),
    "ORT static": ("wheels", ort_static),
    "ORT dynamic": ("wheels", ort_dynamic),
    "amd-quark A8W8": ("peer", preset("A8W8")),
    "amd-quark XINT8": ("peer", preset("XINT8")),
    "NNCF": ("wheels", nncf),
}
"""Name -> the environment that has it, and the function."""


def main() -> None:
    """Run one method."""
    method, model, samples, output = sys.argv[1:]
    arrays = np.load(samples)
    names = arrays.files
    feeds = [dict(zip(names, rows, strict=True)) for rows in zip(*(arrays[name] for name in names), strict=True)]
    METHODS[method][1](model, feeds, output)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
