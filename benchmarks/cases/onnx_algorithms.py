"""What the ONNX accuracy algorithms give back and cost: output SQNR on held-out samples, seconds, peak memory.

Every row is a process of its own: a model, a scheme, an algorithm; the row "none" is the scheme alone. `sqnr` is in dB
against the float model, on samples that calibration did not see; `gain` is its difference from "none"; `peak_mb` is
what the call adds to the process. Models: the example CNN, the same with badly scaled channels (`_hard`), residual
nets of 18 and 50 layers with random weights, all-MiniLM-L6-v2, and the same with outliers in what its MatMuls read
(`_outliers`); both rescalings leave the float function what it is. Names of models, schemes and algorithms (`+cle`)
may be given; OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive keeps torch's threads from spinning on a busy machine.
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
        "a8w8": ("cle", "bias_correction", "adaround_10", "adaround_100", "adaround_100_batch_2", "adaquant_100"),
        "a8w4": ("adaround_100",),
        "bf16": ("adaquant_100_1e-6",),
    },
    "resnet50": {"a8w8": ("cle", "bias_correction")},
    "minilm": {
        "w8": ("gptq_8",),
        "w4_channel": ("gptq_4",),
        "w4_group_32": ("gptq_4_group_32",),
        "u8w8_channel": ("smooth_quant", "bias_correction"),
    },
    "minilm_outliers": {"u8w8_channel": ("smooth_quant",)},
}


# As the guides print them; fewer iterations where the peer would take half an hour.
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "cle": ("CLE", {}),
    "cle_4_steps": ("CLE", {"cle_steps": 4, "cle_scale_use_threshold": False}),
    "bias_correction": ("BiasCorrection", {}),
    "smooth_quant": ("SmoothQuant", {"alpha": 0.5}),
    "gptq_8": ("GPTQ", {"bits": 8}),
    "gptq_4": ("GPTQ", {"bits": 4, "per_channel": True}),
    "gptq_4_group_32": ("GPTQ", {"bits": 4, "group_size": 32}),
    "adaround": ("AdaRound", {"num_iterations": 1000, "learning_rate": 0.1}),
    "adaround_10": ("AdaRound", {"num_iterations": 10, "learning_rate": 0.1}),
    "adaround_100": ("AdaRound", {"num_iterations": 100, "learning_rate": 0.1}),
    "adaround_100_batch_2": ("AdaRound", {"num_iterations": 100, "learning_rate": 0.1, "batch_size": 2}),
    "adaquant": ("AdaQuant", {"num_iterations": 1000, "learning_rate": 1e-5}),
    "adaquant_1e-6": ("AdaQuant", {"num_iterations": 1000, "learning_rate": 1e-6}),
    "adaquant_100": ("AdaQuant", {"num_iterations": 100, "learning_rate": 1e-5}),
    "adaquant_100_1e-6": ("AdaQuant", {"num_iterations": 100, "learning_rate": 1e-6}),
}


def layer(scheme: str) -> Any:
    """The layer config of a scheme."""
    from quark import onnx as q

    def of(kind: Any, granularity: str = "Tensor") -> Any:
        return kind(calibration_method=q.CalibMethod.MinMax, quant_granularity=q.QuantGranularity[granularity])

    if scheme == "bf16":
        return q.QLayerConfig(input_tensors=of(q.BFloat16Spec), weight=of(q.BFloat16Spec))
    activation = of(q.UInt8Spec if scheme.startswith("u8") else q.Int8Spec)
    granularity = "Group" if "group" in scheme else "Channel" if "channel" in scheme else "Tensor"
    if "w8" in scheme:
        return q.QLayerConfig(input_tensors=activation, weight=of(q.Int8Spec, granularity))
    from quark.onnx import Int4Spec

    return q.QLayerConfig(input_tensors=activation, weight=of(Int4Spec, granularity))


def options_of(model: str, scheme: str) -> dict[str, Any]:
    """The extra options of a row.

    Of MiniLM only what MatMul reads is quantized, since no scale serves its mask of -3e38; and nothing may turn MatMul
    into Gemm, where the peer's SmoothQuant and GPTQ find nothing.
    """
    options: dict[str, Any] = {}
    if model.startswith("minilm"):
        options = {"OpTypesToQuantize": ["MatMul"], "OpTypesToExcludeOutputQuantization": ["MatMul"]}
        options |= {"SimplifyModel": False, "OptimizeModel": False}
    return options | ({"WeightsOnly": True, "BlockSize": 32} if scheme.startswith("w") else {})


def algorithms(name: str) -> list[Any]:
    """The configs of a name like "cle+adaround"."""
    from quark import onnx as q

    chosen = [] if name == "none" else [ALGORITHMS[part] for part in name.split("+")]
    return [getattr(q, f"{kind}Config")(**parameters) for kind, parameters in chosen]


class Reader:
    """Yields feeds."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def data(model: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Feeds to calibrate with, and held-out ones."""
    from benchmarks.algorithm_models import DIGITS
    from benchmarks.onnx_models import samples

    if model.startswith("resnet"):
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
        if (chosen & set(CASES) and model not in chosen) or not (folder / f"{model}.onnx").exists():
            continue
        for scheme, names in schemes.items():
            if chosen - set(CASES) and scheme not in chosen:
                continue
            rows = {name: row(model, scheme, name) for name in ("none", *(n for n in names if not only or n in only))}
            result.setdefault(model, {})[scheme] = compared(rows)
            print(model, scheme, json.dumps(rows, indent=1), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "onnx_algorithms", **result}))


def compared(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add what an algorithm gained over the row "none", in dB and as the share of the error's power that is left."""
    for figures in rows.values():
        if "sqnr" in figures and "sqnr" in rows["none"]:
            figures["gain"] = figures["sqnr"] - rows["none"]["sqnr"]
            figures["left"] = 10 ** (-figures["gain"] / 10)
    return rows


if __name__ == "__main__":
    main()
