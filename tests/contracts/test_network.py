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


def test_crypto_mode_leaves_nothing_of_a_model_where_onnxruntime_was_imported_first(tmp_path: Path) -> None:
    """Refused where the user's variable asks for telemetry; the marker is the name of a node that an error names."""
    code = """
import onnxruntime
import onnx, time
from onnx import helper
from quark.errors import ConfigError
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.crypto_mode import check_crypto
import dataclasses

settings = dataclasses.replace(ModelQuantizer(QConfig.get_default_config("XINT8")).settings, crypto=True)
try:
    check_crypto(onnx.ModelProto(), None, settings)
except ConfigError as error:
    assert "ORT_DISABLE_TELEMETRY=1" in str(error) and {refused}, error
    raise SystemExit
assert not {refused}
x, y = (helper.make_tensor_value_info(name, 1, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("NoSuchOperator", ["x"], ["y"], name="{marker}")], "g", [x], [y])
try:
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    onnxruntime.InferenceSession(model.SerializeToString())
except Exception as error:
    assert "NoSuchOperator" in str(error), error
time.sleep(3)
"""
    home = tmp_path / "home"
    run(code.format(refused=False, marker="secret-node"), home)
    assert not [
        file for file in files_of(home) for word in (b"secret-node", b"NoSuch") if word in Path(file).read_bytes()
    ]
    run(code.format(refused=True, marker="secret-node"), home, ORT_DISABLE_TELEMETRY="0")


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
