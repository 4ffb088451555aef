"""Native code: the few C++ files of the package, compiled at first use on this machine, never on import.

Each is one file, which may include headers that lie beside it or beside this one (native.h). Its library lies in the
user's cache folder under a name that holds the hash of the source, its headers and the command: another version is
another file, and two processes that build at once rename equal files into one place. Where there is no compiler, each
has a substitute that gives the same results.

A library is code: none is loaded that another user may have put there. Its calls let other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from quark.base.files import atomic_file
from quark.base.log import logger
from quark.errors import MissingDependencyError, OutputError, QuarkError

SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
# Every operation is rounded on its own: a contracted a * b + c would change bits.
_GNU_FLAGS = ("-std=c++17", "-O3", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math")
_MSVC_FLAGS = ("/nologo", "/std:c++17", "/O2", "/EHsc", "/LD", "/fp:precise")
SHARED = Path(__file__).parent
"""Where headers lie that sources of several folders include."""
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def library(source: Path, purpose: str, without: str) -> Path:
    """The compiled library of a C++ file; built if the cache lacks it.

    Args:
        source: The file.
        purpose: What it is, for messages: "the library of extended operators".
        without: What works where it cannot be built, for errors.

    Raises:
        MissingDependencyError: This machine has no C++ compiler.
        QuarkError: The compiler fails; shows its last lines. Or another user owns or may write the cache folder.
        OutputError: The cache folder cannot be written.
    """
    command = _command(purpose, without)
    key = hashlib.sha256(_texts(source) + "\0".join([*command, platform.machine()]).encode())
    path = _private(cache_folder(), without) / f"{source.stem}_{key.hexdigest()[:16]}{SUFFIX}"
    if not path.exists() or not _is_safe(path):
        logger.info("Compiling %s, once: %s", purpose, path)
        _build(command, source, path, without)
    return path


def loaded(source: Path, purpose: str, without: str) -> ctypes.CDLL | None:
    """The compiled library of a C++ file whose work can be done without it; None where it cannot be built.

    The log says so once in a process, for the first of them. Arguments are those of `library`.
    """
    try:
        return ctypes.CDLL(str(library(source, purpose, without)))
    except (QuarkError, OSError) as error:
        _say_once()
        logger.debug("%s", error)
        return None


@cache
def _say_once() -> None:
    logger.info("The compiled parts of quark cannot be built here, so some steps take longer; --verbose says why.")


def _texts(source: Path) -> bytes:
    """The text of a source file, and of each header that it includes by `"name"`, in the order of their first use."""
    files = [source]
    for file in files:  # grows on the way
        for name in _INCLUDE.findall(file.read_bytes()):
            # As the compiler looks for it: beside the file that includes it, then where `_build` says.
            places = (folder / name.decode() for folder in (file.parent, SHARED))
            found = next((place for place in places if place.is_file()), None)
            if found is not None and found not in files:
                files.append(found)
    return b"\0".join(file.read_bytes() for file in files)


def cache_folder() -> Path:
    """Where compiled files are kept: `QUARK_CACHE`, else the user's cache folder of this system."""
    named = os.environ.get("QUARK_CACHE")
    if named:
        return Path(named)
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / default) / "quark"


def _private(folder: Path, without: str) -> Path:
    """The cache folder, which is made if it is not there. Raises QuarkError where others may write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"The cache folder {folder} cannot be made: {error.strerror}. {without}") from None
    if not _is_safe(folder):
        raise QuarkError(
            f"The cache folder {folder} belongs to another user, or others may write into it: no library in it is "
            f"loaded. Possible: chmod 700, or another folder in the environment variable QUARK_CACHE. {without}"
        )
    return folder


def _is_safe(path: Path) -> bool:
    """Return True where a file or folder is this user's, or root's, and no one else may write it."""
    if not hasattr(os, "getuid"):  # Windows, where the cache folder takes the rights of the user's own
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def compiler_of_this_machine() -> str | None:
    """Path of the C++ compiler: `CXX`, else the first that is found; None where there is none."""
    return next(filter(None, map(shutil.which, _compiler_names())), None)


def _compiler_names() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""), posix=sys.platform != "win32")
    return [chosen[0]] if chosen else [*(["cl"] if sys.platform == "win32" else []), "c++", "g++", "clang++"]


def _command(purpose: str, without: str) -> list[str]:
    """The compiler and its flags: `CXX`, else the first that is found."""
    chosen = shlex.split(os.environ.get("CXX", ""), posix=sys.platform != "win32")
    names, compiler = _compiler_names(), compiler_of_this_machine()
    if compiler is None:
        hint = " On Windows: start from a Developer Command Prompt, or install MinGW." if os.name == "nt" else ""
        raise MissingDependencyError(
            f"{purpose[:1].upper()}{purpose[1:]} is compiled on this machine, which has no C++ compiler: "
            f"none of {', '.join(names)} is there; the environment variable CXX can name one.{hint} {without}"
        )
    if Path(compiler).stem.lower() in ("cl", "clang-cl"):
        return [compiler, *chosen[1:], *_MSVC_FLAGS]
    flags = ("-static",) if sys.platform == "win32" else ("-fPIC",)
    return [compiler, *chosen[1:], *_GNU_FLAGS, *flags]


def _build(command: list[str], source: Path, path: Path, without: str) -> None:
    msvc = _MSVC_FLAGS[0] in command
    try:
        with atomic_file(path) as temporary, tempfile.TemporaryDirectory() as scratch:
            out = [f"/I{SHARED}", f"/Fe:{temporary}"] if msvc else ["-I", str(SHARED), "-o", str(temporary)]
            # Intermediate files fall into the working folder.
            done = subprocess.run(
                [*command, str(source), *out],
                cwd=scratch,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
                raise QuarkError(f"The C++ compiler failed: {shlex.join(command)}\n{lines}\n{without}")
    except OutputError:
        # Another process may have put the file there, and hold it open.
        if not path.exists():
            raise


def in_threads(count: int, smallest: int, action: Callable[[int, int], None]) -> None:
    """Run action(start, count) on ranges of at least `smallest`, over as many threads as torch may use."""
    torch = sys.modules.get("torch")
    threads = max(1, min(torch.get_num_threads() if torch is not None else 1, count // smallest))
    step = -(-count // threads)
    ranges = [(start, min(step, count - start)) for start in range(0, count, step)]
    if len(ranges) == 1:
        action(*ranges[0])
        return
    for done in [_pool(threads).submit(action, *one) for one in ranges]:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="native")
