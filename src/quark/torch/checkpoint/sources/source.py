"""A checkpoint folder as float tensors: plain, or quantized in one of the ways that `decode` knows.

FP8 in blocks and FP4 in bytes (weight_scale_inv of DeepSeek), compressed-tensors, ModelOpt, and MXFP4 of GPT-OSS
(blocks and scales of all experts of a layer). A code and its scale may lie in different files; one tensor is decoded at
a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from quark.errors import FormatError
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.checkpoint.sources.decode import StoredCodes, Tile, decode, float_shape, scales
from quark.torch.checkpoint.sources.encoded import CODES, dtype_name
from quark.torch.checkpoint.sources.encodings import ENCODINGS
from quark.torch.checkpoint.sources.methods import bits_of, fp4_dtype, method_of, tile_of
from quark.torch.checkpoint.sources.part_types import BESIDE as BESIDE_TYPES
from quark.torch.checkpoint.sources.part_types import LIVE, Claimed, require_type

SCALES = ("_scale_inv", "_scale")
"""After the name of a coded tensor: its scale."""
BESIDE = ("scale", "qscale_weight")
"""Leaves that DeepSeek V4 and Mistral give the scale of a coded `weight`; beside another one they are parameters."""
PACKED, SHAPE, ZERO, ORDER = "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"
DIVISOR, FACTOR = "weight_global_scale", "weight_scale_2"
PARTS = (
    PACKED, SHAPE, ZERO, ORDER, DIVISOR, FACTOR, "weight_scale_inv", "weight_scale", "input_scale", "input_zero_point",
    "input_global_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale",
)  # fmt: skip
"""Leaves that describe a stored weight or what is quantized beside it; none is a tensor of the float model."""
BLOCKS, EXPONENTS = "_blocks", "_scales"
"""After the name of experts in MXFP4: codes (experts, rows, groups, 16), exponents (experts, rows, groups)."""
_NOT_FINITE = "values are NaN or infinite"


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise FormatError for a norm or bias with NaN or infinity. It is small, and of every output.

    A single number may be infinite: it is a bound that nothing meets, as those that Gemma 4 clips inputs to.
    """
    if tensor.ndim > 1 or not tensor.is_floating_point():
        return
    values = tensor.float()
    wrong = values.isnan() if tensor.ndim == 0 else ~values.isfinite()
    if bool(wrong.any()):
        raise FormatError(f"{name} cannot be read: its {_NOT_FINITE}.")


class Source:
    """The tensors of a folder by name, as the float model has them.

    Args:
        files: Its safetensors files, opened or not.
        quantization: The `quantization_config` of its config.json, or None.

    Raises:
        FormatError: A file is absent, truncated or corrupt.
        NotSupportedError: The checkpoint was quantized in a way that is not read.
    """

    def __init__(self, files: Iterable[Path | TensorFile], quantization: dict[str, Any] | None = None) -> None:
        self._files: dict[str, TensorFile] = {}
        for each in files:
            file = each if isinstance(each, TensorFile) else TensorFile(each)
            self._files |= dict.fromkeys(file.names, file)
        self._tile, self._fp4 = tile_of(quantization), fp4_dtype(quantization)
        self._bits = bits_of(quantization)
        self._claimed = Claimed.of(quantization, str(method_of({"quantization_config": quantization})))
        self._quantized = quantization is not None
        # Of a program whose parts have names of their own, nothing else is codes.
        encoding = ENCODINGS.get(str((quantization or {}).get("quant_method")))
        self._has_encoding = encoding is not None
        weights = [] if encoding is None else encoding(self._files, quantization or {})
        self._encoded = {weight.name: weight for weight in weights}
        self._first = {weight.parts[CODES]: weight.name for weight in weights}
        self._parts = set(self.owners())
        transforms = (quantization or {}).get("transform_config") or {}
        self._transforms = tuple(f"{group}_" for group in transforms.get("config_groups") or {})
        for name in self.names() if self._quantized else ():
            if name not in self._encoded:
                self._require_parts(name)

    def names(self) -> Iterator[str]:
        """Names of the float tensors."""
        for name in self._files:
            parent, _, leaf = name.rpartition(".")
            if not self._quantized:
                yield name
            elif self._has_encoding:
                if name not in self._parts or name in self._first:
                    yield self._first.get(name, name)
            elif leaf == PACKED:
                yield f"{parent}.weight"
            elif name.endswith(BLOCKS) and self._sibling(name, BLOCKS, EXPONENTS):
                yield name.removesuffix(BLOCKS)
            elif (
                leaf not in PARTS
                and not self._is_scale(name)
                # The matrices of rotations, which compressed-tensors stores beside a layer.
                and not parent.rpartition(".")[2].startswith(self._transforms)
            ):
                yield name

    def owners(self) -> dict[str, str]:
        """Name of a stored tensor -> the float tensor that it is a part of, where an encoding says so."""
        return {part: name for name, weight in self._encoded.items() for part in weight.parts.values()}

    def meta(self, name: str) -> torch.Tensor:
        """Dtype and shape of a tensor as it is stored, on the meta device."""
        return self._files[name].meta(name)

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        return self._raw(name)

    def metas(self) -> dict[str, torch.Tensor]:
        """Dtype and shape of all tensors as they are stored, on the meta device."""
        return {name: file.meta(name) for name, file in self._files.items()}

    def dtype(self) -> torch.dtype:
        """That of the first float tensor."""
        wide = (file.meta(name).dtype for name, file in self._files.items() if name not in self._parts)
        return next((d for d in wide if d.is_floating_point and d.itemsize > 1), torch.float32)

    def is_coded(self, name: str) -> bool:
        """Return True where a float tensor is stored in codes."""
        return self._form(name) != "plain"

    def is_wide(self, name: str) -> bool:
        """Return True where a tensor is stored in floats of more than a byte, which are values and no codes."""
        dtype = self.meta(name).dtype
        return dtype.is_floating_point and dtype.itemsize > 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a float tensor. Raises FormatError for one that is not there."""
        form, parent = self._form(name), name.rpartition(".")[0]
        if form == "encoded":
            return self._encoded[name].shape
        if form == "blocks":
            experts, rows, groups, size = self._blocks(name).shape
            return experts, 2 * groups * size, rows
        if form == "packed":
            shape, scale = f"{parent}.{SHAPE}", self._scale_name(name)
            said = self._raw(shape) if shape in self._files else None
            if said is not None and (said.ndim != 1 or said.is_floating_point()):
                raise FormatError(f"{shape} is {dtype_name(said.dtype)} of shape {tuple(said.shape)}, and no shape.")
            return float_shape(self.meta(f"{parent}.{PACKED}"), said, self.meta(scale) if scale else None)
        stored = self._there(name)
        return float_shape(stored) if form == "coded" and stored.dtype == self._fp4 else tuple(stored.shape)

    def read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], index: int | None = None) -> torch.Tensor:
        """A float tensor, or one entry of its first axis.

        Args:
            name: One of `names()`.
            dtype, shape: What the model needs of the whole tensor.
            index: Of the entry.

        Raises:
            FormatError: It has another shape, lacks its scale, or is a norm or bias that is not finite.
        """
        form = self._form(name)
        if form == "packed":
            if f"{name.rpartition('.')[0]}.{SHAPE}" in self._files:
                self._require_shape(name, shape)
            return self._decode(name, shape, dtype)
        if form != "blocks":
            self._require_shape(name, shape)
        if form == "encoded":
            return self._encoded[name].read(self._files, dtype, index)
        if form == "plain":
            stored = self._raw(name)
            check_finite(name, stored)
            return (stored if index is None else stored[index]).to(dtype)
        if len(shape) == 2:
            return self._decode(name, shape, dtype)
        if form == "blocks":
            self._require_shape(name, shape)
        read = self._read_blocks if form == "blocks" else self._decode
        if index is not None:
            return read(name, shape[1:], dtype, index)
        out = torch.empty(shape, dtype=dtype)
        for i in range(shape[0]):
            out[i] = read(name, shape[1:], dtype, i)
        return out

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise FormatError where a float tensor has another shape than the model needs."""
        if (there := self.shape(name)) != shape:
            raise FormatError(f"{name} has shape {there} in the checkpoint; the model needs {shape}.")

    def float(self, name: str) -> torch.Tensor:
        """A float tensor in float32. Raises as `read`."""
        return self.read(name, torch.float32, self.shape(name))

    def release(self, name: str) -> None:
        """Give back the memory of what `read` mapped."""
        parent = name.rpartition(".")[0]
        codes = [self._encoded[name].parts[CODES]] if name in self._encoded else []
        for stored in (name, f"{parent}.{PACKED}", f"{name}{BLOCKS}", *codes):
            if stored in self._files:
                self._files[stored].release(stored)

    def _form(self, name: str) -> str:
        """How a float tensor is stored.

        "plain", "coded" beside a scale, "packed", in "blocks" of all experts, or "encoded" as its program does it.
        """
        if name in self._encoded:
            return "encoded"
        if not self._quantized or self._has_encoding:
            return "plain"
        if f"{name.rpartition('.')[0]}.{PACKED}" in self._files and name.endswith(".weight"):
            return "packed"
        if name not in self._files:
            return "blocks" if f"{name}{BLOCKS}" in self._files else "plain"
        coded = self.meta(name).dtype.itemsize == 1 and (name.endswith(".weight") or self._scale_name(name))
        return "coded" if coded else "plain"

    def _scale_name(self, name: str) -> str | None:
        known = [name + scale for scale in SCALES]
        if name.endswith(".weight"):
            known += [name.removesuffix("weight") + leaf for leaf in BESIDE]
        return next((scale for scale in known if scale in self._files), None)

    def _require_parts(self, name: str) -> None:
        """Raise FormatError for codes without what scales them, for parts of another type than their program writes,
        and for integers in the place of values.
        """
        form = self._form(name)
        if form == "plain":
            self._require_values(name)
        elif form == "blocks":
            for part in (f"{name}{end}" for end in (BLOCKS, EXPONENTS)):
                require_type(part, self._there(part).dtype, (torch.uint8,), "bytes of MXFP4")
        else:
            self._require_codes(name, form == "packed")

    def _require_codes(self, name: str, packed: bool) -> None:
        """Raise FormatError as `_require_parts` does, for codes that have a scale."""
        parent = name.rpartition(".")[0]
        coded = f"{parent}.{PACKED}" if packed else name
        scale = self._scale_name(name) or name + SCALES[1 if packed else 0]
        codes = self._there(coded).dtype
        require_type(coded, codes, self._claimed.packed() if packed else self._claimed.codes(), "codes")
        twice = any(f"{parent}.{leaf}" in self._files for leaf in (DIVISOR, FACTOR))
        if codes == torch.uint8 and not packed and name.endswith(".weight"):
            self._there(f"{parent}.{FACTOR}")  # two FP4 in a byte, whose scales in FP8 have a scale
        wanted = self._claimed.scales(codes, packed, twice)
        require_type(scale, self._there(scale).dtype, wanted, "scales of such codes")
        for leaf, kinds in BESIDE_TYPES.items() if name.endswith(".weight") else ():
            if (part := f"{parent}.{leaf}") in self._files:
                require_type(part, self.meta(part).dtype, kinds, leaf)

    def _require_values(self, name: str) -> None:
        """Raise FormatError for integers in the place of values, and for values beside a scale that codes have."""
        if name not in self._files or not name.endswith((".weight", ".bias")):
            return
        dtype = self.meta(name).dtype
        # Where nothing scales them, numbers of a byte are values but beside those of a program with parts of its own.
        if not dtype.is_floating_point or (self._has_encoding and dtype.itemsize == 1):
            raise FormatError(f"{name} has the type {dtype_name(dtype)}, and nothing says how to decode it.")
        scale = name + {"fp8": SCALES[0], "modelopt": SCALES[1]}.get(self._claimed.method, "")
        if scale != name and name.endswith(".weight") and scale in self._files:
            raise FormatError(f"{name} holds {dtype_name(dtype)}, and {scale} scales codes.")

    def _there(self, name: str) -> torch.Tensor:
        """Dtype and shape of a stored tensor. Raises FormatError for one that is not there."""
        if name not in self._files:
            raise FormatError(f"The checkpoint has no tensor {name}, which its other tensors need.")
        return self.meta(name)

    def _is_scale(self, name: str) -> bool:
        """Return True where a tensor is the scale, or the exponents, of another one that is stored in codes."""
        parent, _, leaf = name.rpartition(".")
        of = [name.removesuffix(end) for end in SCALES if name.endswith(end)]
        of += [f"{parent}.weight"] if leaf in BESIDE else []
        coded = any(other in self._files and self.meta(other).dtype.itemsize == 1 for other in of)
        return coded or (name.endswith(EXPONENTS) and self._sibling(name, EXPONENTS, BLOCKS))

    def _sibling(self, name: str, end: str, other: str) -> bool:
        return name.removesuffix(end) + other in self._files

    def _raw(self, name: str) -> torch.Tensor:
        self._there(name)
        return self._files[name].read(name)

    def _blocks(self, name: str) -> torch.Tensor:
        stored, exponents = self._raw(f"{name}{BLOCKS}"), self._raw(f"{name}{EXPONENTS}")
        if stored.ndim != 4 or stored.shape[:3] != exponents.shape:
            raise FormatError(
                f"{name}: blocks of shape {tuple(stored.shape)} and exponents of {tuple(exponents.shape)} do not "
                "belong together."
            )
        return stored

    def _read_blocks(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> torch.Tensor:
        """The weight of one expert, (in, out): the transposed of what lies in blocks."""
        blocks, exponents = self._blocks(name)[index], self._raw(f"{name}{EXPONENTS}")[index]
        return decode(StoredCodes(name, blocks.flatten(1), exponents, packed=True), shape[::-1], dtype).t()

    def _decode(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, index: int | None = None) -> torch.Tensor:
        parent = name.rpartition(".")[0]
        weight, packed = name.endswith(".weight"), self._form(name) == "packed"
        stored = self._raw(f"{parent}.{PACKED}" if packed else name)
        scale = self._raw(self._scale_name(name) or name + SCALES[0])
        if index is not None:
            stored, scale = stored[index], scale[index] if len(scale) == len(stored) else scale
        leaves = (ZERO, ORDER, DIVISOR, FACTOR) if weight else ()
        found = {leaf: self._raw(f"{parent}.{leaf}") for leaf in leaves if f"{parent}.{leaf}" in self._files}
        if weight:
            self._check_live(parent)
        fp4 = not packed and stored.dtype == self._fp4
        # The scales of FP4 lie in another grid than the one that the config names, and always in a whole one.
        codes = StoredCodes(
            parent if weight else name, stored, scale, packed or fp4, found.get(ZERO), found.get(ORDER),
            found.get(DIVISOR), found.get(FACTOR), Tile() if fp4 else self._tile, self._bits,
        )  # fmt: skip
        return decode(codes, shape, dtype)

    def _check_live(self, layer: str) -> None:
        """Raise FormatError where a scale of what runs through a layer is no scale: it is passed over, but damaged."""
        for name in (f"{layer}.{leaf}" for leaf in LIVE if f"{layer}.{leaf}" in self._files):
            if bool((scales(name, self._raw(name)) < 0).any()):
                raise FormatError(f"{name} cannot be read: a scale is negative.")
