"""Make the environment, quantize each model by each method, measure, print a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.table import Table

from benchmarks.real_models import __doc__ as meaning
from benchmarks.real_models.methods import METHODS
from benchmarks.real_models.models import MODELS, Array, Feeds, Model
from benchmarks.tables import console

ROOT = Path(__file__).parents[2]
WHEELS = ("nudenet", "rapidocr-onnxruntime", "magika")
PEERS = ("onnxruntime", "nncf", "onnx", "sympy")
ROUNDS = 20


def environment(folder: Path) -> Path:
    """The interpreter of the environment with models and peers, which is made where it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", *WHEELS], check=True)
        subprocess.run([*pip, *PEERS], check=True)
        (folder / "ready").touch()
    return python


def quantize(python: str, method: str, source: Path, samples: Path, output: Path) -> dict[str, Any]:
    """Run one method; what it took, or the first line of its error."""
    script = str(Path(__file__).parent / "methods.py")
    ours = METHODS[method][0] == "quark"
    path = {"PYTHONPATH": str(ROOT / "src")} if ours else {}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {**clean, **path, "PATH": f"{Path(python).parent}{os.pathsep}{clean['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [python, script, method, str(source), str(samples), str(output)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables, cwd=output.parent, timeout=900
    )
    if done.returncode or not output.exists():
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
        return {"error": lines[-1][:60] if lines else f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def session(path: Path) -> onnxruntime.InferenceSession:
    """One thread, no log."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def measure(model: Model, source: Path, output: Path, feeds: Feeds) -> dict[str, float]:
    """SQNR, the metric of the task, and ratios of size and time."""
    before, after = session(source), session(output)
    pairs: list[tuple[Array, Array]] = [(before.run(None, f)[0], after.run(None, f)[0]) for f in feeds]
    signal = sum(float((x.astype(np.float64) ** 2).sum()) for x, _ in pairs)
    noise = sum(float(((x.astype(np.float64) - y) ** 2).sum()) for x, y in pairs)
    counts = np.sum([model.metric[1](x, y) for x, y in pairs], 0)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for kept, each in zip(times, (before, after), strict=True):
            start = time.process_time()
            each.run(None, feeds[0])
            kept.append(time.process_time() - start)
    return {
        "sqnr": float(10 * np.log10(signal / noise)) if noise else float("inf"),
        "metric": float(counts[0] / counts[1]) if counts[1] else float("nan"),
        "size": output.stat().st_size / source.stat().st_size,
        "time": min(times[1]) / min(times[0]),
        "milliseconds": 1e3 * min(times[1]),
    }


def cells(model: Model, found: dict[str, Any]) -> list[str]:
    """The columns of one row; of a method that failed, its error."""
    if "error" in found:
        return [found["error"], *[""] * 6]
    metric = f"{found['metric']:.2f} {model.metric[0]}" if np.isfinite(found["metric"]) and model.metric[0] else "-"
    shown = [f"{found['sqnr']:.1f}", metric, f"{found['size']:.2f}", f"{found['time']:.2f}"]
    return [*shown, f"{found['milliseconds']:.2f}", f"{found['cpu_seconds']:.1f}", f"{found['peak_mb']:.0f}"]


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The rows of a model, and the noise of the default in that of the best peer that writes a file which loads."""
    sqnrs = {method: rows["sqnr"] for method, rows in found.items() if "error" not in rows}
    peers = [value for method, value in sqnrs.items() if METHODS[method][0] != "quark"]
    noise = 10 ** ((max(peers) - sqnrs["quark"]) / 20) if peers and "quark" in sqnrs else None
    return {**found, "noise_to_best_peer": noise}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=meaning)
    parser.add_argument("models", nargs="*", help="some of: " + ", ".join(MODELS))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-real-models", help="where models and peers go")
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv-peer", help="the environment of amd-quark")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and the tables on stderr")
    args = parser.parse_args()
    summaries = {}
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; possible: {', '.join(MODELS)}")
    wheels = environment(args.venv.resolve())
    site = next(wheels.parents[1].glob("lib/python*/site-packages"))
    pythons = {"quark": sys.executable, "wheels": str(wheels), "peer": str(args.peer.resolve() / "bin" / "python")}
    columns = ("SQNR dB", "metric", "size", "time", "ms", "CPU s", "MB")
    title = "Real ONNX models in ONNX Runtime; size and time / float"
    for name in args.models or MODELS:
        table = Table("model", "method", *columns, title=title)
        rows: dict[str, dict[str, Any]] = {}
        model = MODELS[name]
        calibration, held_out = model.feeds(site)
        with tempfile.TemporaryDirectory() as folder:
            samples = Path(folder) / "samples.npz"
            np.savez(samples, **{model.input: np.stack([feed[model.input] for feed in calibration])})
            for method, (kind, _) in METHODS.items():
                output = Path(folder) / f"{method.replace(' ', '-')}.onnx"
                if not Path(pythons[kind]).exists():
                    found: dict[str, Any] = {"error": "not installed: see cases/setup_peer.sh"}
                else:
                    found = quantize(pythons[kind], method, site / model.path, samples, output)
                if "error" not in found:
                    try:
                        found |= measure(model, site / model.path, output, held_out)
                    except Exception as error:  # noqa: BLE001 - a file that the runtime refuses is a result
                        found = {"error": str(error).split("failed:")[-1][:60]}
                rows[method] = found
                table.add_row(name, method, *cells(model, found))
        # A model's rows as soon as they are there: all of them take a quarter of an hour.
        console(stderr=args.json).print(table)
        summaries[name] = summary(rows)
    if args.json:
        print(json.dumps(summaries))


if __name__ == "__main__":
    main()
