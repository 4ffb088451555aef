"""The layers of a stored model folder, for `quark inspect`: how each is stored, in how many bits for a weight.

bits = 8 * bytes of codes, scales and zero points / weights that the layer has in the float model
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quark.errors import QuarkError
from quark.torch.checkpoint.float_model import shapes_of, stored_metas
from quark.torch.model.meta_model import build_skeleton

BIASES = ("bias",)


@dataclass(frozen=True)
class StoredLayers:
    """Layers of one name but for their numbers, stored alike.

    Attributes:
        name: With "*" in the place of each number between dots.
        count: How many.
        stored: Their tensors with dtypes, as in "qweight int32, scales float16".
        bits: For a weight, with scales and zero points; None where the float layer is not known.
        size: Bytes of all.
    """

    name: str
    count: int
    stored: str
    bits: float | None
    size: int


def stored_layers(folder: Path) -> list[StoredLayers]:
    """What holds a matrix in the weight files, in the order of the files; reads no values. Raises FormatError."""
    metas = stored_metas(folder)
    layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in metas.items():
        parent, _, leaf = name.rpartition(".")
        layers[parent][leaf] = tensor
    weights = _float_weights(folder, metas)
    found: Counter[tuple[str, str, float | None]] = Counter()
    sizes: Counter[tuple[str, str, float | None]] = Counter()
    for name, tensors in layers.items():
        if all(tensor.ndim < 2 for tensor in tensors.values()):
            continue
        size = sum(x.numel() * x.element_size() for leaf, x in tensors.items() if leaf not in BIASES)
        bits = round(8 * size / weights[name], 2) if weights.get(name) else None
        shown = ", ".join(f"{leaf} {str(x.dtype).removeprefix('torch.')}" for leaf, x in sorted(tensors.items()))
        row = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shown, bits)
        found[row] += 1
        sizes[row] += size
    return [StoredLayers(row[0], count, row[1], row[2], sizes[row]) for row, count in found.items()]


def _float_weights(folder: Path, metas: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Weights of each layer of the float model; none where transformers does not know the model."""
    try:
        model = build_skeleton(folder, shapes=shapes_of(metas))
    except QuarkError:
        return {}
    return {
        name.removesuffix(".weight"): math.prod(weight.shape)
        for name, weight in model.named_parameters(remove_duplicate=False)
        if name.endswith(".weight")
    }
