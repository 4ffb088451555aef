"""A float model, what is quantized of it in processes of their own, and how that is measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import quark
from benchmarks.real_language_models.models import float_folder
from benchmarks.real_language_models.rows import IMATRIX, QUARK, ROWS, Row
from benchmarks.real_language_models.texts import texts
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
    "torchao": ("torchao", "transformers", "safetensors"),
    "sentence-transformers": ("sentence-transformers[onnx]",),
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

    rows: Mapping[str, Row] = ROWS
    columns = ("KL prose", "KL code", "perplexity", "", "same", "", "CPU s", "MB", "size")
    title = "KL in millinats, prose and code"

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
            return [python, "-m", "quark", "quantize", *self.words(row), "-o", str(output)]
        source, data_file = self.gguf() if row.package == "llama.cpp" else (self.float, self.windows())
        script = str(Path(__file__).parent / "peers.py")
        return [python, script, row.package, *row.words, str(source), str(data_file), str(output)]

    def words(self, row: Row) -> list[str]:
        """The model of a row of quark's, and the options."""
        data = self._calibration() if row.data else ()
        given = [str(self.imatrix()) if word == IMATRIX else word for word in row.words]
        return [str(self.float), *given, *data, "--no-verdict"]

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
        code, said, seconds, peak = _timed(command, {**clean, **ours, "OMP_NUM_THREADS": "1"})
        if code or not output.exists():
            return {"error": (said.strip().splitlines() or [f"exit code {code}"])[-1][:90]}
        try:
            return {"cpu_seconds": seconds, "peak_mb": peak, **self.measured(output)}
        except QuarkError as error:
            return {"error": f"cannot be read: {error}"[:90]}

    def measured(self, output: Path) -> dict[str, Any]:
        """How far a model that was written is from the float model, on held-out texts. Raises QuarkError."""
        found: dict[str, Any] = {}
        for name in ("prose", "code"):
            measured = quark.evaluate(self.float, output, data=self.texts[name], windows=HELD_OUT, layers=0)
            verdict = ModelVerdict.of(measured.comparison)
            before, after = verdict.perplexity or (1.0, float("nan"))
            found[name] = {"kl": verdict.kl, "perplexity": after / before - 1, "same": verdict.agreement}
            found["mb"] = measured.sizes[1] / 1e6
        return found

    def cells(self, found: dict[str, Any]) -> list[str]:
        """The columns of one row."""
        texts = [found["prose"], found["code"]]
        kl = [f"{1000 * text['kl']:.1f}" for text in texts]
        rise = [f"{100 * text['perplexity']:+.1f}%" for text in texts]
        same = [f"{100 * text['same']:.1f}%" for text in texts]
        return [*kl, *rise, *same, f"{found['cpu_seconds']:.0f}", f"{found['peak_mb']:.0f}", f"{found['mb']:.1f}"]


def _timed(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str, float, float]:
    """The exit code of a process, what it said on stderr, its CPU seconds, and its peak of resident memory in MB."""
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=variables)
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return running.returncode, said.read(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3
