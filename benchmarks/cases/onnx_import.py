"""CPU seconds of importing quark.onnx, over those of `import onnx, onnxruntime`: medians of five fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

CHILD = """
import sys, time
start = time.process_time()
import onnx, onnxruntime
middle = time.process_time()
from quark.onnx import ModelQuantizer  # `import quark.onnx` alone loads nothing
print(middle - start, time.process_time() - middle, int("torch" in sys.modules))
"""


def sample() -> list[float]:
    """Seconds of the runtime's import, of ours after it, and whether torch was loaded."""
    child = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=True)
    return [float(part) for part in child.stdout.splitlines()[-1].split()]


def main() -> None:
    sample()
    base, extra, torch = zip(*(sample() for _ in range(5)), strict=True)
    result = {"benchmark": "onnx_import", "onnx_and_onnxruntime_seconds": statistics.median(base)}
    ratio = statistics.median((before + after) / before for before, after in zip(base, extra, strict=True))
    extra_seconds = statistics.median(extra)
    print(json.dumps({**result, "quark_after_seconds": extra_seconds, "ratio": ratio, "loads_torch": max(torch)}))


if __name__ == "__main__":
    main()
