"""preprocessing_files: what a model, or a file beside it, says about how its images are read.

metadata of the file       Image.* of ONNX, those of Ultralytics, and of OpenVINO's model API (`model_info ...`)
preprocessor_config.json   of transformers, beside the model or beside its folder `onnx`
config.json                of timm, with pretrained_cfg
model.yml                  of OpenVINO's model zoo, whose arguments are in units of 0 to 255

The first that says anything is taken. A form that cannot be carried out is an error that names the file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quark.base.data_files.images import FILTERS, Resizing
from quark.base.json_objects import plain_json
from quark.errors import FormatError
from quark.onnx.calibration.data.preprocessing import Preprocessing
from quark.onnx.graph.proto_file import read_ends

PREPROCESSOR = "preprocessor_config.json"
"""The file beside a model that says how its images are read."""
_RANGES = {"normalized_0_1": ([0.0], [1.0]), "normalized_1_1": ([0.5], [0.5]), "nominalrange_0_255": ([0.0], [1 / 255])}
"""Values of Image.NominalPixelRange -> mean and std."""
_PILLOW = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))
_CONVNEXT_WHOLE = 384
"""Size from which on transformers' ConvNext crops nothing."""
_MODEL_INFO = {"standard": "stretch", "crop": "crop", "fit_to_window": "pad", "fit_to_window_letterbox": "pad"}


def said_by_model(model: Any, resized: bool) -> Preprocessing | None:
    """Return what a model, or a file beside it, says; None where nothing does.

    Args:
        model: A path, or a model in memory, beside which there is no file.
        resized: Whether somebody else says how images are resized.

    Raises:
        FormatError: A file is no JSON object, or says what cannot be carried out.
        ConfigError: Its numbers are in other units, or make a range that no network reads.
    """
    found = _of_metadata(_metadata(model))
    if found is not None:
        return found
    for beside in folders_of(model):
        for name, read in _READERS.items():
            file = beside / name
            if file.is_file():
                try:
                    text = file.read_text("utf-8")
                    content: Any = text if name.endswith(".yml") else plain_json(text)
                    if not isinstance(content, (str, dict)):
                        raise TypeError("it is no JSON object")
                    found = read(content, str(file), resized)
                except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
                    raise FormatError(f"{file} does not say how images are read: {error!r}.") from None
                if found is not None:
                    return found
    return None


def folders_of(model: Any) -> Sequence[Path]:
    """Folders of files beside a model are: its own, and the one around a folder `onnx`. None of one in memory."""
    if not isinstance(model, (str, Path)):
        return ()
    folder = Path(model).absolute().parent
    return (folder, folder.parent) if folder.name == "onnx" else (folder,)


def _metadata(model: Any) -> Mapping[str, str]:
    if isinstance(model, ir.Model):
        return dict(model.metadata_props)
    proto = model if isinstance(model, onnx.ModelProto) else read_ends(model)
    return {entry.key: entry.value for entry in proto.metadata_props}


def _of_metadata(said: Mapping[str, str]) -> Preprocessing | None:
    if "Image.NominalPixelRange" in said or "Image.BitmapPixelFormat" in said:
        mean, std = _RANGES.get(said.get("Image.NominalPixelRange", "").lower(), (None, None))
        order = "BGR" if said.get("Image.BitmapPixelFormat", "").lower().startswith("bgr") else "RGB"
        return Preprocessing.of("the metadata of the model", mean, std, order=order)
    if said.get("author", "").lower() == "ultralytics":
        way = "crop" if said.get("task") == "classify" else "pad"
        return Preprocessing.of("Ultralytics, by the metadata", [0.0], [1.0], Resizing(way), "RGB")
    values = [said.get(f"model_info {name}", "") for name in ("mean_values", "scale_values")]
    if not any(values):
        return None
    mean, std = (_numbers(text) or [default] for text, default in zip(values, (0.0, 1.0), strict=True))
    resized = _MODEL_INFO.get(said.get("model_info resize_type", ""))
    fill = int(said.get("model_info pad_value", 0))
    corner = said.get("model_info resize_type") == "fit_to_window"
    pads = resized == "pad"
    resizing = None if resized is None else Resizing(resized, fill=fill, corner=corner) if pads else Resizing(resized)
    # The model API reads BGR.
    order = "RGB" if said.get("model_info reverse_input_channels", "").lower() in ("true", "yes", "1") else "BGR"
    return _in_255("model_info of the metadata", mean, std, resizing, order)


def _in_255(
    source: str, mean: Sequence[float], std: Sequence[float], resizing: Resizing | None, order: str
) -> Preprocessing:
    """Of a pair in units of 0 to 255."""
    return Preprocessing.of(source, [v / 255 for v in mean], [v / 255 for v in std], resizing, order)


def _of_transformers(said: Mapping[str, Any], file: str, resized: bool) -> Preprocessing | None:
    if not {"image_mean", "do_rescale", "do_resize", "do_normalize", "size"} & set(said):
        return None  # of sound, or of text
    factor = 255 * (float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else 1.0)
    # A class that does not normalize writes the numbers of its base all the same.
    normalizes = said.get("do_normalize", "image_mean" in said and "image_processor_type" not in said)
    mean, std = (_each(said["image_mean"]), _each(said["image_std"])) if normalizes else ([0.0], [1.0])
    shift = 1.0 if said.get("rescale_offset") or said.get("offset") else 0.0  # from -1 to 1, before mean and std
    mean, std = [(value + shift) / factor for value in mean], [value / factor for value in std]
    if said.get("include_top"):  # of EfficientNet, which divides once more
        std = [value * again for value, again in itertools.zip_longest(std, _each(said["image_std"]), fillvalue=std[0])]
        mean = mean * (len(std) // len(mean))
    order = "BGR" if said.get("do_flip_channel_order") else "RGB"
    return Preprocessing.of(file, mean, std, None if resized else _resizing_of_transformers(said, file), order)


def _resizing_of_transformers(said: Mapping[str, Any], file: str) -> Resizing | None:
    kind, size, crop = _filter(said.get("resample"), file), said.get("size"), _crop(said)
    if not said.get("do_resize", "size" in said):
        return None if crop is None else _cannot(file, "it crops without a size to scale to")
    # A number is a side of what is stretched, or the shorter side of what is then cropped.
    sides = None if isinstance(size, int) and crop is not None else _size(size)
    if sides is not None:
        return _to(sides, kind) if crop is None else _to(crop, kind, sides)
    edge = _edge(size)
    if edge is None or said.get("do_pad") or not (crop or "crop_pct" in said):
        return _cannot(file, f"size {size!r}")
    if crop is None and edge >= _CONVNEXT_WHOLE:
        return _to((edge, edge), kind)
    return _to(crop or (edge, edge), kind, (int(edge / float(said.get("crop_pct", 1))),))


def _crop(said: Mapping[str, Any]) -> tuple[int, int] | None:
    return _size(said.get("crop_size")) if said.get("do_center_crop") else None


def _to(sides: tuple[int, int], kind: str, scale: tuple[int, ...] | None = None) -> Resizing:
    """To a height and width; with a scale by a crop."""
    return Resizing("stretch" if scale is None else "crop", *sides, scale=scale, filter=kind)


def _edge(size: Any) -> int | None:
    """Pixels of the shorter side; None of another form."""
    if isinstance(size, int):
        return size
    alone = isinstance(size, Mapping) and set(size) == {"shortest_edge"}
    return int(size["shortest_edge"]) if alone else None


def _of_timm(said: Mapping[str, Any], file: str, resized: bool) -> Preprocessing | None:
    own = said.get("pretrained_cfg")
    if not isinstance(own, Mapping) or "mean" not in own:
        return None
    if resized:
        return Preprocessing.of(file, _each(own["mean"]), _each(own["std"]), None, "RGB")
    _, height, width = own["input_size"]
    kind = _filter(own.get("interpolation", "bicubic"), file)
    if own.get("crop_mode", "center") == "squash":
        resizing = _to((height, width), kind)
    elif own.get("crop_mode", "center") == "center" and height == width:
        resizing = _to((height, width), kind, (int(height / float(own.get("crop_pct", 0.875))),))
    else:
        resizing = _cannot(file, f"crop_mode {own.get('crop_mode')!r} of {height}x{width}")
    return Preprocessing.of(file, _each(own["mean"]), _each(own["std"]), resizing, "RGB")


def _of_model_zoo(text: str, file: str, resized: bool) -> Preprocessing | None:
    """Of the arguments of the model optimizer, by which OpenVINO reads BGR; they need no parser of YAML.

    They say nothing about sizes, so `resized` changes nothing.
    """
    found = {
        name: re.search(rf"^\s*- --{name}(?:=\S*?\[?([\d.,eE+\-\s]+)\]?)?\s*$", text, re.MULTILINE | re.ASCII)
        for name in ("mean_values", "scale_values", "scale", "reverse_input_channels")
    }
    pair = found["mean_values"], found["scale_values"] or found["scale"]
    mean, std = (_numbers((each and each.group(1)) or "") for each in pair)
    if not mean and not std:
        return None
    order = "BGR" if found["reverse_input_channels"] is None else "RGB"
    return _in_255(file, mean or [0.0], std or [1.0], None, order)


def _cannot(file: str, what: str) -> Any:
    raise FormatError(f"{file} resizes images in a way that quark does not: {what}. Possible: --resize.")


def _each(values: Any) -> list[float]:
    return [float(value) for value in (values if isinstance(values, Sequence) else [values])]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in re.split(r"[,\s]+", text.strip(" []")) if part]


def _size(size: Any) -> tuple[int, int] | None:
    """Height and width; None of another form."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return int(size["height"]), int(size["width"])
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) and len(size) == 2 else None


def _filter(said: Any, file: str) -> str:
    name = _PILLOW.get(said, said) if isinstance(said, int) else str(said or "bilinear").lower()
    if name not in FILTERS:
        raise FormatError(f"{file} resizes images by {said!r}; possible: {', '.join(FILTERS)}.")
    return str(name)


_READERS: dict[str, Callable[[Any, str, bool], Preprocessing | None]] = {
    PREPROCESSOR: _of_transformers,
    "config.json": _of_timm,
    "model.yml": _of_model_zoo,
}
"""Name of a file -> what reads its content: a JSON object, or a text. See `said_by_model` for the other arguments."""
