"""Whole quantization of a file, 16 samples: seconds of the call and peak memory, each in a fresh process.

Tools: quark (this interpreter's, ours or the peer's, by documented names only) and, beside ours, ONNX Runtime's
quantize_static. A tool that fails reports its error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

MODELS, METHODS, ROUNDS = ("resnet50", "encoder"), ("MinMax", "Percentile", "Entropy"), 2
COMMON = """
import json, resource, sys, time
import numpy as np
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
name, method, source, output = sys.argv[1:]
random = np.random.default_rng(0)
class Reader(CalibrationDataReader):
    def __init__(self):
        if name == "encoder":
            self.feeds = iter([{"ids": random.integers(0, 1000, (1, 128))} for _ in range(16)])
        else:
            self.feeds = iter([{"x": random.normal(size=(1, 3, 224, 224)).astype(np.float32)} for _ in range(16)])
    def get_next(self):
        return next(self.feeds, None)
def done(start, before):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_mb": peak / 1024}))
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""
CHILDREN = {
    "quark": COMMON
    + """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx import QuantType, QuantFormat
config = Config(global_quant_config=QuantizationConfig(
    calibrate_method=CalibrationMethod[method], quant_format=QuantFormat.QDQ, per_channel=True, include_cle=False,
    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8))
before, start = memory(), time.perf_counter()
ModelQuantizer(config).quantize_model(source, output, Reader())
done(start, before)
""",
    "onnxruntime": COMMON
    + """
from onnxruntime.quantization import quantize_static
before, start = memory(), time.perf_counter()
quantize_static(source, output, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod[method])
done(start, before)
""",
}


def run(tool: str, name: str, method: str, folder: Path) -> dict[str, Any]:
    """One tool on one model: the faster of two processes."""
    command = [sys.executable, "-c", CHILDREN[tool], name, method, str(folder / f"{name}.onnx"), str(folder / "q.onnx")]
    best: dict[str, Any] = {}
    for _ in range(ROUNDS):
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode:
            return {"error": child.stderr.strip().splitlines()[-1][:200]}
        figures = json.loads(child.stdout.splitlines()[-1])
        best = min(best or figures, figures, key=lambda entry: entry["seconds"])
    return best


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.folder import model_folder

    folder = model_folder()
    tools = ["quark"] + (["onnxruntime"] if any(d.name == "openquark" for d in metadata.distributions()) else [])
    result: dict[str, Any] = {}
    for name in MODELS:
        for method in METHODS:
            figures: dict[str, Any] = {tool: run(tool, name, method, folder) for tool in tools}
            for what in ("seconds", "peak_mb"):
                values = [figures[tool].get(what) for tool in tools]
                if len(values) == 2 and None not in values:
                    figures[f"{what}_ratio"] = values[0] / values[1]
            result.setdefault(name, {})[method] = figures
    print(json.dumps({"benchmark": "onnx_quantize", **result}))


if __name__ == "__main__":
    main()
