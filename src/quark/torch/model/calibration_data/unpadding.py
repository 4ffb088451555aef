"""Takes the padding out of a batch, so that masked positions count nowhere: no layer ever sees one.

    input_ids       a b c . .        attention_mask  1 1 1 0 0        ->   [a b c], then [d e f g h]
                    d e f g h                        1 1 1 1 1

A mask says which positions are real. What it belongs to is cut to them, and samples of unequal length run one after the
other, as the same samples without padding would. So every statistic, loss and metric is that of the bare samples, to
the bit, whatever it is and whatever layer it looks at: second moments, ranges, what experts and a cache of keys read.

    attention_mask (batch, length), or (batch, heads, queries, keys), and the same of another part of a model after a
    prefix: decoder_attention_mask, qformer_attention_mask; pixel_mask and pixel_attention_mask of images; X_mask beside
    X; -100 after the last label of a model with a decoder; src_key_padding_mask of torch, which is True at padding

A sample keeps the place of its first position in the positions that it is given; a model that is given none counts
from the first real token. Features that a mask cannot shorten stay whole: the encoder of Whisper takes 30 seconds and
reads all of them, so all of them count.

Where a model takes the images of all texts in a row, it is found which belong to which text:

    tokens of image i = patches_i / merged          merged: patches of all images / placeholders in all texts
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quark.errors import CalibrationError
from quark.torch.model.calibration_data.model_arguments import ModelArguments

ATTENTION, KEY_PADDING, DECODER = "attention_mask", "key_padding_mask", "decoder_"
_POSITIONS = "position_ids"
_IGNORED = -100
"""The label at a position that no loss counts."""
_MASKED = -9e3
"""A value that is added to scores and is not above this masks: -1e4 rounded to bfloat16, and all that is lower."""
_OTHER_INPUTS = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values")
"""Beginnings of names of what a mask of text does not belong to."""


@dataclass(frozen=True)
class PaddedAxis:
    """One axis along which a batch is padded.

    Attributes:
        mask: Name of the mask, or of what else says it.
        real: Which positions of each sample are real, (batch, length) bool.
        axes: Name of a tensor -> its axes that are cut; what lies on them after the last position of the mask stays.
        is_main: Whether a sample without a real position is none at all; else it has nothing on this side.
        positions: Name of what gives the positions; None where their order has no meaning.
    """

    mask: str
    real: torch.Tensor
    axes: Mapping[str, tuple[int, ...]]
    is_main: bool = True
    positions: str | None = None


def unpadded(batch: Any, arguments: ModelArguments) -> list[Any]:
    """A batch without its padding: itself where nothing is masked, else one batch for each length.

    Args:
        batch: A tensor, a mapping of arguments by name, or a tuple or list of arguments.
        arguments: What the model takes.

    Returns:
        Batches of the same form. Samples stay together where all are of one length; samples of which nothing is real
        are left out. A batch stays whole where the model is a graph that takes no other length: see `real_positions`.

    Raises:
        CalibrationError: The mask of a text is of another length, has a gap, or the samples cannot be told apart.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 1 and _is_mapping(batch[0]):
        batch = batch[0]
    named = _by_argument(batch, arguments.names)
    sides = _masked(_sides(named, arguments.has_decoder))
    if not sides:
        return [batch]
    if _is_fixed(named, sides, arguments):
        return [batch]
    _refuse_gaps(named, sides)
    found = _cut(named, sides, arguments)
    return found if _is_mapping(batch) else [type(batch)(one[name] for name in named) for one in found]


def real_positions(batch: Any, arguments: ModelArguments) -> list[torch.Tensor]:
    """Which positions of the samples are real, of each part of a batch that stays whole: (batch, length) bool, CPU."""
    named = _by_argument(batch, arguments.names) if arguments.fixed else {}
    sides = _masked([side for side in _sides(named, arguments.has_decoder) if side.is_main])
    return [side.real for side in sides] if sides and _is_fixed(named, sides, arguments) else []


def _is_fixed(named: Mapping[str, Any], sides: Sequence[PaddedAxis], arguments: ModelArguments) -> bool:
    """Return True where the batch would have to be cut along an axis that the model takes one length of."""
    axes = {(name, axis) for side in sides for name, own in side.axes.items() for axis in own}
    if not _equally_masked(sides):
        axes |= {(name, 0) for name in named}
    return any(axis in arguments.fixed.get(name, ()) for name, axis in axes)


def _equally_masked(sides: Sequence[PaddedAxis]) -> bool:
    """Return True where the same positions are real in all samples."""
    return all(bool((side.real == side.real[:1]).all()) for side in sides)


def nothing_masked(batch: Any, arguments: ModelArguments) -> torch.Tensor | None:
    """Return True where a batch has no padding: one truth value on the device of its masks; None without masks."""
    whole = [side.real.all() for side in _sides(_by_argument(batch, arguments.names), arguments.has_decoder)]
    return torch.stack([flag.to(whole[0].device) for flag in whole]).all() if whole else None


def _masked(sides: Sequence[PaddedAxis]) -> list[PaddedAxis]:
    """The sides on which something is masked, on the CPU; a device is waited for where there are any."""
    here = [replace(side, real=side.real.cpu()) for side in sides]
    return [side for side in here if not bool(side.real.all())]


def _is_mapping(batch: Any) -> bool:
    return isinstance(batch, Mapping) or hasattr(batch, "keys")


def _by_argument(batch: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The arguments by name; empty where their names are not known."""
    if _is_mapping(batch):
        return {key: batch[key] for key in batch.keys()}  # noqa: SIM118 (BatchEncoding)
    if isinstance(batch, (tuple, list)) and names is not None and len(batch) <= len(names):
        return dict(zip(names, batch, strict=False))
    return {}


def _sides(named: Mapping[str, Any], has_decoder: bool) -> list[PaddedAxis]:
    """Where the batch is padded, as its masks say."""
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    prefixes = [name.removesuffix(ATTENTION) for name in tensors if name.endswith(ATTENTION)]
    has_decoder = has_decoder or any(name.startswith(DECODER) for name in tensors)
    sides = [side for prefix in prefixes if (side := _attended(tensors, prefix, prefixes, has_decoder))]
    if has_decoder and DECODER not in prefixes and getattr(tensors.get("labels"), "ndim", 0) == 2:
        sides.append(_labelled(tensors))
    return [*sides, *_of_images(tensors), *_of_keys(tensors), *_of_features(tensors)]


def _real(mask: torch.Tensor) -> torch.Tensor:
    """Which positions a mask of two to four dimensions lets be read: (batch, length) bool."""
    if mask.ndim == 2:
        return mask != 0
    keys = mask.flatten(1, -2)
    is_read = keys != 0
    if mask.is_floating_point():  # 1 and 0, or what is added to scores: 0 and something very low
        is_read = torch.where((mask < 0).any(), keys > _MASKED, is_read)
    return is_read.any(1)


def _attended(
    tensors: Mapping[str, torch.Tensor], prefix: str, prefixes: Sequence[str], has_decoder: bool
) -> PaddedAxis | None:
    """The side of an attention mask; None where nothing in the batch has its length."""
    name = prefix + ATTENTION
    mask = tensors[name]
    if not 2 <= mask.ndim <= (2 if prefix not in ("", DECODER) else 4):
        return None
    text = next((key for key in (f"{prefix}input_ids", f"{prefix}inputs_embeds") if key in tensors), None)
    real = _real(mask)
    if text is not None and len(real) == 1:  # one mask for all samples
        real = real.expand(len(tensors[text]), -1)
    own = _of_part(tensors, prefix, prefixes, has_decoder)
    axes = {key: found for key in own if key != name and (found := _axes(key, tensors[key], real))}
    if text is not None and text not in axes and not real.all():
        raise CalibrationError(
            f"{name} is {tuple(mask.shape)} and {text} {tuple(tensors[text].shape)}, so it cannot be seen which tokens "
            "are padding. Possible: a mask of the same batch and length."
        )
    if not axes:
        return None
    axes[name] = _own_axes(mask, real.shape[1])
    positions = f"{prefix}{_POSITIONS}"
    if _are_joint(tensors, axes, real.shape[1]):
        axes[positions := _POSITIONS] = (0,)
    return PaddedAxis(name, real, axes, prefix in ("", DECODER), positions)


def _are_joint(tensors: Mapping[str, torch.Tensor], cut: Container[str], length: int) -> bool:
    """Return True where the positions are those of the text and then of the picture, as a denoiser has them (Krea 2).

    Args:
        tensors: Name -> tensor of the batch; hidden_states are of the picture, encoder_hidden_states of the text.
        cut: Names of those that a mask cuts.
        length: Of the mask.
    """
    positions, picture = tensors.get(_POSITIONS), tensors.get("hidden_states")
    if positions is None or picture is None or "encoder_hidden_states" not in cut or "hidden_states" in cut:
        return False
    return positions.ndim == 2 and picture.ndim == 3 and len(positions) == length + picture.shape[1]


def _of_part(tensors: Mapping[str, torch.Tensor], prefix: str, prefixes: Sequence[str], has_decoder: bool) -> list[str]:
    """The tensors of the part of a model that a prefix stands for: without one, all that are of no other part."""
    if prefix:
        others: tuple[str, ...] = ()
    else:
        others = (*filter(None, prefixes), DECODER, "encoder_", *(_OTHER_INPUTS if "input_ids" in tensors else ()))
    own = [key for key in tensors if key != "labels" and key.startswith(prefix) and not key.startswith(others)]
    has_labels = "labels" in tensors and prefix == (DECODER if has_decoder else "")
    return [*own, "labels"] if has_labels else own


def _own_axes(mask: torch.Tensor, length: int) -> tuple[int, ...]:
    """The axes of a mask along which the positions lie that it says something of: of queries and keys, both."""
    return (1,) if mask.ndim == 2 else tuple(a for a in (mask.ndim - 2, mask.ndim - 1) if mask.shape[a] == length)


def _axes(name: str, x: torch.Tensor, real: torch.Tensor) -> tuple[int, ...]:
    """The axes of a tensor that are as long as a mask."""
    batch, length = real.shape
    if name.endswith("position_ids") and x.shape[-1] == length and x.shape[:-1] in ((), (1,), (3, batch), (4, batch)):
        return (x.ndim - 1,)
    if x.shape[:2] == real.shape:
        return (1, 2) if "mask" in name and x.ndim == 3 and x.shape[2] == length else (1,)
    if "mask" in name and x.ndim == 4 and x.shape[0] in (1, batch):
        return tuple(axis for axis in (2, 3) if x.shape[axis] == length)
    return ()


def _labelled(tensors: Mapping[str, torch.Tensor]) -> PaddedAxis:
    """The side of a decoder that has no mask: it is padded after the last label that counts."""
    counts = tensors["labels"] != _IGNORED
    real = counts.flip(1).cumsum(1).flip(1) > 0
    own = {name: x for name, x in tensors.items() if name.startswith(DECODER) or name == "labels"}
    return PaddedAxis("labels", real, {name: axes for name, x in own.items() if (axes := _axes(name, x, real))})


def _of_keys(tensors: Mapping[str, torch.Tensor]) -> Iterator[PaddedAxis]:
    """The sides of masks of torch's own attention, which say True, or what is added to scores, where padding is."""
    for name, mask in tensors.items():
        if not name.endswith(KEY_PADDING) or mask.ndim != 2:
            continue
        real = mask > _MASKED if mask.is_floating_point() else mask == 0
        stem = name.removesuffix(KEY_PADDING).rstrip("_")
        axes = {key: (1,) for key, x in tensors.items() if key.startswith(stem) and x.shape[:2] == mask.shape}
        if len(axes) > 1:
            yield PaddedAxis(name, real, axes, positions="position_ids")


def _of_images(tensors: Mapping[str, torch.Tensor]) -> list[PaddedAxis]:
    """The sides of images that are padded to the largest, and of samples with fewer images than others."""
    images = tensors.get("pixel_values")
    for name in ("pixel_mask", "pixel_attention_mask"):
        mask = tensors.get(name)
        if images is None or mask is None or mask.ndim not in (3, 4) or images.ndim != mask.ndim + 1:
            continue
        if (*images.shape[: mask.ndim - 2], *images.shape[-2:]) != tuple(mask.shape):
            continue
        real, spatial = mask != 0, range(1, mask.ndim)
        sides = []
        for axis in spatial:
            others = [other for other in spatial if other != axis]
            place = axis if axis == 1 and mask.ndim == 4 else axis + 1
            sides.append(PaddedAxis(name, real.amax(others), {name: (axis,), "pixel_values": (place,)}, is_main=False))
        return sides
    return []


def _of_features(tensors: Mapping[str, torch.Tensor]) -> Iterator[PaddedAxis]:
    """The side of features of sounds that are padded to the longest."""
    name = "input_features"
    features, mask = tensors.get(name), tensors.get(f"{name}_mask")
    if features is not None and mask is not None and mask.ndim == 2 and features.shape[:2] == mask.shape:
        yield PaddedAxis(f"{name}_mask", _real(mask), {f"{name}_mask": (1,), name: (1,)}, is_main=False)


def _refuse_gaps(named: Mapping[str, Any], sides: Iterable[PaddedAxis]) -> None:
    """Raise CalibrationError for padding between real positions, which would come nearer to each other."""
    for side in sides:
        starts = side.real.int().diff(dim=1, prepend=torch.zeros(len(side.real), 1, dtype=torch.int)) == 1
        gaps = (starts.sum(1) > 1).nonzero()[:, 0].tolist()
        if gaps and side.positions is not None and named.get(side.positions) is None:
            raise CalibrationError(
                f"{side.mask}: sample {gaps[0]} has masked positions between real ones. Cut out, the others would "
                f"come nearer to each other. Possible: padding at the ends alone, or {side.positions} beside it."
            )


def _cut(named: Mapping[str, Any], sides: Sequence[PaddedAxis], arguments: ModelArguments) -> list[dict[str, Any]]:
    """The samples, each cut to its real positions; all together where they are equally long."""
    count = len(sides[0].real)
    if any(len(side.real) != count for side in sides):
        sizes = ", ".join(f"{side.mask} {len(side.real)}" for side in sides)
        raise CalibrationError(f"Masks have different numbers of samples: {sizes}. Possible: one for each sample.")
    kept = [row for row in range(count) if all(bool(side.real[row].any()) for side in sides if side.is_main)]
    if not kept or _equally_masked(sides):
        return [_sample(named, sides, 0)] if kept else []
    apart = _rows_by_argument(named, sides, count, arguments)
    return [_sample({name: values[row] for name, values in apart.items()}, sides, row) for row in kept]


def _sample(named: Mapping[str, Any], sides: Sequence[PaddedAxis], row: int) -> dict[str, Any]:
    """Arguments at the real positions of a sample; without those of which nothing is real."""
    sample = dict(named)
    for side in sides:
        is_there = bool(side.real[row].any())
        for name in side.axes.keys() & sample.keys():
            if is_there:
                sample[name] = _at_real(sample[name], side.real[row], side.axes[name])
            else:
                del sample[name]
    return sample


def _at_real(x: torch.Tensor, real: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
    """A tensor at real positions along some axes; a view where they follow each other."""
    for axis in axes:
        after = real.new_ones(x.shape[axis] - len(real))
        places = torch.cat([real, after]).nonzero()[:, 0]
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            x = x.narrow(axis, first, len(places))
        else:
            x = x.index_select(axis, places.to(x.device))
    return x


def _rows_by_argument(
    named: Mapping[str, Any], sides: Sequence[PaddedAxis], count: int, arguments: ModelArguments
) -> dict[str, Sequence[Any]]:
    """Name of an argument -> that of each sample.

    Raises:
        CalibrationError: A tensor has no row for each of them.
    """
    cut = {name for side in sides for name in side.axes}
    shared = {name for side in sides for name, axes in side.axes.items() if axes == (0,)}
    of_items = dict(_items_of_rows(named, count, arguments.placeholders))
    return {
        name: [value] * count
        if name in shared
        else of_items[name]
        if name in of_items
        else _rows_of(name, value, count, name in cut)
        for name, value in named.items()
    }


def _rows_of(name: str, value: Any, count: int, is_cut: bool) -> Sequence[Any]:
    """The rows of an argument, one for each sample; for each the whole of it, where samples share it."""
    if isinstance(value, (list, tuple)) and len(value) == count:
        return [type(value)([item]) for item in value]
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return [value] * count
    axis = 1 if is_cut and name.endswith("position_ids") and value.ndim == 3 else 0
    if value.shape[axis] == count:
        return [value.narrow(axis, row, 1) for row in range(count)]
    if is_cut and (value.ndim == 1 or value.shape[axis] == 1):
        return [value] * count
    raise CalibrationError(
        f"The samples of a batch are of unequal length, and {name} {tuple(value.shape)} has no row for "
        f"each of its {count}, so they cannot be told apart. Possible: batches of one sample."
    )


# Rows of images -------------------------------------------------------------------------------------------------------


_OF_KIND = {
    "image": ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids"),
    "video": ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    "audio": ("input_features", "input_features_mask", "feature_attention_mask", "audio_attention_mask"),
}
"""The arguments of a model by kind: rows are images (or patches of images), videos, recordings."""


def _items_of_rows(
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
        tensors = {name: x for name in _OF_KIND[kind] if isinstance(x := named.get(name), torch.Tensor)}
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
            yield name, _rows_of_texts(x, _patches(shares, grid) if patches else shares)


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


def _rows_of_texts(x: torch.Tensor, shares: Sequence[int]) -> list[torch.Tensor | None]:
    """Rows of a tensor, as many as each text has; None for a text without."""
    return [part if len(part) else None for part in torch.split(x, list(shares))]
