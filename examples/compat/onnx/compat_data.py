"""What the scripts of this folder share: the documented arguments, the data readers, and a measure of the result.

Without arguments they take the two example models: the classifier of digits, and the language model, which is
exported to ONNX first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.quantization.calibrate import CalibrationDataReader

MODELS = Path(__file__).parents[2] / "models"
DIGITS = MODELS / "digits_cnn"
LANGUAGE_MODEL = MODELS / "language_model"
TOKENS = 128  # in a sample of the language model


def parser(about: str | None, output: str, language_model: bool = False) -> argparse.ArgumentParser:
    """The arguments that all documented scripts have.

    Args:
        about: The text of `--help`.
        output: Default of `--output_model_path`.
        language_model: Whether the model reads tokens; then the calibration data is a text file.
    """
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = "" if language_model else str(DIGITS / "model.onnx")
    text = str(MODELS / "text" / "calibration.txt")
    made.add_argument("--model_name", default="", help="shown in the result")
    made.add_argument("--input_model_path", default=source, help="the float model")
    made.add_argument("--output_model_path", default=output, help="where the quantized model goes")
    made.add_argument("--calibration_dataset_path", default=text if language_model else "", help="folder, or file")
    made.add_argument("--num_calib_data", type=int, default=8 if language_model else 128)
    made.add_argument("--batch_size", type=int, default=1)
    return made


class Reader(CalibrationDataReader):
    """Feeds of one input, one after the other, and again after `rewind`."""

    def __init__(self, name: str, batches: Iterable[np.ndarray]) -> None:
        self.feeds = [{name: batch} for batch in batches]
        self.rewind()

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.iterator, None)

    def rewind(self) -> None:
        self.iterator = iter(self.feeds)


def image_reader(args: argparse.Namespace) -> Reader:
    """A reader of the images in a folder of folders (one for each class), or of the example ones."""
    first = onnxruntime.InferenceSession(args.input_model_path).get_inputs()[0]
    if args.calibration_dataset_path:
        files = sorted(path for path in Path(args.calibration_dataset_path).rglob("*.*") if path.is_file())
        images = np.stack([read_image(path, *first.shape[1:]) for path in files[: args.num_calib_data]])
    else:
        images = digits("calibration")[0][: args.num_calib_data]
    return Reader(first.name, np.array_split(images, max(1, len(images) // args.batch_size)))


def read_image(path: Path, channels: int, height: int, width: int) -> np.ndarray:
    """One image as (channels, height, width) in [0, 1]: a file of numpy as it is, others through Pillow."""
    if path.suffix == ".npy":
        return np.load(path).astype(np.float32)
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB").resize((width, height)), np.float32)
    return pixels.reshape(height, width, channels).transpose(2, 0, 1) / np.float32(255)


def digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1] and labels; `part` is calibration or heldout."""
    with np.load(DIGITS / "data.npz") as data:
        return data[f"{part}_images"] / np.float32(16), data[f"{part}_labels"]


def float_language_model(args: argparse.Namespace, outliers: bool = False) -> str:
    """The path of the float language model, exported beside the output if `--input_model_path` names none.

    Args:
        args: Of the command line.
        outliers: Whether three channels of each norm get a gain of 30 that the layers behind undo, which changes
            nothing in float: what large models learn by themselves, and what smoothing and rotation are for.
    """
    if args.input_model_path:
        return args.input_model_path
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()
    if outliers:
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            spread(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
            spread(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    path = str(Path(args.output_model_path).with_name("float_outliers.onnx" if outliers else "float.onnx"))
    torch.onnx.export(
        Logits().eval(), (torch.zeros(1, TOKENS, dtype=torch.int64),), path, dynamo=True, opset_version=18,
        external_data=False, verbose=False, input_names=["input_ids"],
    )  # fmt: skip
    return path


def spread(norm: Any, *linears: Any) -> None:
    channels = [7, 70, 170]
    norm.weight.data[channels] *= 30
    for linear in linears:
        linear.weight.data[:, channels] /= 30


def text_reader(args: argparse.Namespace, skip: int = 0) -> Reader:
    """A reader of windows of a text file, in tokens of the example language model."""
    from transformers import AutoTokenizer

    text = Path(args.calibration_dataset_path).read_text(encoding="utf-8")[:40000]
    ids = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)(text, verbose=False).input_ids[skip * TOKENS :]
    windows = [ids[start : start + TOKENS] for start in range(0, args.num_calib_data * TOKENS, TOKENS)]
    return Reader("input_ids", [np.array([window]) for window in windows])


def outputs(path: str, feed: dict[str, np.ndarray], options: Any = None) -> np.ndarray:
    """First output of a model in stock ONNX Runtime, on the CPU."""
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def report(args: argparse.Namespace, source: str, **more: float) -> dict[str, float]:
    """Print and return what the quantized model is worth on data that calibration did not see.

    Returns:
        dict: `sqnr` in dB against the float model, `bytes` of the file as a share of the float one, `accuracy` and
        `float_accuracy` for the classifier, and `more`.
    """
    result = dict(more)
    if onnxruntime.InferenceSession(source).get_inputs()[0].name == "input_ids":
        (feed,) = text_reader(argparse.Namespace(**{**vars(args), "num_calib_data": 1}), skip=16).feeds
    else:
        images, labels = digits("heldout")
        feed = {"image": images}
    before, after = outputs(source, feed), outputs(args.output_model_path, feed)
    if "image" in feed:
        result |= {"float_accuracy": float((before.argmax(1) == labels).mean())}
        result |= {"accuracy": float((after.argmax(1) == labels).mean())}
    result["sqnr"] = float(10 * np.log10((before**2).sum() / ((before - after) ** 2).sum()))
    result["bytes"] = Path(args.output_model_path).stat().st_size / Path(source).stat().st_size
    print(args.model_name or Path(source).stem, {name: round(value, 4) for name, value in result.items()})
    return result
