"""Whole quantization of a file, 16 samples: CPU seconds of one thread and peak memory, each in a fresh process.

Tools: quark (this interpreter's, ours or the peer's, by documented names only) and, beside ours, ONNX Runtime's
quantize_static, in turns: of each the fewest seconds. A tool that fails reports its error. "MinMax_per_tensor" is int8
with one scale a weight, for which quark corrects biases by itself; its SQNR is of 8 samples that are held out.

"bare" is the least that a whole call can take: CPU seconds of the 16 samples in the float model and, where biases are
corrected, in the quantized one, without sessions, files or anything that is computed of activations. "bare_ratio" is
that of quark's model over the whole call of ONNX Runtime: no seconds_ratio can be below it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

MODELS, ROUNDS = ("resnet50", "encoder", "bert_base"), 2
MAKER = Path(__file__).parents[1] / "onnx_models.py"
METHODS = ("MinMax", "MinMax_per_tensor", "Percentile", "Entropy")
COMMON = """
import json, resource, sys, time
import numpy as np
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
name, method, source, output = sys.argv[1:]
method, _, per_tensor = method.partition("_")
Session = onnxruntime.InferenceSession
class OneThread(Session):
    def __init__(self, model, sess_options=None, *rest, **named):
        options = sess_options or onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        super().__init__(model, options, *rest, **named)
onnxruntime.InferenceSession = OneThread
def feeds(count, seed):
    random = np.random.default_rng(seed)
    for _ in range(count):
        if name == "resnet50":
            yield {"x": random.normal(size=(1, 3, 224, 224)).astype(np.float32)}
        else:
            yield {"ids": random.integers(0, 1000, (1, 128))}
class Reader(CalibrationDataReader):
    def __init__(self):
        self.feeds = feeds(16, 0)
    def get_next(self):
        return next(self.feeds, None)
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def done(start, before):
    seconds, peak = time.process_time() - start, memory() - before
    outputs, spent = [], []
    for file in (source, output):
        model, held = OneThread(file), list(feeds(8, 1))
        began = time.process_time()
        outputs.append(np.concatenate([model.run(None, feed)[0] for feed in held]).astype(np.float64))
        spent.append(2 * (time.process_time() - began))
    x, y = outputs
    sqnr = 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())
    bare = sum(spent) if per_tensor else spent[0]
    print(json.dumps({"seconds": seconds, "peak_mb": peak / 1024, "sqnr": sqnr, "bare": bare}))
"""
CHILDREN = {
    "quark": COMMON
    + """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx import QuantType, QuantFormat
config = Config(global_quant_config=QuantizationConfig(
    calibrate_method=CalibrationMethod[method], quant_format=QuantFormat.QDQ, include_cle=False,
    per_channel=not per_tensor, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8))
before, start = memory(), time.process_time()
ModelQuantizer(config).quantize_model(source, output, Reader())
done(start, before)
""",
    "onnxruntime": COMMON
    + """
from onnxruntime.quantization import quantize_static
before, start = memory(), time.process_time()
quantize_static(source, output, Reader(), quant_format=QuantFormat.QDQ, per_channel=not per_tensor,
    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod[method])
done(start, before)
""",
}


def run(tool: str, name: str, method: str, folder: Path) -> dict[str, Any]:
    """One tool on one model, in a process of its own."""
    command = [sys.executable, "-c", CHILDREN[tool], name, method, str(folder / f"{name}.onnx"), str(folder / "q.onnx")]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        return {"error": child.stderr.strip().splitlines()[-1][:200]}
    return dict(json.loads(child.stdout.splitlines()[-1]))


def fewest(tools: list[str], name: str, method: str, folder: Path) -> dict[str, Any]:
    """The tools in turns; of each the process that took the fewest seconds."""
    rounds = [{tool: run(tool, name, method, folder) for tool in tools} for _ in range(ROUNDS)]
    return {tool: min((one[tool] for one in rounds), key=lambda x: x.get("seconds", 0.0)) for tool in tools}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.folder import model_folder

    folder = model_folder()
    # In a process of its own: the peak memory of a child begins with what its parent holds, as torch.
    subprocess.run([sys.executable, str(MAKER), str(folder), *MODELS], check=True, stdout=subprocess.DEVNULL)
    tools = ["quark"] + (["onnxruntime"] if any(d.name == "openquark" for d in metadata.distributions()) else [])
    result: dict[str, Any] = {}
    for name in MODELS:
        for method in METHODS:
            figures = fewest(tools, name, method, folder)
            for what in ("seconds", "peak_mb"):
                values = [figures[tool].get(what) for tool in tools]
                if len(values) == 2 and None not in values:
                    figures[f"{what}_ratio"] = values[0] / values[1]
            if "seconds_ratio" in figures:
                figures["bare_ratio"] = figures["quark"]["bare"] / figures["onnxruntime"]["seconds"]
            result.setdefault(name, {})[method] = figures
    print(json.dumps({"benchmark": "onnx_quantize", **result}))


if __name__ == "__main__":
    main()
