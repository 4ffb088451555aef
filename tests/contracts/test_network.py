"""No network: nothing is looked up, connected to or kept to be sent, by us or by the libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.torch_zoo import LANGUAGE_MODEL, ROOT, TEXT

MODEL = ROOT / "examples" / "models" / "digits_cnn" / "model.onnx"
CALIBRATION = TEXT / "calibration.txt"
STRACE = shutil.which("strace")

COMMANDS = {
    "onnx": ("quantize", MODEL, "--config", "UINT8_DYNAMIC_QUANT"),
    "folder": ("quantize", LANGUAGE_MODEL, "--scheme", "int4_wo_32", "--calib", CALIBRATION, "--samples", 2),
    "gguf": ("quantize", LANGUAGE_MODEL, "--scheme", "q4_0", "--export-format", "gguf"),
    "doctor": ("doctor",),
}
WAITS = "import atexit, time; atexit.register(time.sleep, {seconds}); from quark.cli import program; program()"


def run(code: str, home: Path, *arguments: object, tracer: tuple[str, ...] = (), **more: str) -> None:
    """Python in a home folder of its own, where no variable says anything of telemetry."""
    told = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in told}
    home.mkdir(exist_ok=True)
    environment = {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT / "src"), **more}
    command = [*tracer, sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 0, done.stderr


def files_of(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize("module", ["quark", "quark.onnx", "quark.torch"])
def test_onnxruntime_keeps_nothing_behind_an_import_of_quark(module: str, tmp_path: Path) -> None:
    run(f"import {module}, onnxruntime", tmp_path / "home")
    assert not files_of(tmp_path / "home")


def test_what_a_user_says_of_telemetry_stays(tmp_path: Path) -> None:
    code = "import quark, os; assert os.environ['ORT_DISABLE_TELEMETRY'] == '0'"
    run(code, tmp_path / "home", ORT_DISABLE_TELEMETRY="0")


def test_crypto_mode_is_refused_where_onnxruntime_was_imported_with_its_telemetry_on(tmp_path: Path) -> None:
    code = """
{first}
import onnx
from quark.errors import ConfigError
from quark.onnx import QConfig
from quark.onnx.crypto_mode import check_crypto
from quark.onnx.quantizer import ModelQuantizer
import dataclasses

quantizer = ModelQuantizer(QConfig.get_default_config("XINT8"))
settings = dataclasses.replace(quantizer.settings, crypto=True)
try:
    check_crypto(onnx.ModelProto(), None, settings)
except ConfigError as error:
    assert "import quark before onnxruntime" in str(error), error
    refused = True
else:
    refused = False
assert refused == {refused}
"""
    for first, refused in (("import onnxruntime", True), ("import quark, onnxruntime", False)):
        run(code.format(first=first, refused=refused), tmp_path / "home")


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="strace")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_reaches_for_the_network(name: str, tmp_path: Path) -> None:
    """For as long as ONNX Runtime takes to look for its server."""
    trace, home = tmp_path / "trace", tmp_path / "home"
    words = COMMANDS[name]
    output = {"onnx": "out.onnx", "gguf": "out.gguf", "folder": "out"}.get(name)
    arguments = (*words, "-o", tmp_path / output) if output else words
    tracer = (str(STRACE), "-f", "-e", "trace=%network", "-o", str(trace))
    run(WAITS.format(seconds=16 if name == "onnx" else 0), home, *arguments, tracer=tracer)
    lines = [line for line in trace.read_text().splitlines() if "AF_INET" in line]
    assert not lines, lines[:3]
    assert not [path for path in files_of(home) if "Microsoft" in path]
