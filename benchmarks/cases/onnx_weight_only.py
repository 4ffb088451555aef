"""Weight-only int8, per channel, of a 2.7 GB model beside its weights: CPU seconds, peak anonymous memory (Linux)."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def anonymous_gb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


def main() -> None:
    from benchmarks.folder import model_folder
    from benchmarks.onnx_models import export_linear

    folder = model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    source = export_linear(folder)
    from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity

    weight = Int8Spec(quant_granularity=QuantGranularity.Channel)
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=weight), WeightsOnly=True, use_external_data_format=True
    )
    peak, running = [0.0], [True]

    def watch() -> None:
        while running[0]:
            peak[0] = max(peak[0], anonymous_gb())
            time.sleep(0.01)

    before = anonymous_gb()
    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    ModelQuantizer(config).quantize_model(source, folder / "linear_int8.onnx")
    seconds = time.process_time() - start
    running[0] = False
    watcher.join()
    print(json.dumps({"benchmark": "onnx_weight_only", "seconds": seconds, "anonymous_gb": peak[0] - before}))


if __name__ == "__main__":
    main()
