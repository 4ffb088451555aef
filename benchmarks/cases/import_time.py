"""Import time of the peer, each sample in a fresh process.

Measures the CPU seconds of `import torch`, then of `import quark.torch` in the same process, and
prints the medians of three processes. One process goes before them uncounted: it builds the peer's
C++ extension if that is still to do, and fills the file cache. `ratio` is both imports over torch's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

SAMPLES = 3
CHILD = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import quark.torch
end = time.process_time()
print(middle - start, end - middle)
"""


def sample() -> tuple[float, float]:
    """Seconds of `import torch` and of the `import quark.torch` after it, in a new process."""
    child = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=True)
    torch_seconds, quark_seconds = child.stdout.splitlines()[-1].split()
    return float(torch_seconds), float(quark_seconds)


def main() -> None:
    sample()
    samples = [sample() for _ in range(SAMPLES)]
    result = {
        "benchmark": "import",
        "torch_seconds": statistics.median(torch for torch, _ in samples),
        "quark_after_torch_seconds": statistics.median(quark for _, quark in samples),
        "ratio": statistics.median((torch + quark) / torch for torch, quark in samples),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
