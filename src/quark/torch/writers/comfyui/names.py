"""The names that denoisers have in the checkpoints of their authors, which ComfyUI reads, by those of diffusers.

    transformer_blocks.3.attn.to_q.weight
    transformer_blocks.3.attn.to_k.weight   }   double_blocks.3.img_attn.qkv.weight, rows one after the other
    transformer_blocks.3.attn.to_v.weight
    norm_out.linear.weight                      final_layer.adaLN_modulation.1.weight, halves of its rows exchanged

Tables: `architectures.tsv` (what ComfyUI-GGUF calls an architecture in tools/convert.py, by which tensors it knows it,
and which layers its tools/lcpp.patch leaves in float) and `names.tsv`, read backwards from the functions that make
diffusers' names of the others (loaders/single_file_utils.py of diffusers 0.42.1).
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from quark.errors import FormatError, NotSupportedError

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""The prefixes in whole checkpoints before the names of the denoiser."""
SWAP, SWAP_IN_LAST = "swap", "swap_in_last"
NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class DenoiserKind:
    """A row of architectures.tsv.

    Attributes:
        name: Of the row.
        gguf: `general.architecture` in a GGUF file.
        class_name: In diffusers; "" where its names are not known here.
        table: Rows of names.tsv; "" for none.
        same: Whether a name without a row is the same in both.
        keys: Tensors by which a file with original names is known.
        float_parts: Parts of names of tensors that stay in float.
        single: Parts of names of tensors that readers take in float32 alone.
        source: Who says which layers stay in float.
    """

    name: str
    gguf: str
    class_name: str
    table: str
    same: bool
    keys: tuple[str, ...]
    float_parts: tuple[str, ...]
    single: tuple[str, ...]
    source: str

    @property
    def is_unet(self) -> bool:
        """True where blocks of unlike kinds are counted through, as in Stable Diffusion."""
        return self.table == "unet"

    def stays_float(self, name: str) -> bool:
        """Return True where a tensor, by its original name, is none that is quantized."""
        return not name.endswith(".weight") or any(part in name for part in (*self.float_parts, *self.single))


@dataclass(frozen=True)
class OriginalTensor:
    """A tensor under the name of the authors.

    Attributes:
        name: There.
        parts: Names in the source, whose rows follow one another.
        swapped: Whether the two halves of the rows change places.
    """

    name: str
    parts: tuple[str, ...]
    swapped: bool = False

    def like(self, metas: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Shape and dtype, on the meta device. Raises FormatError where parts do not go under one another."""
        first = metas[self.parts[0]]
        for part in self.parts:
            if (metas[part].shape[1:], metas[part].dtype) != (first.shape[1:], first.dtype):
                raise FormatError(
                    f"{self.name}: {part} is {metas[part].dtype} {tuple(metas[part].shape)}, which is not joined to "
                    f"{self.parts[0]}, {first.dtype} {tuple(first.shape)}."
                )
        rows = sum(metas[part].shape[0] for part in self.parts) if first.ndim else 0
        return torch.empty((rows, *first.shape[1:]) if first.ndim else (), dtype=first.dtype, device="meta")

    def of(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The tensor, made of its parts."""
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return torch.cat(whole.chunk(2)[::-1]) if self.swapped else whole


def _table(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@cache
def kinds() -> tuple[DenoiserKind, ...]:
    """The architectures, in the order in which a file is compared with them."""
    return tuple(
        DenoiserKind(
            row["name"], row["gguf"], row["class"], row["table"], row["rest"] == "same",
            tuple(row["keys"].split()), tuple(row["float"].split()), tuple(row["single"].split()), row["source"],
        )
        for row in _table("architectures.tsv")
    )  # fmt: skip


@cache
def _name_patterns(table: str) -> tuple[tuple[re.Pattern[str], str, str], ...]:
    """Pattern of a name in diffusers, the original name, and what changes."""
    found = [row for row in _table("names.tsv") if row["table"] == table]
    # Numbers in a name, and after it the end that is equal in both: `.weight`, or none.
    names = [re.escape(row["diffusers"]).replace(r"\{\}", r"(\d+)") + r"(\.weight|\.bias)?" for row in found]
    return tuple((re.compile(name), row["original"], row["change"]) for name, row in zip(names, found, strict=True))


def kind_of_file(names: Iterable[str]) -> DenoiserKind:
    """The architecture of a file with original names. Raises NotSupportedError."""
    known = set(names)
    found = next((kind for kind in kinds() if all(key in known for key in kind.keys)), None)
    if found is None:
        raise NotSupportedError(
            "The names of these tensors belong to none of the known denoisers. Possible: "
            f"{', '.join(kind.name for kind in kinds())}; or a folder of diffusers."
        )
    return found


def kind_of_class(class_name: str, names: Iterable[str]) -> DenoiserKind:
    """The architecture of a class of diffusers, by its tensors where a class has several. Raises NotSupportedError."""
    found = [kind for kind in kinds() if kind.class_name == class_name]
    if not found:
        raise NotSupportedError(
            f"{class_name}: the names that its tensors have in ComfyUI are not known here. Possible: "
            f"{', '.join(sorted({kind.class_name for kind in kinds() if kind.class_name}))}; or a file with the names "
            "of the authors."
        )
    if len(found) == 1:
        return found[0]
    labels = any(name.startswith(("add_embedding.", "class_embedding.")) for name in names)
    return next(kind for kind in found if (kind.name == "sdxl") == labels)


def without_prefix(names: Iterable[str]) -> dict[str, str]:
    """Name of each tensor of a denoiser -> its name in the file; what else a whole checkpoint holds is left out."""
    names = list(names)
    prefix = next((prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in names)), "")
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def original_tensors(kind: DenoiserKind, names: Iterable[str]) -> list[OriginalTensor]:
    """The tensors of a file for ComfyUI, of the tensors of a folder of diffusers.

    Raises:
        NotSupportedError: A tensor has no name there; nothing may be left out in silence.
        FormatError: A tensor is made of several, such as queries, keys and values, of which one is not there.
    """
    names = list(names)
    parts: dict[str, list[tuple[int, str]]] = {}
    swapped: set[str] = set()
    last = max((_number(name) for name in names if name.startswith("transformer_blocks.")), default=-1)
    down = [re.match(r"down_blocks\.0\.resnets\.(\d+)\.", name) for name in names]
    layers = 1 + max((int(match[1]) for match in down if match), default=-1)  # in a block of the way down of a UNet
    for name in names:
        found = _unet_name(name, layers, names) if kind.is_unet else _row_name(kind, name)
        if found is None:
            raise NotSupportedError(
                f"{name}: ComfyUI's name of this tensor of a {kind.class_name} is not known here. Possible: a file "
                "with the names of the authors."
            )
        original, order, change = found
        parts.setdefault(original, []).append((order, name))
        if change == SWAP or (change == SWAP_IN_LAST and _number(name) == last):
            swapped.add(original)
    _check_whole(kind, parts)
    return [
        OriginalTensor(original, tuple(name for _, name in sorted(found)), original in swapped)
        for original, found in parts.items()
    ]


def _check_whole(kind: DenoiserKind, parts: Mapping[str, list[tuple[int, str]]]) -> None:
    """Raise FormatError where a tensor is made of several, and one of them is not there.

    In the table of a UNet several names of one tensor are those of several models, of which each has one.
    """
    if kind.is_unet:
        return
    rows = _name_patterns(kind.table)
    wanted = Counter(original for _, original, _ in rows)
    for original, found in parts.items():
        order, name = found[0]
        needed = 1 if name == original else wanted[rows[order][1]]
        if len(found) < needed:
            there = ", ".join(name for _, name in found)
            raise FormatError(f"{original} needs {needed} tensors, but the file has {len(found)} of them: {there}.")


def _row_name(kind: DenoiserKind, name: str) -> tuple[str, int, str] | None:
    """The original name, the place among the parts of it, and what changes."""
    for order, (pattern, original, change) in enumerate(_name_patterns(kind.table)):
        if match := pattern.fullmatch(name):
            *numbers, end = match.groups()
            return original.format(*numbers) + (end or ""), order, change
    return (name, 0, "") if kind.same else None


def _number(name: str) -> int:
    found = NUMBER.search(name)
    return int(found[1]) if found else -1


UNET = re.compile(r"(down|mid|up)_block(?:s\.(\d+))?\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")


def _unet_name(name: str, layers: int, names: list[str]) -> tuple[str, int, str] | None:
    """The original name in a UNet, its place and its change; None of a name that is not known.

    Blocks are counted through, with a further one where the size changes.
    """
    match = UNET.fullmatch(name)
    if match is None:
        return _plain_unet_name(name)
    way, block, what, layer, rest = match[1], int(match[2] or 0), match[3], int(match[4]), match[5]
    if what == "resnets":
        found = _plain_unet_name(f"resnets.{rest}")
        if found is None:
            return None
        rest = found[0]
    if way == "mid":
        place = f"middle_block.{2 * layer if what == 'resnets' else 2 * layer + 1}"
    elif way == "down":
        sampler = what == "downsamplers"
        place = f"input_blocks.{block * (layers + 1) + (layers if sampler else layer) + 1}.{int(what == 'attentions')}"
        rest = rest.replace("conv.", "op.") if sampler else rest
    else:
        sampler = what == "upsamplers"
        after = 1 + any(other.startswith(f"up_blocks.{block}.attentions.") for other in names)
        inner = after if sampler else int(what == "attentions")
        place = f"output_blocks.{block * (layers + 1) + (layers if sampler else layer)}.{inner}"
    return f"{place}.{rest}", 0, ""


def _plain_unet_name(name: str) -> tuple[str, int, str] | None:
    for pattern, original, change in _name_patterns("unet"):
        if match := pattern.fullmatch(name):
            return original + (match.groups()[-1] or ""), 0, change
    return None
