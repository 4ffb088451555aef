"""Coverage-guided fuzzing of the parsers that are quark's own: each gives a value or a QuarkError, whatever the bytes.

`python -m tests.fuzz.guided gguf --seconds 180` needs the package atheris, which is no dependency of quark:

    python -m venv /tmp/guided && /tmp/guided/bin/pip install atheris
    PYTHONPATH=src:.:$(.venv/bin/python -c 'import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])') \
        /tmp/guided/bin/python -m tests.fuzz.guided gguf

A finding is printed with its traceback, and its bytes stay in the corpus, build/guided/PARSER by default. Templates are
no parser of quark's: Jinja reads them, in a process that can be ended.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Parse = Callable[[Path], object]


def _gguf(file: Path) -> None:
    from quark.gguf.configs import facts_of, kinds_of
    from quark.gguf.reader import open_gguf

    kinds_of(facts_of(open_gguf(file)))


def _imatrix(file: Path) -> None:
    from quark.gguf.imatrix import read_imatrix

    read_imatrix(file)


def _safetensors(file: Path) -> None:
    from quark.torch.checkpoint.safetensors_file import TensorFile

    opened = TensorFile(file)
    for name in opened.names:
        opened.read(name)


def _protobuf(file: Path) -> None:
    """Read whole, and past large tensors: both refuse, or give the same graph."""
    from quark.errors import QuarkError
    from quark.onnx.graph import proto_file
    from quark.onnx.graph.proto_file import read_ends, read_header

    proto_file.SMALL = 16  # so that tensors of small files are passed over, too
    try:
        whole = read_header(file)
    except QuarkError:
        read_ends(file)
        return
    ends = read_ends(file)
    assert [node.SerializeToString() for node in whole.graph.node] == [n.SerializeToString() for n in ends.graph.node]


def _npz(file: Path) -> None:
    from quark.base.data_files.arrays import read_npz

    read_npz(file)


def _pattern(file: Path) -> None:
    """A pattern and a name, between which a zero byte stands."""
    from quark.base.bounded_regex import full_match

    pattern, _, text = file.read_bytes().decode(errors="surrogateescape").partition("\0")
    found = full_match(pattern, text[:200])
    if len(pattern) < 12 and not re.search(r"[*+{?]", pattern):  # on which `re` ends, too
        assert found == bool(re.fullmatch(pattern, text[:200])), (pattern, text)


@dataclass(frozen=True)
class Parser:
    """What is called with a file, the modules that coverage is taken of, and the end of the file's name."""

    parse: Parse
    modules: tuple[str, ...]
    suffix: str = ""


PARSERS = {
    "gguf": Parser(_gguf, ("quark.gguf.reader", "quark.gguf.configs", "gguf.gguf_reader"), ".gguf"),
    "imatrix": Parser(_imatrix, ("quark.gguf.imatrix",), ".dat"),
    "safetensors": Parser(_safetensors, ("quark.torch.checkpoint.safetensors_file",), ".safetensors"),
    "protobuf": Parser(
        _protobuf, ("quark.onnx.graph.proto_file", "quark.onnx.graph.check_proto", "quark.onnx.graph.check_tensors"),
        ".onnx",
    ),
    "npz": Parser(_npz, ("quark.base.data_files.arrays", "zipfile", "numpy.lib.format"), ".npz"),
    "pattern": Parser(_pattern, ("quark.base.bounded_regex",)),
}  # fmt: skip


def main() -> None:
    """Fuzz one parser for so many seconds; a finding ends it."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    options.add_argument("parser", choices=PARSERS)
    options.add_argument("--seconds", type=int, default=180)
    options.add_argument("--corpus", help="folder, made if it is not there; what is in it is where it begins")
    chosen = options.parse_args()
    import atheris  # type: ignore[import-not-found, unused-ignore]  # see above

    from quark.errors import QuarkError

    row = PARSERS[chosen.parser]
    with atheris.instrument_imports(include=list(row.modules)):
        for name in row.modules:
            if name.startswith("quark."):
                importlib.import_module(name)
    corpus = Path(chosen.corpus or f"build/guided/{chosen.parser}")
    corpus.mkdir(parents=True, exist_ok=True)
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=place) as folder:
        file = Path(folder) / f"input{row.suffix}"

        def once(data: bytes) -> None:
            file.write_bytes(data)
            try:
                row.parse(file)
            except QuarkError as error:
                assert "\n" not in str(error), f"lines: {error!r}"

        limits = ("-timeout=20", "-rss_limit_mb=4096", "-max_len=8192", f"-max_total_time={chosen.seconds}")
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={corpus}/", str(corpus)], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
