"""Importance matrices of llama.cpp: of each tensor the second moments of what its columns are multiplied with.

    GGUF   general.type "imatrix"; <tensor>.in_sum2, sums of squares, (experts, columns); <tensor>.counts, tokens
    .dat   int32 entries; each int32 length, name, int32 calls, int32 values, float32 means * calls; then int32 calls

tools/imatrix/imatrix.cpp of llama.cpp defines both. An expert that no token reached weighs all columns the same.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quark.base.files import atomic_file, require_regular
from quark.core.array import NumpyArray
from quark.errors import FormatError, OutputError
from quark.gguf.names import import_gguf
from quark.gguf.reader import open_gguf

Sums = dict[str, tuple[NumpyArray, NumpyArray]]
"""Name of a tensor -> sums of squares, (experts, columns), and tokens, (experts,); float32."""
GGUF_SUFFIX, DAT_SUFFIX = ".gguf", ".dat"
CHUNK = 512
"""Tokens of what the files call a chunk, which readers show and compute nothing with."""


def save_imatrix(
    sums: Sums, file: str | os.PathLike[str], datasets: Sequence[str] = (), overwrite: bool = False
) -> Path:
    """Write a file that llama.cpp's quantizer reads: the old form where the name ends in .dat, else GGUF.

    Args:
        sums: From `collect_imatrix`.
        file: Name that ends in .gguf or .dat.
        datasets: Where the data came from, which readers show.
        overwrite: Replace the file if it is there.

    Raises:
        OutputError: Another ending, or the file cannot be written.
        OutputExistsError: The file is there already.
    """
    path = check_imatrix_name(file)
    with atomic_file(path, overwrite) as temporary:
        (_write_dat if path.suffix == DAT_SUFFIX else _write_gguf)(sums, temporary, list(datasets))
    return path


def check_imatrix_name(file: str | os.PathLike[str]) -> Path:
    """The path. Raises OutputError where its ending names no form of an importance matrix."""
    path = Path(file)
    if path.suffix not in (GGUF_SUFFIX, DAT_SUFFIX):
        raise OutputError(f"{path}: an importance matrix ends in {GGUF_SUFFIX} or {DAT_SUFFIX} (the form of old).")
    return path


def _chunks(sums: Sums) -> int:
    return -(-int(max(counts.max() for _, counts in sums.values())) // CHUNK)


def _write_gguf(sums: Sums, file: Path, datasets: list[str]) -> None:
    gguf = import_gguf()
    writer = gguf.GGUFWriter(file, "")
    # What is no model has no architecture, which the writer puts first.
    writer.kv_data[0].pop(gguf.Keys.General.ARCHITECTURE, None)
    writer.add_type(gguf.GGUFType.IMATRIX)
    if datasets:
        writer.add_array(gguf.Keys.IMatrix.DATASETS, datasets)
    writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, _chunks(sums))
    writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, CHUNK)
    for name, (total, counts) in sums.items():
        writer.add_tensor(f"{name}.in_sum2", total)
        writer.add_tensor(f"{name}.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_dat(sums: Sums, file: Path, datasets: list[str]) -> None:
    with file.open("wb") as out:
        out.write(struct.pack("<i", len(sums)))
        for name, (total, counts) in sums.items():
            calls, encoded = -(-int(counts.max()) // CHUNK), name.encode()
            mean = np.where(counts[:, None] > 0, total / np.maximum(counts[:, None], 1), 1)
            out.write(struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", calls, mean.size))
            out.write((mean * calls).astype("<f4").tobytes())
        source = ", ".join(datasets).encode()
        out.write(struct.pack("<ii", _chunks(sums), len(source)) + source)


def read_imatrix(file: str | os.PathLike[str]) -> dict[str, NumpyArray]:
    """The mean squares of an importance matrix, in either form, whatever its name.

    Returns:
        Name of a tensor -> float32 (experts, columns); of the old form (1, experts * columns), as it does not say how
        many experts there are.

    Raises:
        FormatError: The file is not there, is no importance matrix, is truncated, or holds NaN, Inf or negatives.
        MissingDependencyError: The gguf package is absent.
    """
    path = Path(file)
    require_regular(path)
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
        found = _read_gguf(path) if magic == b"GGUF" else _read_dat(path.read_bytes())
    except FormatError:
        raise
    except (OSError, ValueError, IndexError, KeyError, struct.error, MemoryError) as error:
        raise FormatError(f"{path} is no importance matrix, or truncated: {error}.") from None
    for name, mean in found.items():
        if not (np.isfinite(mean).all() and (mean >= 0).all()):
            raise FormatError(f"{path}: {name} holds numbers that are no mean squares (NaN, Inf or negative).")
    return found


def _read_gguf(path: Path) -> dict[str, NumpyArray]:
    tensors = {tensor.name: tensor.data for tensor in open_gguf(path).tensors}
    found = {}
    for stored, total in tensors.items():
        name = stored.removesuffix(".in_sum2")
        if name == stored:
            continue
        counts = tensors[f"{name}.counts"].reshape(-1, 1).astype(np.float32)
        sums = total.reshape(len(counts), -1).astype(np.float32)
        found[name] = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
    if not found:
        raise ValueError("it holds no in_sum2")
    return found


def _read_dat(data: bytes) -> dict[str, NumpyArray]:
    found, place = {}, 4
    (entries,) = struct.unpack_from("<i", data)
    if entries < 1:
        raise ValueError(f"it has {entries} entries")
    for _ in range(entries):
        (length,) = struct.unpack_from("<i", data, place)
        if not 0 < length <= len(data):
            raise ValueError(f"a name has {length} bytes")
        name = data[place + 4 : place + 4 + length].decode()
        calls, count = struct.unpack_from("<ii", data, place + 4 + length)
        place += 12 + length
        if count < 1:
            raise ValueError(f"{name} has {count} values")
        values = np.frombuffer(data, "<f4", count, place)
        found[name] = (values / calls if calls > 0 else values).astype(np.float32)[None]
        place += 4 * count
    return found
