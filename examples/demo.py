"""The main job from end to end on both example models; `make demo` runs it.

PyTorch: quantizes the language model to three schemes, prints what each costs, exports the last, loads it with
transformers and shows that both give the same logits. ONNX: quantizes the classifier of digits to five schemes and
prints what each costs in stock ONNX Runtime.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from quark.base.log import severity
from quark.core.metrics import decibel, sqnr
from quark.jobs.folders.models import folder_bytes
from quark.onnx import (
    CalibMethod,
    Config,
    Int8Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    UInt8Spec,
)
from quark.onnx import ModelQuantizer as OnnxQuantizer
from quark.onnx.quantization.config import get_default_config
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.llm.text import perplexity, token_windows

MODELS = Path(__file__).parent / "models"
SCHEMES = ("int8", "uint4_wo_128", "mxfp4")


def weight_sqnr(before: torch.nn.Module, after: torch.nn.Module) -> float:
    """SQNR in dB over all weights of linear layers together."""
    signal = noise = 0.0
    for name, module in before.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach().double()
            signal += float((weight**2).sum())
            noise += float(((weight - after.get_submodule(name).weight.detach()) ** 2).sum())  # type: ignore[operator]
    return decibel(signal, noise)


def language_model(console: Console, windows: int, output: Path) -> None:
    """Quantize, export and reload the language model; print a table."""
    source = MODELS / "language_model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    heldout = token_windows(tokenizer, MODELS / "text" / "heldout.txt", 256, windows)
    calibration = token_windows(tokenizer, MODELS / "text" / "calibration.txt", 256, 16)
    table = Table("scheme", "size MB", "perplexity", "weight SQNR dB", "seconds", title="Example language model")
    float_model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    base = perplexity(float_model, heldout)
    table.add_row("float16", f"{folder_bytes(source) / 1e6:.2f}", f"{base:.3f}", "", "")
    for scheme in SCHEMES:
        # In the dtype it is stored in: the file then holds no more than it must.
        model = AutoModelForCausalLM.from_pretrained(source).eval()
        start = time.perf_counter()
        quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
        model = quantizer.freeze(quantizer.quantize_model(model, calibration))
        seconds = time.perf_counter() - start
        folder = export_safetensors(model, output / scheme, overwrite=True)
        # What was written is what is measured; in float32, which is several times faster on a CPU.
        written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        value = perplexity(written, heldout)
        size, damage = folder_bytes(folder) / 1e6, weight_sqnr(float_model, model)
        change = f"{value:.3f} ({value / base - 1:+.2%})"
        table.add_row(scheme, f"{size:.2f}", change, f"{damage:.1f}", f"{seconds:.2f}")
    console.print(table)
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        difference = float((model(heldout[0]).logits - reloaded(heldout[0]).logits).abs().max())
    console.print(f"{folder.name}, loaded back by transformers: largest difference of a logit {difference}")


class Digits:
    """Calibration data of the classifier: four batches of real images."""

    def __init__(self) -> None:
        self.batches = iter(np.split(images("calibration"), 4))

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch."""
        batch = next(self.batches, None)
        return None if batch is None else {"image": batch}


class Cost(NamedTuple):
    """What one classifier file costs."""

    accuracy: float
    kilobytes: float
    milliseconds: float
    sqnr: float


def images(split: str) -> np.ndarray:
    """Images (n, 1, 8, 8) in [0, 1] of "calibration" or "heldout"."""
    return (np.load(MODELS / "digits_cnn" / "data.npz")[f"{split}_images"] / 16).astype(np.float32)


def digit_configs() -> dict[str, Config | QConfig]:
    """Name -> config: four of the NPU's, and integers that ONNX Runtime runs fast on x64."""
    named = {name: Config(global_quant_config=get_default_config(name)) for name in ("A8W8", "A16W8", "XINT8", "BF16")}
    activation = UInt8Spec(calibration_method=CalibMethod.MinMax)
    weight = Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel)
    x64 = QConfig(QLayerConfig(input_tensors=activation, weight=weight), Target="ort_x64")
    return {**named, "int8 ort_x64": x64}


def digit_costs(folder: Path, runs: int = 50) -> dict[str, Cost]:
    """Quantize the classifier to every config and measure each file: on held-out images, with one thread."""
    source, heldout = MODELS / "digits_cnn" / "model.onnx", images("heldout")
    labels = np.load(MODELS / "digits_cnn" / "data.npz")["heldout_labels"]
    options, decoding = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    for each in (options, decoding):
        each.intra_op_num_threads, each.log_severity_level = 1, 3
    # The figures are of the file: on a processor without VNNI, sums of integer kernels saturate.
    decoding.add_session_config_entry("session.disable_quant_qdq", "1")
    files = {"float32": source}
    for name, config in digit_configs().items():
        files[name] = folder / f"digits_{name.replace(' ', '_')}.onnx"
        OnnxQuantizer(config).quantize_model(source, files[name], Digits())
    sessions = {name: onnxruntime.InferenceSession(path, options) for name, path in files.items()}
    logits = {
        name: onnxruntime.InferenceSession(path, decoding).run(None, {"image": heldout})[0]
        for name, path in files.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(runs):  # in turn, so that what else the machine does hits all alike
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, {"image": heldout[:64]})
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Cost(
            float((logits[name].argmax(1) == labels).mean()),
            path.stat().st_size / 1e3,
            statistics.median(seconds[name]) * 1e3,
            sqnr(logits["float32"], logits[name]),
        )
        for name, path in files.items()
    }


def digits(console: Console, output: Path) -> None:
    """Quantize the classifier; print a table."""
    columns = ("scheme", "size kB", "held-out accuracy", "output SQNR dB", "ms per 64 images, 1 thread")
    caption = "A8W8, A16W8, XINT8 and BF16 are for NPUs, which this CPU only imitates"
    table = Table(*columns, title="Example classifier of digits, in stock ONNX Runtime", caption=caption)
    for name, cost in digit_costs(output).items():
        damage = "" if name == "float32" else f"{cost.sqnr:.1f}"
        table.add_row(name, f"{cost.kilobytes:.0f}", f"{cost.accuracy:.2%}", damage, f"{cost.milliseconds:.2f}")
    console.print(table)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=48, help="held-out windows of 256 tokens")
    parser.add_argument("--output", type=Path, default=None, help="where the exported models go")
    args = parser.parse_args()
    console = Console()
    transformers_logging.disable_progress_bar()
    with severity(2), tempfile.TemporaryDirectory() as temporary:
        output = args.output or Path(temporary)
        output.mkdir(parents=True, exist_ok=True)
        language_model(console, args.windows, output)
        digits(console, output)


if __name__ == "__main__":
    main()
