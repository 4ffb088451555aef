"""What the ONNX accuracy algorithms give back and cost: output SQNR on held-out samples, seconds, peak memory.

Every row is a process of its own: a model, a scheme, an algorithm; the row "none" is the scheme alone. `sqnr` is in dB
against the float model, on samples that calibration did not see; `gain` is its difference from "none"; `peak_mb` is
what the call adds to the process. Models: the embedded CNN, the same with badly scaled channels (`_hard`), a residual
net of 18 layers with random weights, all-MiniLM-L6-v2, and the same with outliers in the activations (`_outliers`);
both rescalings leave the float function what it is. Names of models, schemes and algorithms (`+cle`) may be given.
Only documented names are used, so the peer's interpreter measures itself; what a side does not have is an `error`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
LIMIT = 3600
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "digits": {
        "a8w8": ("cle", "bias_correction", "adaround", "adaquant", "adaquant_1e-6"),
        "a8w4": ("cle", "bias_correction", "adaround", "adaquant"),
        "bf16": ("adaquant_1e-6", "adaquant"),
    },
    "digits_hard": {"a8w8": ("cle", "cle_4_steps", "bias_correction", "cle+adaround", "cle+adaquant")},
    "resnet18": {
        "a8w8": ("cle", "bias_correction", "adaround_100", "adaround_100_batch_2", "adaquant_100"),
        "a8w4": ("adaround_100",),
        "bf16": ("adaquant_100_1e-6",),
    },
    "minilm": {
        "w8": ("gptq_8",),
        "w4_channel": ("gptq_4",),
        "w4_group_32": ("gptq_4_group_32",),
        "a8w8": ("smooth_quant", "bias_correction"),
    },
    "minilm_outliers": {"a8w8": ("smooth_quant", "quarot")},
}


def layer(scheme: str) -> Any:
    """The layer config of a scheme."""
    from quark import onnx as q

    def of(kind: Any, granularity: str = "Tensor") -> Any:
        return kind(calibration_method=q.CalibMethod.MinMax, quant_granularity=q.QuantGranularity[granularity])

    if scheme == "bf16":
        return q.QLayerConfig(input_tensors=of(q.BFloat16Spec), weight=of(q.BFloat16Spec))
    if scheme in ("a8w8", "w8"):
        return q.QLayerConfig(input_tensors=of(q.Int8Spec), weight=of(q.Int8Spec))
    from quark.onnx import Int4Spec

    granularity = {"w4_channel": "Channel", "w4_group_32": "Group"}.get(scheme, "Tensor")
    return q.QLayerConfig(input_tensors=of(q.Int8Spec), weight=of(Int4Spec, granularity))


def options_of(model: str, scheme: str) -> dict[str, Any]:
    """The extra options of a row. Only MiniLM's MatMuls are quantized: no scale serves its mask of -3e38."""
    options: dict[str, Any] = {"OpTypesToQuantize": ["MatMul"]} if model.startswith("minilm") else {}
    return options | ({"WeightsOnly": True, "BlockSize": 32} if scheme.startswith("w") else {})


def algorithms(name: str) -> list[Any]:
    """The configs of a name like "cle+adaround"; parameters as the guides print them."""
    from quark import onnx as q

    makers = {
        "cle": lambda: q.CLEConfig(),
        "cle_4_steps": lambda: q.CLEConfig(cle_steps=4, cle_scale_use_threshold=False),
        "bias_correction": lambda: q.BiasCorrectionConfig(),
        "smooth_quant": lambda: q.SmoothQuantConfig(alpha=0.5),
        "quarot": lambda: q.QuarotConfig(r_matrix_dim=384),
        "gptq_8": lambda: q.GPTQConfig(bits=8),
        "gptq_4": lambda: q.GPTQConfig(bits=4, per_channel=True),
        "gptq_4_group_32": lambda: q.GPTQConfig(bits=4, group_size=32),
        "adaround": lambda: q.AdaRoundConfig(num_iterations=1000, learning_rate=0.1),
        "adaround_100": lambda: q.AdaRoundConfig(num_iterations=100, learning_rate=0.1),
        "adaround_100_batch_2": lambda: q.AdaRoundConfig(num_iterations=100, learning_rate=0.1, batch_size=2),
        "adaquant": lambda: q.AdaQuantConfig(num_iterations=1000, learning_rate=1e-5),
        "adaquant_1e-6": lambda: q.AdaQuantConfig(num_iterations=1000, learning_rate=1e-6),
        "adaquant_100": lambda: q.AdaQuantConfig(num_iterations=100, learning_rate=1e-5),
        "adaquant_100_1e-6": lambda: q.AdaQuantConfig(num_iterations=100, learning_rate=1e-6),
    }
    return [] if name == "none" else [makers[part]() for part in name.split("+")]


class Reader:
    """Yields feeds."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds = feeds
        self.rewind()

    def rewind(self) -> None:
        self.rest = iter(self.feeds)

    def get_next(self) -> Any:
        return next(self.rest, None)


def data(model: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Feeds to calibrate with, and held-out ones."""
    from benchmarks.algorithm_models import DIGITS
    from benchmarks.onnx_models import samples

    if model == "resnet18":
        feeds = samples(model, 24, seed=2)
        return feeds[:16], feeds[16:]
    if model.startswith("digits"):
        arrays = np.load(DIGITS / "data.npz")
        seen, unseen = ((arrays[f"{k}_images"] / 16).astype(np.float32) for k in ("calibration", "heldout"))
        return [{"image": image[None]} for image in seen], [{"image": unseen}]
    tokens = np.load(folder / "minilm.npz")
    feeds = [dict(zip(tokens.files, rows, strict=True)) for rows in zip(*tokens.values(), strict=True)]
    return feeds[:8], feeds[8:]


def outputs(path: Path, feeds: list[dict[str, Any]]) -> Any:
    """The first output for all feeds; of MiniLM, that of words and not of padding."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    proto = onnx.load(path)
    if any(node.domain == "com.amd.quark" for node in proto.graph.node) and not proto.functions:
        from quark.onnx import get_library_path

        options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = []
    for feed in feeds:
        output = session.run(None, feed)[0]
        found.append(output[feed["attention_mask"] > 0] if "attention_mask" in feed else output)
    return np.concatenate(found)


def run(model: str, scheme: str, algorithm: str, folder: Path) -> dict[str, float]:
    """One row, in this process."""
    from quark.onnx import ModelQuantizer, QConfig

    source = folder / f"{model}.onnx"
    feeds, held_out = data(model, folder)
    expected = outputs(source, held_out)
    extra = options_of(model, scheme)
    quantizer = ModelQuantizer(QConfig(layer(scheme), algo_config=algorithms(algorithm), extra_options=extra))
    with tempfile.TemporaryDirectory() as temporary:
        path, before = Path(temporary) / "quantized.onnx", memory("VmRSS")
        wall, cpu = time.perf_counter(), time.process_time()
        quantizer.quantize_model(str(source), str(path), Reader(feeds))
        figures = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        figures |= {"peak_mb": memory("VmHWM") - before}
        return figures | {"sqnr": sqnr(expected, outputs(path, held_out))}


def sqnr(expected: Any, found: Any) -> float:
    """Signal over error, in dB."""
    error = np.square(expected.astype(np.float64) - found).sum()
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / error))


def memory(kind: str) -> float:
    """Resident memory of this process in MB, now (VmRSS) or at its peak (VmHWM; ru_maxrss counts the parent's too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1e3


def row(model: str, scheme: str, algorithm: str) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [sys.executable, __file__, "--row", model, scheme, algorithm]
    try:
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {LIMIT} s"}
    if child.returncode:
        return {"error": child.stderr.strip().splitlines()[-1][:300]}
    return dict(json.loads(child.stdout.splitlines()[-1]))


def main() -> None:
    from benchmarks.folder import model_folder

    folder = model_folder()
    if sys.argv[1:2] == ["--row"]:
        model, scheme, algorithm = sys.argv[2:]
        print(json.dumps(run(model, scheme, algorithm, folder)))
        return
    from benchmarks.algorithm_models import prepare
    from benchmarks.onnx_models import export

    export(folder)
    prepare(folder)
    chosen = {a for a in sys.argv[1:] if not a.startswith("+")}
    only = {a[1:] for a in sys.argv[1:] if a.startswith("+")}
    result: dict[str, Any] = {}
    for model, schemes in CASES.items():
        for scheme, names in schemes.items():
            if not (folder / f"{model}.onnx").exists() or (chosen and model not in chosen and scheme not in chosen):
                continue
            rows = result.setdefault(model, {}).setdefault(scheme, {})
            for name in ("none", *(n for n in names if not only or n in only)):
                rows[name] = figures = row(model, scheme, name)
                if "sqnr" in figures and "sqnr" in rows["none"]:
                    figures["gain"] = figures["sqnr"] - rows["none"]["sqnr"]
                print(model, scheme, name, figures, file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "onnx_algorithms", **result}))


if __name__ == "__main__":
    main()
