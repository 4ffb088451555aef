"""Calibration of the two benchmark models, as a multiple of the float inference of the same 32 samples.

Both sides include making their session, with graph optimisation on. Float inference and every method are timed in
turn, five rounds; the figure is the ratio of the least times. `peak_mb` is what calibration adds to the process.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

SAMPLES, ROUNDS = 32, 5
METHODS = ("MinMax", "Percentile", "Entropy")


class Reader:
    """Yields feeds."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def measure(name: str, folder: Path) -> dict[str, Any]:
    import onnxruntime

    from benchmarks.onnx_models import samples
    from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
    from quark.onnx.calibration.calibrate import activation_params
    from quark.onnx.graph.model_file import load
    from quark.onnx.placement.place import place

    path, feeds = folder / f"{name}.onnx", samples(name, SAMPLES)

    def inference() -> None:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for feed in feeds:
            session.run(None, feed)

    actions: dict[str, Any] = {"float": inference}
    for method in METHODS:
        spec = UInt8Spec(calibration_method=CalibMethod[method])
        settings = ModelQuantizer(QConfig(QLayerConfig(input_tensors=spec, weight=Int8Spec()))).settings
        model = load(path)
        placement = place(model, settings)
        arguments = (model, placement, settings)
        actions[method] = lambda arguments=arguments: activation_params(*arguments, Reader(feeds))
    least = dict.fromkeys(actions, float("inf"))
    memory = {}
    for _ in range(ROUNDS):
        for key, action in actions.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter()
            action()
            least[key] = min(least[key], time.perf_counter() - start)
            memory.setdefault(key, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    ratios = {key: least[key] / least["float"] for key in METHODS}
    return {"float_seconds": least["float"], "ratios": ratios, "peak_mb": memory}


def main() -> None:
    from benchmarks.folder import model_folder
    from benchmarks.onnx_models import export

    export(model_folder())
    result = {name: measure(name, model_folder()) for name in ("resnet50", "encoder")}
    print(json.dumps({"benchmark": "onnx_calibration", **result}))


if __name__ == "__main__":
    main()
