"""Weight-only round to nearest on four Linear(4096, 4096) in float32, quantize_model + freeze.

Each case runs in processes of its own, with torch's default threads. The peer compiles its kernel
at the first use in a process, so first and later models are told apart:

* `first_seconds`: the first model of a process, with an empty compiler cache on disk.
* `first_cached_seconds`: the same in a second and a third process, with the cache that the first one left; of these
  the better one, since a first model comes only once in a process.
* `seconds`: median of three more models in that second process, all fresh.
* `clone_seconds`: cloning the four weights, median of 7 after a warm-up. `first_cached_clone_ratio`
  and `clone_ratio` divide by it, within one process and so fair on a busy machine.
* `peak_extra_bytes`: the most resident memory above that of the float model, median of three
  further runs (it depends on when cycles are collected); `peak_extra_weights` is the same in units
  of one weight. Read from Linux's high-water mark.

QUARK_DISABLE_COMPILE=1 in the environment measures the peer without torch.compile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LAYERS = 4
SIZE = 4096
WEIGHT_BYTES = SIZE * SIZE * 4
FIRST_RATIO = "first_cached_clone_ratio"
CASES = ("int8_per_channel", "int4_group_128", "fp8_per_tensor", "mxfp4")


def run_case(case: str) -> dict[str, float]:
    """Measure one case in this process."""
    import torch

    from quark.torch import ModelQuantizer
    from quark.torch.quantization import (
        FP8E4M3PerTensorSpec,
        Int4PerGroupSpec,
        Int8PerChannelSpec,
        OCP_MXFP4Spec,
        QConfig,
        QLayerConfig,
    )

    specs = {
        "int8_per_channel": Int8PerChannelSpec(ch_axis=0, symmetric=True, is_dynamic=False),
        "int4_group_128": Int4PerGroupSpec(ch_axis=-1, group_size=128, symmetric=True, is_dynamic=False),
        "fp8_per_tensor": FP8E4M3PerTensorSpec(is_dynamic=False),
        "mxfp4": OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }

    def float_model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))

    def quantize(model: torch.nn.Sequential) -> None:
        config = QConfig(global_quant_config=QLayerConfig(weight=specs[case].to_quantization_spec()))
        quantizer = ModelQuantizer(config)
        quantizer.freeze(quantizer.quantize_model(model))

    def seconds_on_fresh_model() -> float:
        model = float_model()
        return seconds_of(lambda: quantize(model))

    def peak_extra_bytes_on_fresh_model() -> int:
        model = float_model()
        return peak_extra_bytes_of(lambda: quantize(model))

    first = seconds_on_fresh_model()

    parameters = list(float_model().parameters())
    clones = [seconds_of(lambda: [p.clone() for p in parameters]) for _ in range(8)]
    clone = statistics.median(clones[1:])
    parameters.clear()

    seconds = statistics.median(seconds_on_fresh_model() for _ in range(3))

    peak_extra_bytes = statistics.median(peak_extra_bytes_on_fresh_model() for _ in range(3))
    return {
        "first_cached_seconds": first,
        FIRST_RATIO: first / clone,
        "seconds": seconds,
        "clone_seconds": clone,
        "clone_ratio": seconds / clone,
        "peak_extra_bytes": peak_extra_bytes,
        "peak_extra_weights": peak_extra_bytes / WEIGHT_BYTES,
    }


def seconds_of(action: Callable[[], object]) -> float:
    """CPU seconds of `action`, without the time to free its result."""
    gc.collect()
    start = time.process_time()
    result = action()
    elapsed = time.process_time() - start
    del result
    return elapsed


def peak_extra_bytes_of(action: Callable[[], object]) -> int:
    """The peak of resident memory while `action` runs, above what is resident before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else `action` reuses freed pages unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present use
    before = high_water_bytes()
    action()
    return high_water_bytes() - before


def high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def run_in_children(case: str) -> dict[str, float]:
    """Measure one case in three new processes; only the first finds no compiler cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = (run_in_child(case, cache) for _ in range(3))
    return {"first_seconds": cold["first_cached_seconds"], **min(warm, key=lambda found: found[FIRST_RATIO])}


def run_in_child(case: str, cache: str) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, __file__, case],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run_case(sys.argv[1])))
        return
    result = {
        "benchmark": "weight_only",
        "compiled": os.environ.get("QUARK_DISABLE_COMPILE") != "1",
        "cases": {case: run_in_children(case) for case in CASES},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
