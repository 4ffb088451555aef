"""Coverage-guided fuzzing of the parsers that are quark's own: each gives a value or a QuarkError, whatever the bytes.

`python -m tests.fuzz.guided gguf --seconds 180` needs the package atheris, which is no dependency of quark:

    python -m venv /tmp/guided && /tmp/guided/bin/pip install atheris
    PYTHONPATH=src:.:$(.venv/bin/python -c 'import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])') \
        /tmp/guided/bin/python -m tests.fuzz.guided gguf

A finding is printed with its traceback, and its bytes stay in the corpus, build/guided/PARSER by default. An empty one
begins with a small file that other libraries wrote: from nothing, no run gets past the first bytes of a format.
Templates are no parser of quark's: Jinja reads them, in a process that can be ended.
"""

from __future__ import annotations

import argparse
import importlib
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Parse = Callable[[Path], object]
Write = Callable[[Path], object]


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


def _write_gguf(file: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), np.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _write_imatrix(file: Path) -> None:
    """As tools/imatrix/imatrix.cpp of llama.cpp writes it: entries, each with name, calls, values; then calls."""
    name = b"blk.0.attn_q.weight"
    entry = struct.pack(f"<i{len(name)}sii4f", len(name), name, 2, 4, 1.0, 2.0, 3.0, 4.0)
    file.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<i", 2))


def _write_safetensors(file: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a.weight": np.ones((2, 3), np.float32), "b": np.zeros(4, np.int8)}, file, {"format": "pt"})


def _write_protobuf(file: Path) -> None:
    """Two layers, one of them in a branch, with a weight of each way that a tensor holds its values."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    one = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    two = helper.make_tensor("v", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    x, y, c = (helper.make_tensor_value_info(n, t, s) for n, t, s in (("x", 1, ["n", 4]), ("y", 1, None), ("c", 9, [])))
    branch = [
        helper.make_graph(
            [helper.make_node(kind, ["h", "v"], ["z"])], kind, [], [helper.make_empty_tensor_value_info("z")]
        )
        for kind in ("Add", "Mul")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1]),
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x, c], [y], [one, two])), file)


def _write_npz(file: Path) -> None:
    np.savez(file, x=np.arange(6, dtype=np.float32).reshape(2, 3), mask=np.ones(2, bool))


def _write_pattern(file: Path) -> None:
    file.write_bytes(rb"(?:model\.)?layers\.\d+\.(q|k)_proj|[a-z_]{2,4}$" + b"\0model.layers.0.q_proj")


@dataclass(frozen=True)
class Parser:
    """What is called with a file, what writes a whole one, the modules that coverage is taken of, the name's end."""

    parse: Parse
    write: Write
    modules: tuple[str, ...]
    suffix: str = ""


PARSERS = {
    "gguf": Parser(_gguf, _write_gguf, ("quark.gguf.reader", "quark.gguf.configs", "gguf.gguf_reader"), ".gguf"),
    "imatrix": Parser(_imatrix, _write_imatrix, ("quark.gguf.imatrix",), ".dat"),
    "safetensors": Parser(
        _safetensors, _write_safetensors, ("quark.torch.checkpoint.safetensors_file",), ".safetensors"
    ),
    "protobuf": Parser(
        _protobuf, _write_protobuf,
        ("quark.onnx.graph.proto_file", "quark.onnx.graph.check_proto", "quark.onnx.graph.check_tensors"),
        ".onnx",
    ),
    "npz": Parser(_npz, _write_npz, ("quark.base.data_files.arrays", "zipfile", "numpy.lib.format"), ".npz"),
    "pattern": Parser(_pattern, _write_pattern, ("quark.base.bounded_regex",)),
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
        if not any(corpus.iterdir()):
            row.write(file)
            row.parse(file)  # it is right
            (corpus / "whole").write_bytes(file.read_bytes())

        def once(data: bytes) -> None:
            file.write_bytes(data)
            with suppress(QuarkError):  # which commands print as one line, whatever names it quotes
                row.parse(file)

        limits = ("-timeout=20", "-rss_limit_mb=4096", "-max_len=8192", f"-max_total_time={chosen.seconds}")
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={corpus}/", str(corpus)], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
