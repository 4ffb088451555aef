"""Refuses files of torch.export that would run code while they are loaded, or do more than compute when they are used.

torch.export.load takes pickles of weights, constants, custom objects and example inputs, loads compiled libraries, and
evaluates text: guards and symbolic sizes as expressions, names as parts of the source of the graph. A graph may call
any operator of torch, of which some read and write files. What `save_graph` writes needs numbers, names and the
operators of `archived_operators` alone, so everything else is refused before it is loaded.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pickle import UnpicklingError
from typing import IO, Any

import torch

from quark.errors import FormatError
from quark.torch.graph.archived_operators import is_allowed

MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
TABLES = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_ENTRIES = re.compile(
    r"(\.data/(version|serialization_id)|archive_format|archive_version|byteorder|data/weights/weight_\d+"
    r"|data/constants/tensor_\d+|" + "|".join(map(re.escape, (MODEL, INPUTS, *TABLES))) + ")"
)
_TENSOR = re.compile(r"(weight|tensor)_\d+")
_NAME = re.compile(r"[\w.\-]*")
"""Names become parts of the source of the graph."""
_TEXT = frozenset({"as_string", "metadata", "opset_version", "torch_version", "verifiers"})
"""Entries that are kept as text; the strings in them may be any."""
_ARITHMETIC = (
    ast.Expression,
    *(ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Call, ast.Attribute, ast.keyword),
    *(ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_METHODS = frozenset({"size", "stride", "storage_offset", "inf", "isnan"})
"""Methods that guards call on a tensor or a number."""
_SYMPY = frozenset(
    {
        "Symbol", "Integer", "Float", "Rational", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv",
        "ModularIndexing", "Where", "Abs", "Pow", "PowByNatural", "FloatPow", "IntTrueDiv", "FloatTrueDiv",
        "ToFloat", "TruncToInt", "TruncToFloat", "CeilToInt", "FloorToInt", "RoundToInt", "RoundDecimal",
        "Identity", "IsNonOverlappingAndDenseIndicator", "BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or",
        "OpaqueUnaryFn_sqrt", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Piecewise",
    }
)  # fmt: skip
"""The names that sizes are written with."""
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_LONGEST, _HIGHEST = 10_000, 64
"""Characters of an expression, and the highest exponent: 9 ** 9 ** 9 would be computed for hours."""


def refuse_code(stream: IO[bytes]) -> None:
    """Raise FormatError for a file of torch.export that would run code; leave the stream at its beginning.

    Args:
        stream: The open file.

    Raises:
        FormatError: It holds a pickle, a compiled library, or text that is more than arithmetic and names.
    """
    from torch.export.pt2_archive import PT2ArchiveReader

    # torch falls back from its own reader of zip files to Python's, so that both have to see the same entries.
    with zipfile.ZipFile(stream) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise FormatError(f"its entry {packed[0]!r} is compressed, and could be unpacked to any size.")
    stream.seek(0)
    with PT2ArchiveReader(stream) as reader:
        for name in {*names, *reader.get_file_names()}:
            if not _ENTRIES.fullmatch(name):
                raise _refusal(f"the entry {name!r}")
        for table in TABLES:
            for name, entry in json.loads(reader.read_string(table))["config"].items():
                if entry["use_pickle"] or not _TENSOR.fullmatch(entry["path_name"]):
                    raise _refusal(f"{name!r}, a pickle or an object")  # weights and constants are stored as numbers
        for key, text in _texts("", json.loads(reader.read_string(MODEL))):
            _check_text(key, text)
        try:
            torch.load(io.BytesIO(reader.read_bytes(INPUTS)), weights_only=True)
        except UnpicklingError:
            raise _refusal("example inputs that are no plain tensors") from None
    stream.seek(0)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The strings of a JSON value, each with the key that it stands under. The keys of names are names, too."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield "name", inner
            if inner not in _TEXT:
                yield from _texts(inner, item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(key, item)
    elif isinstance(value, str):
        yield key, value


def _check_text(key: str, text: str) -> None:
    """Raise FormatError for a string that can do more than what its key says."""
    if key == "target":
        if not is_allowed(text):
            raise FormatError(
                f"its graph calls {text[:60]!r}, which is none of the operators that only compute with tensors. "
                "Possible, if you trust whoever made it: torch.export.load."
            )
        return
    if key in ("in_spec", "out_spec"):
        # Both import a module that the text names.
        plain = "__enum__" not in text and "defaultdict" not in text
    elif key in ("expr_str", "guards_code"):
        plain = _is_arithmetic(text)
    else:
        plain = _NAME.fullmatch(text) is not None
    if not plain:
        raise _refusal(f"the {key} {text[:60]!r}")


def _is_arithmetic(text: str) -> bool:
    """Return True where an expression compares and computes numbers, sizes and symbols, and calls nothing else."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval"))) if len(text) <= _LONGEST else []
    except SyntaxError:
        nodes = []
    return bool(nodes) and all(isinstance(node, _ARITHMETIC) and _is_harmless(node) for node in nodes)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_low(node.left, node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        low = node.func.id not in _POWERS or (len(node.args) == 2 and _is_low(*node.args))
        return node.func.id in _SYMPY and low
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute)
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    return not (isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier())


def _is_low(base: ast.expr, exponent: ast.expr) -> bool:
    """Return True where a power is of a small exponent, and of nothing that is a power itself."""
    sign = isinstance(exponent, ast.UnaryOp)
    number = exponent.operand if sign else exponent  # type: ignore[attr-defined]  # of a UnaryOp
    low = isinstance(number, ast.Constant) and isinstance(number.value, int | float) and number.value <= _HIGHEST
    powers = (
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
        or (isinstance(node, ast.Name) and node.id in _POWERS)
        for node in ast.walk(base)
    )
    return low and not any(powers)


def _refusal(what: str) -> FormatError:
    return FormatError(f"it holds {what}, which torch would run as code; save_params writes no such file.")
