"""The rows: what is quantized how, by quark's command line or by a peer's own interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUARK = "quark"
IMATRIX = "IMATRIX"
"""Stands for the file of the importance matrix of the calibration text."""
ONNX = "ONNX"
"""The first word of a row that quantizes the ONNX file of the float model."""
INTEGERS = ("uint4_wo_64", "uint4_wo_32", "int4_wo_64", "int4_wo_32", "int3_wo_64", "int3_wo_32", "int2_wo_64")
FLOATS = ("mxfp4_weight_only", "nvfp4_weight_only", "mxfp4", "nvfp4", "mxfp4_fp8", "mxfp4_mxfp6_e2m3", "mxfp6_e2m3")
WIDE = ("int8_wo", "int8_dynamic", "ptpc_fp8", "fp8", "mxfp8_e4m3")
MIXES = ("q2_k", "q3_k_m", "q4_k_m", "iq4_xs", "q5_k_m")
SOLVERS = ("awq", "gptq", "gptaq", "qronos", "autoround")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: What the command line of the benchmark calls it.
        package: QUARK, or the peer that quantizes.
        words: The options of `quark quantize`; of a peer its method and the kind of weights.
        data: Whether calibration data are read.
    """

    name: str
    package: str
    words: tuple[str, ...]
    data: bool = True


def _ours(name: str, *words: str, data: bool = True) -> Row:
    return Row(name, QUARK, words, data)


def _with_algorithms(scheme: str, algorithms: Sequence[str]) -> Row:
    named = [word for name in algorithms for word in ("--algorithm", name)]
    return _ours("+".join((scheme, *algorithms)), "--scheme", scheme, *named)


def _rows() -> list[Row]:
    rows = []
    for scheme in (*INTEGERS, *FLOATS, *WIDE):
        rows.append(_ours(scheme, "--scheme", scheme, data=scheme in ("fp8", "mxfp4_fp8")))
        if scheme not in WIDE:
            efforts = ("balanced", "best")
            goal = ("--for", "transformers", "--scheme", scheme, "--effort")
            rows += [_ours(f"{scheme}:{effort}", *goal, effort) for effort in efforts]
    rows += [_with_algorithms("uint4_wo_64", (name,)) for name in SOLVERS]
    rows += [_with_algorithms("uint4_wo_64", ("awq", "qronos")), _with_algorithms("mxfp4", ("qronos",))]
    others = ("--exclude", "*layers.[4-9].*", "--exclude", "*layers.[12]?.*")
    first = ("--scheme", "uint4_wo_64", *others, "--algorithm")
    rows += [_ours(f"uint4_wo_64+{name} first blocks", *first, name) for name in ("awq", "qronos")]
    for mix in MIXES:
        gguf = ("--scheme", mix, "--export-format", "gguf")
        rows.append(_ours(mix, *gguf, data=False))
        rows += [_ours(f"{mix}:imatrix", *gguf, "--imatrix", IMATRIX, data=False)]
        rows += [_ours(f"{mix}:qronos", *gguf, "--algorithm", "qronos")]
    rows += [_ours(f"bits {bits}", "--bits", bits) for bits in ("3.5", "4.25", "5")]
    mixed = ("--candidates", "mxfp4,mxfp6_e2m3", "--algorithm", "equalize", "--algorithm", "qronos")
    rows += [_ours(f"bits {bits} of mxfp4 and mxfp6", "--bits", bits, *mixed) for bits in ("4.5", "5")]
    rows += [_ours(f"kv cache {kind}", "--scheme", "int8_wo", "--kv-cache", kind) for kind in ("fp8", "int8")]
    peers = (
        ("llm-compressor", "gptq", "uint4_wo_64"),
        ("llm-compressor", "gptq", "int4_wo_64"),
        ("llm-compressor", "awq", "uint4_wo_64"),
        ("llm-compressor", "awq first blocks", "uint4_wo_64"),
        ("llm-compressor", "gptq", "nvfp4"),
        ("llm-compressor", "nearest", "nvfp4"),
        ("auto-round", "first blocks", "uint4_wo_64"),
        ("auto-round", "tuned", "uint4_wo_64"),
        ("auto-round", "tuned", "mxfp4"),
        ("amd-quark", "gptq", "uint4_wo_64"),
        ("amd-quark", "awq", "uint4_wo_64"),
        ("amd-quark", "nearest", "mxfp4"),
        ("amd-quark", "gptq", "mxfp4"),
        ("llama.cpp", "nearest", "q4_k_m"),
        ("llama.cpp", "imatrix", "q4_k_m"),
        ("llama.cpp", "imatrix", "iq4_xs"),
        ("llama.cpp", "imatrix", "q2_k"),
    )
    rows += [Row(f"{package} {scheme}+{method}", package, (method, scheme)) for package, method, scheme in peers]
    return rows


ROWS: Mapping[str, Row] = {row.name: row for row in _rows()}
