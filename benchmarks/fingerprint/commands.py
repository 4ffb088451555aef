"""What the command line prints, and the files that it writes from ONNX models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.fingerprint.outputs import MODELS, add
from benchmarks.fingerprint.program import quark
from benchmarks.fingerprint.torch_files import CALIBRATION
from benchmarks.fingerprint.torch_models import FOLDER

DIGITS = "models/digits_cnn/model.onnx"
LATENCY = re.compile(r"(?m)^(│ (?:float|quantized) │ .*) │ [^│]+ │$")
"""A row of the table whose last column is measured."""

SECONDS = re.compile(r"(?m)│ \d+\.\d │ ([^│]*│)$")
"""The last but one column of the table of trials."""
COMMANDS = ("quantize", "evaluate", "inspect", "plan", "schemes")


def images(count: int = 16) -> str:
    """A file of samples for the classifier."""
    data = np.load(MODELS / "digits_cnn" / "data.npz")
    np.savez("samples.npz", image=(data["calibration_images"][:count] / 16).astype(np.float32))
    return "samples.npz"


def quantized(config: str, *options: str) -> str:
    """The classifier, quantized by the command line."""
    return quark(
        "quantize",
        DIGITS,
        "--config",
        config,
        "--calib",
        images(),
        "--batch-size",
        "4",
        "-o",
        "out/model.onnx",
        *options,
    )


def recovered() -> str:
    """The table of what was tried, without the seconds, and the model."""
    return SECONDS.sub(r"│ \1", quantized("A8W8", "--recover", "--budget", "1h", "--target", "33.7"))


def of_images(*options: str) -> str:
    """The same from pictures in a folder."""
    Path("pictures").mkdir()
    for index, image in enumerate(np.load(MODELS / "digits_cnn" / "data.npz")["calibration_images"][:8]):
        Image.fromarray(image[0] * 15).save(f"pictures/{index}.png")
    return quark("quantize", DIGITS, "--config", "A8W8", "--calib", "pictures", "-o", "out/model.onnx", *options)


def inspected(*arguments: str) -> str:
    """What is in a file that was just quantized; the file itself is hashed elsewhere."""
    return quark("quantize", *arguments) + quark("inspect", arguments[-1])


def inspected_onnx(config: str, *options: str) -> str:
    return quantized(config, *options) + quark("inspect", "out/model.onnx")


def evaluated_onnx(config: str) -> str:
    shown = quantized(config)
    return shown + LATENCY.sub(r"\1", quark("evaluate", DIGITS, "out/model.onnx", "--data", "samples.npz"))


def evaluated(scheme: str) -> str:
    shown = quark("quantize", FOLDER, "--scheme", scheme, "-o", "out/model")
    text = ("--text", CALIBRATION, "--windows", "1")
    return shown + LATENCY.sub(r"\1", quark("evaluate", FOLDER, "out/model", *text))


for _command in COMMANDS:
    add(f"command/help/{_command}", quark, _command, "--help")
add("command/help", quark, "--help")
add("command/wrong/command", quark, "quantise")
add("command/wrong/option", quark, "quantize", FOLDER, "--schem", "int8", "-o", "out/model")
add("command/wrong/scheme", quark, "quantize", FOLDER, "--scheme", "int9", "-o", "out/model")
add("command/wrong/folder", quark, "inspect", "models/absent")
add("command/schemes", quark, "schemes")
for _scheme in ("int8_wo", "uint4_wo_64", "fp8", "mxfp4", "nvfp4", "int4_fp8", "mx6", "bfloat16"):
    add(f"command/plan/{_scheme}", quark, "plan", FOLDER, "--scheme", _scheme)
add(
    "command/plan/mixed",
    quark,
    "plan",
    FOLDER,
    "--scheme",
    "mxfp4",
    "--layer",
    "*.down_proj=int8",
    "--exclude",
    "*.0.*",
)
for _scheme in ("uint4_wo_64", "nvfp4", "mxfp4", "int8"):
    _data = ("--calib", CALIBRATION, "--samples", "1") if _scheme in ("nvfp4", "int8") else ()
    add(f"command/inspect/{_scheme}", inspected, FOLDER, "--scheme", _scheme, *_data, "-o", "out/model")
add("command/inspect/gguf", inspected, FOLDER, "--scheme", "int4_wo_32", "--export-format", "gguf", "-o", "out/a.gguf")
add("command/inspect/float", quark, "inspect", FOLDER)
for _config in ("A8W8", "XINT8", "BF16", "UINT8_DYNAMIC_QUANT"):
    add(f"command/inspect/onnx/{_config}", inspected_onnx, _config)
add("command/inspect/onnx/ort_x64", inspected_onnx, "U8S8_AAWS", "--target", "ort_x64", "--exclude", "/head/Gemm")
for _config in ("A8W8", "U8S8_AAWS"):
    add(f"command/evaluate/onnx/{_config}", evaluated_onnx, _config)
add("command/recover", recovered)
add("command/images", of_images)
add("command/images/scaled", of_images, "--mean", "0.5", "--std", "0.25")
add("command/evaluate/mxfp4", evaluated, "mxfp4")
