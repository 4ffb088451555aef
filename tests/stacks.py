"""`python -m tests.stacks oldest`: the everyday tests with the versions of packages that others ask for.

    oldest           the oldest versions that pyproject.toml allows
    llm-compressor   what llm-compressor asks for; vllm and sglang likewise
    newest           the newest release of everything

uv resolves what a stack asks for together with the extras of this tree. What differs from this environment is put into
build/stacks, and stands in front of it on the path: torch and the tools of the tests are those of this environment. Of
`newest` they could be other ones; a torch of another version has its own environment by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "stacks"
TORCH_HALF = ("base", "commands", "contracts", "gguf", "goals", "jobs", "torch")
ONNX_HALF = ("onnx", "onnx_ops")
TOUCHING = (
    "base/test_libraries.py", "commands/test_export_formats.py", "contracts/test_mixtures.py",
    "contracts/test_on_load.py", "gguf", "torch/checkpoint", "torch/flows/on_load", "torch/formats",
    "torch/model/names", "torch/writers", "onnx_ops", "onnx/graph",
)  # fmt: skip
"""Tests of what touches other libraries: a few minutes."""
EXTRAS = ("torch", "onnx", "gguf", "diffusers", "peft", "crypto", "images", "report", "slim")
OF_THIS_ENVIRONMENT = ("torch", "torchvision", "triton", "setuptools", "onnxscript")
"""Packages that a stack never brings: gigabytes, or tied to the torch of this environment."""
READERS = "compressed-tensors\nsentence-transformers\n"
"""What else reads our folders in the tests."""


QUIET = ("-p", "no:anyio", "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
"""Old releases use names that newer ones of others call deprecated; and a plugin of pytest that is too old for it."""


@dataclass(frozen=True)
class Stack:
    """An environment.

    Attributes:
        asks: The requirement whose versions are taken; empty: those of quark alone.
        halves: Folders of tests that it concerns.
        options: For uv.
        extras: Of quark, which are installed there.
    """

    asks: str
    halves: tuple[str, ...]
    options: tuple[str, ...] = ()
    extras: tuple[str, ...] = EXTRAS


STACKS = {
    "oldest": Stack("", (*TORCH_HALF, *ONNX_HALF), ("--resolution", "lowest-direct")),
    "llm-compressor": Stack("llmcompressor==0.14.*", TORCH_HALF, extras=("torch",)),
    "vllm": Stack("vllm==0.33.*", TORCH_HALF, extras=("torch",)),
    "sglang": Stack("sglang==0.5.23", TORCH_HALF, extras=("torch",)),
    "newest": Stack("", (*TORCH_HALF, *ONNX_HALF), ("--resolution", "highest")),
}


def uv(*arguments: str, lines: str | None = None) -> str:
    """What uv prints. Raises SystemExit, with its words, where it fails."""
    program = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise SystemExit("uv resolves the stacks, and is not installed: pip install uv")
    done = subprocess.run(
        [program, "pip", *arguments], input=lines, capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"uv pip {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def resolved(lines: str, *options: str) -> dict[str, str]:
    """Package -> version, for requirements."""
    base = ("compile", "-", "--quiet", "--no-header", "--no-annotate", "--python", sys.executable)
    said = uv(*base, *options, lines=lines)
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", said, re.MULTILINE)}


def pins_of(stack: Stack) -> dict[str, str]:
    """Package -> version, of what quark and the readers of its folders need that this environment lacks so."""
    own = f".[{','.join(stack.extras)}]\n"
    if stack.asks:  # a server brings hundreds of packages, of which the tests need few
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            found = resolved(f"{own}{stack.asks}\n", "--python-platform", "x86_64-manylinux_2_35")
            constraints.write("".join(f"{name}=={version}\n" for name, version in found.items()))
            constraints.flush()
            found = resolved(own + READERS, "--constraint", constraints.name)
    else:
        found = resolved(own, *stack.options)
    here = {canonicalize_name(one.metadata["Name"]): one.version for one in distributions()}
    apart = re.compile(rf"({'|'.join(OF_THIS_ENVIRONMENT)})$|nvidia-|cuda-")
    return {
        name: version
        for name, version in sorted(found.items())
        if here.get(name) != version and apart.match(name) is None
    }


def made(name: str, pins: dict[str, str]) -> Path:
    """The folder with the packages of a stack, which is made where it is not there."""
    folder, wanted = BUILD / name, "\n".join(f"{package}=={version}" for package, version in pins.items())
    stamp = folder / "pins.txt"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        uv("install", "--quiet", "--no-deps", "--target", str(folder), "--python", sys.executable, *wanted.split("\n"))
        stamp.write_text(wanted, encoding="utf-8")
    return folder


def run(name: str, tests: tuple[str, ...], options: list[str]) -> int:
    """Run tests in a stack; the exit code of pytest."""
    pins = pins_of(STACKS[name])
    print(f"{name}: {', '.join(f'{package} {version}' for package, version in pins.items())}", flush=True)
    path = os.pathsep.join([str(made(name, pins)), str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-m", "not slow or everyday", "-p", "no:cacheprovider", *QUIET, *options]
    return subprocess.run(
        [*command, *(f"tests/{each}" for each in tests)], check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    ).returncode


def main() -> int:
    """Run the stacks one after another; 1 where a test failed in any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stacks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stacks", nargs="*", default=list(STACKS), metavar="STACK", help=f"of: {', '.join(STACKS)}")
    parser.add_argument("--touching", action="store_true", help="only the tests of what touches other libraries")
    asked, options = parser.parse_known_args()
    if unknown := set(asked.stacks) - STACKS.keys():
        parser.error(f"there is no stack {', '.join(sorted(unknown))}; possible: {', '.join(STACKS)}")
    codes = {name: run(name, TOUCHING if asked.touching else STACKS[name].halves, options) for name in asked.stacks}
    for name, code in codes.items():
        print(f"{name}: {'right' if code == 0 else f'pytest ended with {code}'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
