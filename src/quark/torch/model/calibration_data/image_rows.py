"""Which images belong to which text of a batch, where a model takes those of all texts in a row.

tokens of image i = patches_i / merged          merged: patches of all images / placeholders in all texts
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from quark.errors import CalibrationError

OF_KIND = {
    "image": ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    "audio": ("input_features", "input_features_mask", "feature_attention_mask", "audio_attention_mask"),
}
"""What a model takes of each kind: rows are images (or patches of images), videos, recordings."""


def items_of_rows(
    named: Mapping[str, Any], count: int, placeholders: Mapping[str, int]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Of the images, videos and recordings of a batch of texts: those of each text, by the names of the arguments.

    Args:
        named: The batch.
        count: How many texts it has.
        placeholders: Kind -> the token that stands in a text for what the model makes of one.

    Raises:
        CalibrationError: The placeholders in the texts do not say it.
    """
    ids = named.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return
    for kind, token in placeholders.items():
        tensors = {name: x for name in OF_KIND[kind] if isinstance(x := named.get(name), torch.Tensor)}
        if not tensors:
            continue
        tokens = (ids == token).sum(1).tolist()
        grid = tensors.get(f"{kind}_grid_thw")
        items = len(next(iter(tensors.values()))) if grid is None else len(grid)
        if items == count and all(tokens):
            shares = [1] * count  # each text has one at least
        else:
            sizes = [1] * items if grid is None else grid.prod(1).tolist()
            shares = _shares(kind, tokens, sizes)
        for name, x in tensors.items():
            patches = grid is not None and len(x) != items
            yield name, _parts(x, _patches(shares, grid) if patches else shares)


def _shares(kind: str, tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """How many items each text has, from its placeholders and the sizes of the items, which come in its order."""
    shares, item = [], 0
    for mine in tokens:
        first, size = item, 0
        while item < len(sizes) and size * sum(tokens) < mine * sum(sizes):
            size += sizes[item]
            item += 1
        if size * sum(tokens) != mine * sum(sizes):
            raise CalibrationError(
                f"The texts of a batch are of unequal length, and which {kind}s belong to which cannot be seen: they "
                f"hold {', '.join(map(str, tokens))} placeholders, for {len(sizes)}. Possible: batches of one sample."
            )
        shares.append(item - first)
    return shares


def _patches(shares: Sequence[int], grid: torch.Tensor | None) -> list[int]:
    """How many patches each text has."""
    sizes = [] if grid is None else [math.prod(one) for one in grid.tolist()]
    bounds = itertools.accumulate(shares, initial=0)
    return [sum(sizes[first:last]) for first, last in itertools.pairwise(bounds)]


def _parts(x: torch.Tensor, shares: Sequence[int]) -> list[torch.Tensor | None]:
    """Rows of a tensor, as many as each text has; None for a text without."""
    return [part if len(part) else None for part in torch.split(x, list(shares))]
