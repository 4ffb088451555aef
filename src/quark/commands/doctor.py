"""`quark doctor`: versions, devices, and what is missing, with the line that installs it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from quark.__version__ import __version__
from quark.base.command_line import new_table, results
from quark.base.native import compiler_of_this_machine
from quark.base.same_import_name import both_said, other_version

PACKAGES = {
    "torch": "torch", "transformers": "torch", "safetensors": "torch", "accelerate": "torch", "greenlet": "torch",
    "onnx": "onnx", "onnx_ir": "onnx", "onnxruntime": "onnx", "onnxscript": "onnx", "gguf": "gguf", "PIL": "images",
    "cryptography": "crypto", "matplotlib": "plot", "onnxslim": "slim", "yaml": "yaml",
}  # fmt: skip
"""Package as it is imported -> the extra that brings it."""
BUILT_FOR = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", re.MULTILINE)
"""In torch/version.py: the library of GPUs that torch is built with, and its version; `None` for none."""
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "onnx_ir": "onnx-ir"}


def doctor() -> None:
    """Show versions, devices, and missing packages with the commands that install them.

    Example: quark doctor
    """
    console = results()
    table = new_table("what", "found", "what to do", title="Packages")
    here = Path(__file__).parents[1]
    other = other_version(here.parent)
    table.add_row("quark", f"{__version__} in {here}", "" if other is None else both_said(other))
    table.add_row("python", sys.version.split()[0], "")
    for package, extra in PACKAGES.items():
        version = version_of(package)
        table.add_row(package, version or "missing", "" if version else f"pip install 'openquark[{extra}]'")
    console.print(table)
    devices = new_table("device", "found", "what to do", title="Machine")
    devices.add_row("processor", f"{platform.machine()}, {platform.system()}", "")
    for name, found in torch_devices().items():
        devices.add_row(name, found, "")
    compiler = compiler_of_this_machine()
    advice = "" if compiler else "GPTQ, AWQ and searches of scales take about twice as long: install g++ or clang++"
    devices.add_row("C++ compiler", compiler or "missing", advice)
    console.print(devices)


def version_of(package: str) -> str | None:
    """The version of a package, without loading it; None where it cannot be imported."""
    try:
        if find_spec(package) is None:
            return None
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return "of unknown version"
    except (ImportError, ValueError):
        return None


def torch_devices() -> dict[str, str]:
    """Device -> its name, of those on which torch can compute."""
    if version_of("torch") is None:
        return {}
    limit = os.environ.get("OMP_NUM_THREADS")
    found = {"cpu": f"{usable_cores()} cores{f', of which OMP_NUM_THREADS says {limit}' if limit else ''}"}
    if not may_have_accelerator():
        return found
    import torch  # seconds: only where there may be a device whose name it alone knows

    found |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def usable_cores() -> int:
    """Of the processor, those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_have_accelerator() -> bool:
    """Return False where torch can find no GPU: it is built for none, or the driver of NVIDIA's is not installed."""
    if sys.platform == "darwin":
        return True
    spec = find_spec("torch")
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
    try:
        written = (Path(folder or "") / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    built = {kind: said for kind, said in BUILT_FOR.findall(written) if said != "None"}
    if sys.platform != "linux" or "cuda" not in built:
        return bool(built)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return bool(built.keys() - {"cuda"})
    return True
