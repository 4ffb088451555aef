"""Calibration of the two benchmark models, as a multiple of the float inference of the same 32 samples.

Both sides include making their session, of one thread, with graph optimisation on. Float inference and every method
take turns, five rounds; the figure is the median of the ratios of their CPU seconds in a round. `peak_mb` is what
calibration adds to the process.
"""

from __future__ import annotations

import json
import resource
import statistics
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


def with_one_thread() -> None:
    """Make every session from now on one of one thread: several wait for each other in loops, which count as work."""
    import onnxruntime

    class OneThread(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, model: Any, sess_options: Any = None, *rest: Any, **named: Any) -> None:
            options = sess_options or onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            super().__init__(model, options, *rest, **named)

    onnxruntime.InferenceSession = OneThread


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
    seconds: dict[str, list[float]] = {key: [] for key in actions}
    memory = {}
    for _ in range(ROUNDS):
        for key, action in actions.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.process_time()
            action()
            seconds[key].append(time.process_time() - start)
            memory.setdefault(key, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    ratios = {
        key: statistics.median(ours / base for ours, base in zip(seconds[key], seconds["float"], strict=True))
        for key in METHODS
    }
    return {"float_seconds": min(seconds["float"]), "ratios": ratios, "peak_mb": memory}


def main() -> None:
    from benchmarks.folder import model_folder
    from benchmarks.onnx_models import export

    export(model_folder())
    with_one_thread()
    result = {name: measure(name, model_folder()) for name in ("resnet50", "encoder")}
    print(json.dumps({"benchmark": "onnx_calibration", **result}))


if __name__ == "__main__":
    main()
