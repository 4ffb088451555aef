"""Which programs install beside quark at their newest release: `python -m benchmarks.environments`.

For each program, uv resolves what the extras of this tree require together with `program==newest`. It reads metadata
only: nothing is installed. Where there is no solution, each bound of quark is tried by itself, with all its other
requirements left free, so that the table names every bound that is in the way, and the version that would be taken
without it. `--instead 'typer>=0.12'` tries other bounds before they are written into pyproject.toml.

    newest           the newest release of the index that is no pre-release
    without a word   what is taken where quark is named first and no release of the program is asked for

The exit code is 1 if a program does not install beside quark, those of EXPECTED apart.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from benchmarks.tables import console

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it to Python 3.10

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
PROGRAMS = (
    *("vllm", "sglang", "llmcompressor", "nvidia-modelopt[hf]", "unsloth", "optimum-intel", "axolotl", "auto-round"),
    *("gptqmodel", "diffusers", "torchao", "lm-eval", "trl", "sentence-transformers", "olive-ai", "nncf"),
    "optimum-onnx",
)
EXPECTED = {"optimum-onnx": "it takes no transformers 5, which quark needs"}
"""Programs that cannot be installed beside quark -> why."""
SHOWN = ("torch", "transformers", "huggingface-hub", "safetensors", "accelerate", "numpy", "typer")
"""Packages whose versions are columns."""
FROM_SOURCE = (
    *("axolotl-contribs-lgpl", "axolotl-contribs-mit", "deepspeed", "defuser", "device-smi", "fire", "gptqmodel"),
    *("langdetect", "logbar", "pypcre", "rouge-score", "sqlitedict", "tokenicer", "word2number"),
)
"""Packages that have no wheels. Their metadata are read from the source, for which none of them compiles anything or
needs torch. The source of any other package is left alone: vLLM's would fetch gigabytes of CUDA first."""
PLATFORM = "x86_64-manylinux_2_35"

Answer = dict[str, str] | str
"""Package -> version, or the sentences of uv that say why there is no solution."""
Resolve = Callable[[Sequence[str]], Answer]
"""Lines of requirements -> answer."""


@dataclass(frozen=True)
class Blocked:
    """A bound of quark with which a program does not resolve, and the version that is taken without a bound."""

    bound: str
    instead: str


@dataclass(frozen=True)
class Row:
    """A program at its newest release, beside quark."""

    program: str
    newest: str
    answer: Answer
    free: str
    """The version that is taken where none is asked for; a dash where none fits."""
    blocked: tuple[Blocked, ...] = ()

    @property
    def resolves(self) -> bool:
        """True if there is a solution with the newest release."""
        return isinstance(self.answer, dict)

    @property
    def reason(self) -> str:
        """The bounds in the way of the newest release; where none is by itself, the words of uv."""
        if isinstance(self.answer, dict):
            return ""
        bounds = [f"{one.bound} ({one.instead} without a bound)" for one in self.blocked]
        return ", ".join(bounds) or " ".join(self.answer.split())


def required(project: str, extras: Sequence[str]) -> list[Requirement]:
    """The requirements of the package and of extras, from the text of pyproject.toml."""
    table = tomllib.loads(project)["project"]
    lines = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def replaced(requirements: Sequence[Requirement], instead: Sequence[str]) -> list[Requirement]:
    """The requirements with other bounds for some packages. Raises ValueError for a package that is not required."""
    bounds = {canonicalize_name(one.name): one for one in map(Requirement, instead)}
    if unknown := bounds.keys() - {canonicalize_name(one.name) for one in requirements}:
        raise ValueError(f"quark does not require {', '.join(sorted(unknown))}, for which --instead has a bound")
    return [bounds.get(canonicalize_name(one.name), one) for one in requirements]


def without_bounds(requirements: Sequence[Requirement], but: Requirement | None = None) -> list[str]:
    """The names of the packages, with their markers; the bound of one of them is kept."""
    marked = {one: f"; {one.marker}" if one.marker else "" for one in requirements}
    return [str(one) if one == but else f"{one.name}{marker}" for one, marker in marked.items()]


def blocking(requirements: Sequence[Requirement], program: str, resolve: Resolve) -> tuple[Blocked, ...]:
    """The bounds with each of which, and no other, the program (`name==version`) does not resolve."""
    free = resolve([*without_bounds(requirements), program])
    if not isinstance(free, dict):
        return ()  # another package is in the way, not a bound
    bound = [one for one in requirements if one.specifier]
    alone = [one for one in bound if isinstance(resolve([*without_bounds(requirements, one), program]), str)]
    return tuple(Blocked(str(one), free.get(canonicalize_name(one.name), "none")) for one in alone)


def row_of(requirements: Sequence[Requirement], program: str, newest: str, resolve: Resolve) -> Row:
    """Resolves a program at its newest release, and where no release is asked for."""
    lines = [str(one) for one in requirements]
    pinned = f"{program}=={newest}"
    answer, free = resolve([*lines, pinned]), resolve([*lines, program])
    version = free[canonicalize_name(Requirement(program).name)] if isinstance(free, dict) else "-"
    return Row(
        program, newest, answer, version, () if isinstance(answer, dict) else blocking(requirements, pinned, resolve)
    )


def chosen(output: str) -> dict[str, str]:
    """Package -> version, from the lines that uv prints."""
    return dict(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", output, re.MULTILINE))


def last_of_index(sentence: str) -> str:
    """The newest version of a package, from what uv says where one above all is asked for."""
    stated = re.search(r"only \S+?<=(\S+) is\s+available", sentence)
    if stated is None:
        raise ValueError(f"uv names no newest release: {' '.join(sentence.split())}")
    return stated[1]


class Uv:
    """Resolutions by uv, for a version of Python on Linux."""

    def __init__(self, python: str) -> None:
        program = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if program is None:
            raise ValueError("uv resolves the requirements, and is not installed: pip install uv")
        self._command = [program, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
        self._command += ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:"]
        self._command += [part for name in FROM_SOURCE for part in ("--no-binary", name)]

    def resolve(self, lines: Sequence[str], *options: str) -> Answer:
        """The versions that fit requirements. Raises ValueError where uv could not tell, as without an index."""
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        command = [*self._command, *options]
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode == 0:
            return chosen(done.stdout)
        if "No solution found" not in done.stderr:
            raise ValueError(f"uv did not resolve {', '.join(lines)}: {' '.join(done.stderr.split())}")
        return done.stderr

    def newest(self, program: str) -> str:
        """The newest release of a program that is no pre-release, for whichever Python it is."""
        name = Requirement(program).name
        last = last_of_index(str(self.resolve([f"{name}>=99999"], "--no-deps")))
        if not Version(last).is_prerelease:
            return last
        final = self.resolve([name], "--no-deps")
        if isinstance(final, str):
            raise ValueError(f"no release of {name} fits: {' '.join(final.split())}")
        return final[canonicalize_name(name)]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A row for each program, with the versions that are taken beside it."""
    table = Table("program", "newest", "resolves", *SHOWN, "without a word", title=title)
    for row in rows:
        versions = row.answer if isinstance(row.answer, dict) else {}
        seen = [versions.get(name, "-") for name in SHOWN]
        table.add_row(escape(row.program), row.newest, "yes" if row.resolves else "NO", *seen, row.free)
    return table


def unexpected(rows: Sequence[Row]) -> list[str]:
    """A sentence for each program that differs from what EXPECTED says."""
    apart = [row for row in rows if row.resolves == (row.program in EXPECTED)]
    return [f"{row.program} resolves, which EXPECTED says it does not" for row in apart if row.resolves] + [
        f"{row.program} {row.newest} does not install beside quark" for row in apart if not row.resolves
    ]


def main() -> int:
    """Resolve the programs, print the table and what is in the way."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.environments", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("programs", nargs="*", default=PROGRAMS, help="packages; all of the table if none is given")
    parser.add_argument("--extras", nargs="*", default=["torch"], help="extras of quark; default: torch")
    parser.add_argument("--python", default="3.12", help="version of Python; default: 3.12")
    parser.add_argument("--instead", nargs="*", default=[], metavar="BOUND", help="bounds to try, as 'typer>=0.12'")
    asked = parser.parse_args()
    try:
        uv = Uv(asked.python)
        requirements = replaced(required(PROJECT.read_text(encoding="utf-8"), asked.extras), asked.instead)
        rows = [row_of(requirements, program, uv.newest(program), uv.resolve) for program in asked.programs]
    except ValueError as error:
        parser.error(str(error))
    output = console()
    title = f"openquark[{','.join(asked.extras)}] and a program, Python {asked.python} on Linux"
    output.print(table_of(rows, escape(title)))
    for row in rows:
        if not row.resolves:
            expected = f" ({EXPECTED[row.program]})" if row.program in EXPECTED else ""
            output.print(escape(f"{row.program} {row.newest}{expected}: {row.reason}"))
    wrong = unexpected(rows)
    for sentence in wrong:
        output.print(escape(f"Wrong: {sentence}."))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
