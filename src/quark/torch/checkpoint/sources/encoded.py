"""A float tensor that a folder stores in tensors of other names: codes, scales and what else its program needs.

Each program has a file in `encodings/`, which says from the headers which tensors belong together, and from these
tensors, rows after rows, which values they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from quark.core.array import row_chunks
from quark.errors import FormatError
from quark.torch.checkpoint.finite import is_finite
from quark.torch.checkpoint.safetensors_file import TensorFile

Files = Mapping[str, TensorFile]
"""Name of a stored tensor -> the file that holds it."""
Tensors = Mapping[str, torch.Tensor]
"""Role of a stored tensor, such as "scale" -> the tensor."""
Rows = Callable[[slice], torch.Tensor]
"""A range of rows of a float tensor, all axes but the last counted as one -> their values, float32."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of scales that are stored as plain numbers."""
CODES = "codes"
"""Role of the tensor that holds the codes."""


@dataclass(frozen=True)
class EncodedWeight:
    """A float tensor that is stored in parts.

    Attributes:
        name: Of the float tensor.
        parts: Role -> name of the stored tensor; one role is `CODES`.
        shape: Of the float tensor.
        decoder: Makes the function that gives rows from the stored tensors. Raises FormatError for values that are no
            scales.
    """

    name: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    decoder: Callable[[Tensors], Rows]

    def read(self, files: Files, dtype: torch.dtype, index: int | None = None) -> torch.Tensor:
        """The float tensor, or one entry of its first axis, rounded once.

        Raises FormatError as `decoder`, and for values that are NaN or infinite.
        """
        rows = self.decoder({role: files[part].read(part) for role, part in self.parts.items()})
        shape = self.shape if index is None else self.shape[1:]
        count = math.prod(shape[:-1])
        first = 0 if index is None else index * count
        out = torch.empty((count, shape[-1]), dtype=dtype)
        for piece in row_chunks(count, 4 * shape[-1], 1 << 20):
            out[piece] = rows(slice(first + piece.start, first + piece.stop)).to(dtype)
            if not is_finite(out[piece]):
                raise FormatError(f"{self.name} cannot be read: it decodes to NaN or infinity.")
        return out.reshape(shape)


def require_part(files: Files, name: str, dtypes: Collection[torch.dtype], shape: tuple[int, ...] | None = None) -> str:
    """The name of a stored tensor of one of these dtypes, and of this shape where one is given.

    Raises FormatError for one that is absent or of another kind.
    """
    if name not in files:
        raise FormatError(f"The checkpoint has no tensor {name}, which its other tensors need.")
    found = files[name].meta(name)
    if found.dtype not in dtypes or shape not in (None, tuple(found.shape)):
        of_shape = "" if shape is None else f" of shape {shape}"
        raise FormatError(
            f"{name} holds {dtype_name(found.dtype)} of shape {tuple(found.shape)}; its other tensors need "
            f"{' or '.join(map(dtype_name, dtypes))}{of_shape}."
        )
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """As in "bfloat16"."""
    return str(dtype).removeprefix("torch.")
