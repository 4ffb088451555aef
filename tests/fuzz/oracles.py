"""What the runtimes of the inputs say, of the source and of what quark made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quark.core.metrics import Comparison
from tests.fuzz.case import WrongError

Arrays = dict[str, Any]


def sqnr(expected: Iterable[Any], found: Iterable[Any]) -> float:
    """In dB over all pairs of arrays. Raises WrongError where shapes differ, or only one side is finite."""
    both = Comparison()
    for x, y in zip(expected, found, strict=True):
        if np.shape(x) != np.shape(y):
            raise WrongError(f"the shape {np.shape(y)} came out, where the source gives {np.shape(x)}")
        if not np.isfinite(x).all():
            return math.inf  # the source itself gives NaN: nothing to compare
        if not np.isfinite(y).all():
            raise WrongError("NaN or Inf came out, where the source gives numbers")
        both.update(np.asarray(x, np.float64), np.asarray(y, np.float64))
    return both.sqnr if both.noise else math.inf


def onnx_outputs(file: Path, feed: Arrays) -> list[Any]:
    """The outputs of ONNX Runtime. Raises its own errors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    # What was an initializer may have become an input, which is another model, and no worse one.
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    more = {
        node.name: np.zeros([size if isinstance(size, int) else 1 for size in node.shape], kinds[node.type])
        for node in session.get_inputs()
        if node.name not in feed and node.type in kinds
    }
    return [np.asarray(output) for output in session.run(None, {**feed, **more})]


def judge_onnx(source: Path, result: Path | None, feed: Arrays) -> float:
    """SQNR of a quantized model against its source. Raises WrongError where ONNX Runtime refuses either."""
    try:
        expected = onnx_outputs(source, feed)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has an exception for each of its many codes
        if not _loads(source):
            raise WrongError(f"accepted, and ONNX Runtime refuses the source: {_first(error)}") from None
        expected = None  # found when it runs, which a job without data does not do
    if result is None:
        return math.inf
    try:
        found = onnx_outputs(result, feed)
    except Exception as error:  # noqa: BLE001
        if expected is None:
            return math.inf
        raise WrongError(f"ONNX Runtime refuses the result: {_first(error)}") from None
    if expected is None:
        raise WrongError("the result runs, and the source does not")
    return sqnr(*zip(*((x, y) for x, y in zip(expected, found, strict=True) if x.dtype.kind == "f"), strict=True))


def _loads(file: Path) -> bool:
    import onnxruntime

    try:
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001
        return False
    return True


def folder_outputs(folder: Path, named: str) -> list[Any]:
    """The float outputs of a model folder. Raises WrongError for weights that do not fit its class."""
    import torch
    import transformers

    import quark.torch  # noqa: F401 - transformers reads quantized folders then

    model_class = getattr(transformers, named, None)
    if model_class is None:
        raise WrongError(f"accepted, and transformers has no class {named}")
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # noqa: BLE001 - whatever transformers refuses by
        raise WrongError(f"transformers cannot load {folder.name}: {_first(error)}") from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if info.get(kind):
            raise WrongError(f"accepted, and as {named} the folder {folder.name} has {kind}: {list(info[kind])[:2]}")
    ids = torch.arange(2 * 12).reshape(2, 12) * 37 % 2048
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().reshape(2, 3, 16, 16)
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            out = model.eval()(pixel_values=images)
        elif model.main_input_name == "input_features":
            size = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
            features = torch.linspace(-1, 1, size[1] * size[2]).sin().reshape(size)
            out = model.eval()(input_features=features, decoder_input_ids=ids[:1, :5])
        elif model.config.is_encoder_decoder:
            out = model.eval()(input_ids=ids, decoder_input_ids=ids[:, :5])
        else:
            out = model.eval()(input_ids=ids)
    return [out[0].double().numpy()]


def architecture(folder: Path) -> str:
    """The class that a config.json names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("architectures") if isinstance(config, dict) else None
    return str(named[0]) if isinstance(named, list) and named else ""


def judge_folder(source: Path, result: Path) -> float:
    """SQNR of a quantized folder against its source, as the class that the source names, or else the result."""
    named = architecture(source) or architecture(result)
    expected = folder_outputs(source, named)
    if architecture(result) != named:
        raise WrongError(f"{named} became {architecture(result)}")
    return sqnr(expected, folder_outputs(result, named))


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
