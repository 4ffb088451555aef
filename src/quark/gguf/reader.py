"""The reader of a GGUF file, and what is refused of damaged ones before a tensor is read.

What llama.cpp (gguf.cpp, llama-model-loader.cpp) refuses is refused here: tensors lie one after the other in the order
of their entries, each at the next multiple of the alignment, and fill the section of data; a block of the model that
the metadata count is there, and no other.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quark.base.files import require_regular
from quark.errors import FormatError
from quark.gguf.names import block_of, import_gguf

LONGEST_NAME, MOST_AXES = 63, 4
"""Of a tensor, in ggml: bytes of its name, and axes."""
_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")


def open_gguf(file: Path) -> Any:
    """A gguf.GGUFReader of the file. Raises FormatError for what is no GGUF file, or one that llama.cpp refuses."""
    import_gguf()  # raises where it is missing
    require_regular(file)
    try:
        reader = _reader_class()(file)
        _check_texts(reader)
        _check_counts(reader)
        _check_numbers(reader)
    except (OSError, ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise FormatError(f"{file} is no GGUF file, or a damaged one: {error}.") from None
    return reader


def release_pages(reader: Any) -> None:
    """Give back the memory of what was read of a file; it is read again when it is used."""
    place: Any = reader.data
    while place is not None and not isinstance(place, mmap.mmap):
        place = getattr(place, "base", None)
    if isinstance(place, mmap.mmap) and hasattr(place, "madvise"):
        place.madvise(mmap.MADV_DONTNEED)


@cache
def _reader_class() -> Any:
    """gguf.GGUFReader, which stops at the end of the file, and looks where tensors lie before it takes them from there.

    That of the package takes what lies after the end for values of no bytes: an array that says that it has 2 ** 60
    entries would be read until the memory is full.
    """
    gguf = import_gguf()

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]  # no types where the package is missing
        data: Any

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if type(self.data) is np.memmap:  # of which each of 100,000 texts would be one, in more than twice the time
                self.data = self.data.view(np.ndarray)
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError(f"it ends at byte {len(self.data)}, before {count} values at byte {offset}")
            return values

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            _check_places(fields, int(self.alignment))
            super()._build_tensors(start_offs, fields)

    return Reader


def _check_places(fields: list[Any], alignment: int) -> None:
    """Raise ValueError where a tensor lies elsewhere than after the one before it."""
    gguf, place = import_gguf(), 0
    for field in fields:
        length, _, axes, sizes, kind, offset = field.parts
        name, shape = field.name, [int(size) for size in sizes]
        if int(length[0]) > LONGEST_NAME or int(axes[0]) > MOST_AXES:
            raise ValueError(f"the tensor {name!r:.80} has a name of {length[0]} bytes and {axes[0]} axes")
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind[0]))]
        if not shape or 0 in shape or shape[0] % int(block):
            raise ValueError(f"the tensor {name!r} has the shape {shape}, in rows of blocks of {block}")
        if int(offset[0]) != place:
            raise ValueError(f"the tensor {name!r} lies at byte {offset[0]} of the data, not after the last at {place}")
        place += math.prod(shape) // int(block) * int(size)
        place += -place % alignment


def _check_texts(reader: Any) -> None:
    """Raise ValueError for a text that is no UTF-8: a name, a token, a template."""
    gguf = import_gguf()
    for field in reader.fields.values():
        if field.types and field.types[-1] is gguf.GGUFValueType.STRING:
            for index in field.data:
                try:
                    str(bytes(field.parts[index]), encoding="utf-8")
                except UnicodeDecodeError:
                    raise ValueError(
                        f"{field.name} holds a text that is no UTF-8: {bytes(field.parts[index])!r:.60}"
                    ) from None


def _check_counts(reader: Any) -> None:
    """Raise ValueError where the metadata count blocks or experts that the tensors do not have, or fewer."""
    architecture = _scalar(reader, "general.architecture")
    found = {block for tensor in reader.tensors if (block := block_of(tensor.name)) is not None}
    blocks = _scalar(reader, f"{architecture}.block_count")
    if blocks is not None and found and (len(found) != blocks or max(found) >= blocks):
        other = next(block for block in range(max(found) + 2) if (block in found) != (block < blocks))
        raise ValueError(
            f"{architecture}.block_count is {blocks}, and tensors of the block {other} are "
            + ("there" if other in found else "missing")
        )
    experts = _scalar(reader, f"{architecture}.expert_count")
    for tensor in reader.tensors:
        if experts is not None and _EXPERTS.fullmatch(tensor.name) and int(tensor.shape[-1]) != experts:
            raise ValueError(f"{architecture}.expert_count is {experts}, and {tensor.name} has {tensor.shape[-1]}")


def _check_numbers(reader: Any) -> None:
    """Raise ValueError for a number of the architecture with which every output would be NaN."""
    for key, value in hyperparameters(reader):
        numbers = [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, float)]
        lowest = 0.0 if "epsilon" in key else -math.inf
        if not all(map(math.isfinite, numbers)) or min(numbers, default=0.0) < lowest:
            raise ValueError(f"{key} is {value!r:.60}")
        if ".rope.freq_base" in key and min(numbers, default=1.0) <= 0:
            raise ValueError(f"{key} is {value}, and the base of rotations is more than 0")


def hyperparameters(reader: Any) -> Iterator[tuple[str, Any]]:
    """Key and value of what a file says of its own architecture."""
    prefix = f"{_scalar(reader, 'general.architecture')}."
    for key, field in reader.fields.items():
        if key.startswith(prefix):
            yield key, field.contents()


def _scalar(reader: Any, key: str) -> Any:
    """The value of a field; None where it is missing, or a list."""
    field = reader.get_field(key)
    value = None if field is None else field.contents()
    return None if isinstance(value, list) else value
