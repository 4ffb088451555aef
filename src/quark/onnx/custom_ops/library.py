"""get_library_path: the extended operators as a compiled library, built once for each version of its source.

The library is one C++ file without dependencies. It is compiled at first use, with the compiler of this machine, into
the user's cache folder, under a name that holds the hash of source and command: another version is another file, and
two processes that build at once rename equal files into one place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quark.errors import ConfigError, MissingDependencyError, NotSupportedError, OutputError, QuarkError
from quark.files import atomic_file
from quark.log import logger

SOURCE = Path(__file__).with_name("kernels.cpp")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
# Every operation is rounded on its own: a contracted a * b + c would change bits.
GNU_FLAGS = ("-std=c++17", "-O3", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math")
MSVC_FLAGS = ("/nologo", "/std:c++17", "/O2", "/EHsc", "/LD", "/fp:precise")
WITHOUT = (
    "The models need no library: each carries its operators as ONNX functions, which every ONNX Runtime with IR "
    "version 10 (1.18 and later) runs on any device."
)


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """The library of extended operators, for `SessionOptions.register_custom_ops_library`; built at first use.

    Args:
        device: "CPU", in any case.
        lib: "custom_ops", the only one.

    Returns:
        Its path.

    Raises:
        NotSupportedError: A GPU's library is asked for.
        MissingDependencyError: This machine has no C++ compiler.
        QuarkError: The compiler fails; shows its last lines.
    """
    kind = str(device).upper()
    if kind in ("CUDA", "ROCM", "GPU"):
        raise NotSupportedError(
            f"get_library_path({device!r}): there are no {kind} kernels. Possible: get_library_path('CPU'), whose "
            f"operators also run in a session with a GPU provider, on the CPU; or no library at all. {WITHOUT}"
        )
    if kind != "CPU" or lib != "custom_ops":
        raise ConfigError(f"get_library_path({device!r}, {lib!r}): possible: device 'CPU', lib 'custom_ops'.")
    command = _command()
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join([*command, platform.machine()]).encode())
    path = cache_folder() / f"custom_ops_{key.hexdigest()[:16]}{SUFFIX}"
    if not path.exists():
        _build(command, path)
    return str(path)


def cache_folder() -> Path:
    """Where compiled files are kept: `QUARK_CACHE`, else the user's cache folder of this system."""
    named = os.environ.get("QUARK_CACHE")
    if named:
        return Path(named)
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / default) / "quark"


def _command() -> list[str]:
    """The compiler and its flags: `CXX`, else the first that is found."""
    chosen = shlex.split(os.environ.get("CXX", ""), posix=sys.platform != "win32")
    names = [chosen[0]] if chosen else [*(["cl"] if sys.platform == "win32" else []), "c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        hint = (
            " On Windows: start from a Developer Command Prompt, or install MinGW." if sys.platform == "win32" else ""
        )
        raise MissingDependencyError(
            "The library of extended operators is compiled on this machine, which has no C++ compiler: "
            f"none of {', '.join(names)} is there; the environment variable CXX can name one.{hint} {WITHOUT}"
        )
    if Path(found).stem.lower() in ("cl", "clang-cl"):
        return [found, *chosen[1:], *MSVC_FLAGS]
    flags = ("-static",) if sys.platform == "win32" else ("-fPIC",)
    return [found, *chosen[1:], *GNU_FLAGS, *flags]


def _build(command: list[str], path: Path) -> None:
    logger.info("Compiling the extended operators, once: %s", path)
    msvc = MSVC_FLAGS[0] in command
    try:
        with atomic_file(path) as temporary, tempfile.TemporaryDirectory() as scratch:
            out = [f"/Fe:{temporary}"] if msvc else ["-o", str(temporary)]
            # Intermediate files fall into the working folder.
            done = subprocess.run(
                [*command, str(SOURCE), *out],
                cwd=scratch,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
                raise QuarkError(f"The C++ compiler failed: {shlex.join(command)}\n{lines}\n{WITHOUT}")
    except OutputError:
        # Another process may have put the file there, and hold it open.
        if not path.exists():
            raise
