"""Run the rows in processes of their own, measure what they wrote, print a table."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

import quark
from benchmarks.real_language_models import __doc__ as meaning
from benchmarks.real_language_models.models import WHEELS, float_folder
from benchmarks.real_language_models.rows import IMATRIX, QUARK, ROWS, Row
from benchmarks.real_language_models.texts import texts
from benchmarks.tables import console
from quark.errors import QuarkError
from quark.gguf import read_imatrix
from quark.jobs.folders.compared.verdict import ModelVerdict

ROOT = Path(__file__).parents[2]
WINDOWS, LENGTH, HELD_OUT = 32, 512, 16
GGUF = ("--export-format", "gguf", "--no-verdict")
PACKAGES = {
    "llm-compressor": ("llmcompressor",),
    "auto-round": ("auto-round", "transformers"),
    "amd-quark": ("amd-quark==0.13", "transformers", "safetensors", "accelerate", "datasets", "onnxruntime"),
    "llama.cpp": ("llama-cpp-python", "numpy"),
}
"""Peer -> what is installed, after TORCH."""
TORCH = "torch==2.13.0"


def environment(package: str, place: Path) -> Path:
    """The interpreter of a package, whose environment is made where it is missing."""
    if package == QUARK:
        return Path(sys.executable)
    folder = place / f"venv-{package}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = () if package == "llama.cpp" else (TORCH,)
        for wanted in filter(None, (torch, (*torch, *PACKAGES[package]))):
            subprocess.run([*pip, *wanted], check=True)
        (folder / "ready").touch()
    return python


class Bench:
    """A float model with its texts, and what peers read of it.

    Args:
        model: One of WHEELS.
        place: Where models, environments and results are kept.
    """

    def __init__(self, model: str, place: Path) -> None:
        self.place = place
        self.texts = texts(place)
        self.float = float_folder(model, place)
        self.out = place / "out"

    def windows(self) -> Path:
        """The windows that quark reads of the calibration text, for peers."""
        from transformers import AutoTokenizer

        file = self.float.with_suffix(".windows.json")
        if not file.exists():
            ids = AutoTokenizer.from_pretrained(self.float)(self.texts["calibration"].read_text("utf-8")).input_ids
            file.write_text(json.dumps([ids[i * LENGTH : (i + 1) * LENGTH] for i in range(WINDOWS)]))
        return file

    def imatrix(self) -> Path:
        """The importance matrix of the calibration text."""
        file = self.float.with_suffix(".imatrix.gguf")
        if not file.exists():
            words = (*self._calibration(), "--save-imatrix", file, "-o", self.out.with_suffix(".gguf"), "--force")
            self._quark("quantize", self.float, "--scheme", "q4_k_m", *GGUF, "--algorithm", "qronos", *words)
        return file

    def gguf(self) -> tuple[Path, Path]:
        """The float model, and its importance matrix as arrays, for llama.cpp."""
        file, matrix = self.float.with_suffix(".gguf"), self.float.with_suffix(".npz")
        if not file.exists():
            self._quark("quantize", self.float, "--scheme", "bfloat16", *GGUF, "-o", file)
        if not matrix.exists():
            np.savez(matrix, **{name: np.asarray(values) for name, values in read_imatrix(self.imatrix()).items()})
        return file, matrix

    def _calibration(self) -> tuple[str, ...]:
        return "--calib", str(self.texts["calibration"]), "--samples", str(WINDOWS), "--length", str(LENGTH)

    @staticmethod
    def _quark(*words: Any) -> None:
        subprocess.run([sys.executable, "-m", "quark", *map(str, words)], check=True, capture_output=True)

    def command(self, row: Row, output: Path) -> list[str]:
        """The command line of a row."""
        python = str(environment(row.package, self.place))
        if row.package == QUARK:
            data = self._calibration() if row.data else ()
            given = [str(self.imatrix()) if word == IMATRIX else word for word in row.words]
            words = (*given, *data, "--no-verdict", "-o", str(output))
            return [python, "-m", "quark", "quantize", str(self.float), *words]
        source, data_file = self.gguf() if row.package == "llama.cpp" else (self.float, self.windows())
        script = str(Path(__file__).parent / "peers.py")
        return [python, script, row.package, *row.words, str(source), str(data_file), str(output)]

    def run(self, row: Row) -> dict[str, Any]:
        """Quantize by a row and measure; the reason where that fails."""
        gguf = "gguf" in row.words or row.package == "llama.cpp"
        output = self.out.with_suffix(".gguf") if gguf else self.out
        shutil.rmtree(output, ignore_errors=True)
        if output.is_file():
            output.unlink()
        command = self.command(row, output)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ours = {"PYTHONPATH": str(ROOT / "src")} if row.package == QUARK else {}
        code, said, seconds, peak = _measured(command, {**clean, **ours, "OMP_NUM_THREADS": "1"})
        if code or not output.exists():
            return {"error": (said.strip().splitlines() or [f"exit code {code}"])[-1][:90]}
        found: dict[str, Any] = {"cpu_seconds": seconds, "peak_mb": peak}
        for name in ("prose", "code"):
            try:
                measured = quark.evaluate(self.float, output, data=self.texts[name], windows=HELD_OUT, layers=0)
            except QuarkError as error:
                return {"error": f"cannot be read: {error}"[:90]}
            verdict = ModelVerdict.of(measured.comparison)
            before, after = verdict.perplexity or (1.0, float("nan"))
            found[name] = {"kl": verdict.kl, "perplexity": after / before - 1, "same": verdict.agreement}
            found["mb"] = measured.sizes[1] / 1e6
        return found


def _measured(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str, float, float]:
    """The exit code of a process, what it said on stderr, its CPU seconds, and its peak of resident memory in MB."""
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=variables)
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return running.returncode, said.read(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


def _cells(found: dict[str, Any]) -> list[str]:
    """The columns of one row; of one that failed, its error."""
    if "error" in found:
        return [escape(found["error"])]
    texts = [found["prose"], found["code"]]
    kl = [f"{1000 * text['kl']:.1f}" for text in texts]
    rise = [f"{100 * text['perplexity']:+.1f}%" for text in texts]
    same = [f"{100 * text['same']:.1f}%" for text in texts]
    return [*kl, *rise, *same, f"{found['cpu_seconds']:.0f}", f"{found['peak_mb']:.0f}", f"{found['mb']:.1f}"]


def main() -> None:
    """Print the table; results of rows that ran before are kept in PLACE/results.json, and shown with them."""
    parser = argparse.ArgumentParser(description=meaning, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="patterns of names of rows; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--model", choices=[*WHEELS], default="smollm2")
    parser.add_argument("--place", type=Path, default=ROOT / "build" / "real-language-models", help="where models go")
    args = parser.parse_args()
    patterns = args.rows or ["*"]
    chosen = [row for row in ROWS.values() if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]
    if args.list:
        print("\n".join(row.name for row in chosen))
        return
    place: Path = args.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    bench, file = Bench(args.model, place), place / f"results-{args.model}.json"
    columns = ("KL prose", "KL code", "perplexity", "", "same", "", "CPU s", "MB", "size")
    table = Table("row", *columns, title=f"{args.model}: KL in millinats, prose and code")
    for row in chosen:
        results = json.loads(file.read_text()) if file.exists() else {}
        results[row.name] = bench.run(row)
        file.write_text(json.dumps(results, indent=1))
        table.add_row(row.name, *_cells(results[row.name]))
        print(row.name, *_cells(results[row.name]), file=sys.stderr, flush=True)
    console().print(table)


if __name__ == "__main__":
    main()
