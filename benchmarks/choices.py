"""`python -m benchmarks.choices`: what schemes lose, and what algorithms gain, on a language model.

    python -m benchmarks.choices                        the two tables of docs/choose
    python -m benchmarks.choices --picture FILE.svg     and the picture of loss against size
    python -m benchmarks.choices int3_wo_128 int3_wo_128+awq+gptq:refine_passes=3 q4_k_m+qronos
                                                        these rows: a scheme or a mix of GGUF, and the algorithms
                                                        that run, in this order
    python -m benchmarks.choices --model FOLDER --length 512 --held-out 16 --picture FILE.svg int8_wo mxfp4+qronos
                                                        and of another language model, with the texts of the package

KL divergence is the mean over next tokens of that of the quantized model from the float one, in millinats; bits are
those of a weight on the disk, with its scales. --calibration and --held-out count windows of --length tokens.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import safe_open
from transformers.utils.logging import disable_progress_bar

import quark
from benchmarks.tables import console
from quark.gguf import MIXES
from quark.goals.efforts import DEFAULT_TEXT, HELD_OUT_TEXT
from quark.torch import export_safetensors
from quark.torch.calibration.divergence import divergence
from quark.torch.llm.text import token_windows

MODELS = Path(__file__).parent.parent / "examples" / "models"
FOLDER, TEXT = MODELS / "language_model", MODELS / "text"
WINDOW, CALIBRATION, HELD_OUT = 256, 32, 24
SCHEMES = (
    *("int8_wo", "int8_dynamic", "mxfp6_e2m3_weight_only", "fp8_block_128", "ptpc_fp8", "fp8", "mxfp8_e4m3"),
    *("mxfp6_e2m3", "int8", "uint4_wo_32", "uint4_wo_64", "int4_wo_32", "uint4_wo_128", "int4_wo_128"),
    *("mxfp4_weight_only", "int4_fp8_128", "int4_wo_per_channel", "amdfp4", "nvfp4", "mxfp4", "int3_wo_128"),
    *("nvfp4_weight_only", "int2_wo_64"),
)
SOLVED = ("uint4_wo_128", "int4_wo_128", "int3_wo_128", "int2_wo_64", "mxfp4", "nvfp4")
"""Schemes of the second table, whose columns are ALGORITHMS."""
ALGORITHMS = ("importance", "awq", "gptq", "gptaq", "qronos", "qronos:fisher=true")
COLORS = {"to nearest": "#7f7f7f", "gptq": "#1f77b4", "qronos": "#d62728"}
"""What the picture shows."""


PANELS = ((2.0, 5.8), (6.0, 9.6))
"""Of the picture, in bits."""


@dataclass(frozen=True)
class Measured:
    """A scheme and its algorithms, joined by + ("": to nearest): millinats, perplexity, bits of a weight, CPU seconds.

    The bits of a mix of GGUF are NaN.
    """

    scheme: str
    algorithm: str
    loss: float
    perplexity: float
    bits: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, metavar="FOLDER", help="another model than the example")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the picture of loss against size")
    parser.add_argument("rows", nargs="*", metavar="SCHEME[+ALGORITHM...]", help="rows to measure; none: both tables")
    parser.add_argument("--calibration", type=int, default=CALIBRATION, metavar="N", help=f"windows ({CALIBRATION})")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, metavar="N", help=f"windows ({HELD_OUT})")
    parser.add_argument("--length", type=int, default=WINDOW, metavar="N", help=f"tokens of a window ({WINDOW})")
    parser.add_argument("--calib", type=Path, metavar="FILE", help="another text")
    args = parser.parse_args()
    picture = args.picture
    logging.disable(logging.WARNING)
    disable_progress_bar()
    example = args.model == FOLDER
    calibration, held_out = (
        (TEXT / "calibration.txt", TEXT / "heldout.txt") if example else (DEFAULT_TEXT, HELD_OUT_TEXT)
    )
    measure = Measure(args.model, args.length, args.calib or calibration, args.calibration, held_out, args.held_out)
    if args.rows:
        found = [measure(*row.split("+", 1)) for row in args.rows]
        console().print(table_of_rows(found, measure.float_row()))
        if picture:
            draw(found, picture)
        return
    nearest = [measure(scheme) for scheme in SCHEMES]
    solved = [measure(scheme, algorithm) for scheme in SOLVED for algorithm in ALGORITHMS]
    out = console()
    out.print(measure.float_row())
    out.print(table_of_schemes(nearest))
    out.print(table_of_algorithms(nearest, solved))
    if picture:
        draw([*nearest, *solved], picture)


class Measure:
    """Quantizes a model, and compares it with the float one on held-out text.

    Args:
        folder: Of the model.
        length: Tokens of a window.
        text, calibration: For calibration, and how many windows.
        judge, held_out: Held out, and how many windows.
    """

    def __init__(self, folder: Path, length: int, text: Path, calibration: int, judge: Path, held_out: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.folder = folder
        self.data = token_windows(tokenizer, text, length, calibration)
        self.held_out = token_windows(tokenizer, judge, length, held_out)
        model = load(folder)
        self.expected = [_log_probabilities(model, ids) for ids in self.held_out]
        self.perplexity = _perplexity(self.expected, self.held_out)

    def __call__(self, scheme: str, algorithm: str = "") -> Measured:
        start = time.process_time()
        options: dict[str, Any] = {"algorithm": algorithm.split("+")} if algorithm else {"effort": "fast"}
        options |= {"goal": "llama.cpp"} if scheme in MIXES else {}
        model = quark.quantize(load(self.folder), scheme, data=self.data, **options)
        seconds = time.process_time() - start
        bits = math.nan if scheme in MIXES else self.bits(scheme)
        return Measured(scheme, algorithm, *self.loss(model), bits, seconds)

    def loss(self, model: Any) -> tuple[float, float]:
        """Millinats and perplexity of a quantized model."""
        found = [_log_probabilities(model, ids) for ids in self.held_out]
        losses = [float(divergence(*pair)) for pair in zip(self.expected, found, strict=True)]
        return 1000 * sum(losses) / len(losses), _perplexity(found, self.held_out)

    def float_row(self) -> str:
        """What was measured, in words."""
        versions = f"torch {torch.__version__}, quark {quark.__version__}"
        windows = f"{len(self.data)} windows for calibration, {len(self.held_out)} held out"
        return f"float: perplexity {self.perplexity:.2f}; {windows}; {versions}"

    @cache  # noqa: B019  (one object a run)
    def bits(self, scheme: str) -> float:
        """Of a weight on the disk, where the model is in bfloat16, as models are published."""
        return stored_bits(quark.quantize(load(self.folder, torch.bfloat16), scheme, data=self.data[:1], effort="fast"))


def stored_bits(model: Any) -> float:
    """Of a weight of a quantized layer on the disk, in the smallest of two formats that hold the model.

    Raises NotSupportedError if no format does.
    """
    sizes = []
    for form in ("quark", "compressed-tensors"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                out = export_safetensors(model, Path(folder) / "out", form)
            except quark.errors.NotSupportedError:
                if form == "quark":
                    raise
                continue
            sizes.append(_bits_in(out, model))
    return min(sizes)


def _bits_in(folder: Path, model: Any) -> float:
    layers = {name: module for name, module in model.named_modules() if getattr(module, "weight_quantizer", None)}
    weights = sum(module.weight.numel() for module in layers.values())
    stored = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                layer, _, leaf = name.rpartition(".")
                if layer in layers and leaf != "bias":
                    stored += tensors.get_tensor(name).nbytes
    return 8 * stored / weights


def load(folder: Path = FOLDER, dtype: torch.dtype = torch.float32) -> Any:
    """A language model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits.float(), -1)


def _perplexity(scores: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]) -> float:
    losses = [-float(s[:, :-1].gather(-1, ids[:, 1:, None]).mean()) for s, ids in zip(scores, windows, strict=True)]
    return math.exp(sum(losses) / len(losses))


def table_of_rows(rows: Sequence[Measured], title: str) -> Table:
    """Rows as they were asked for."""
    table = Table("scheme", "algorithms", "bits", "KL divergence", "perplexity", "CPU seconds", title=title)
    for row in rows:
        figures = f"{row.bits:.2f}", f"{row.loss:.3g}", f"{row.perplexity:.2f}", f"{row.seconds:.1f}"
        table.add_row(row.scheme, row.algorithm, *figures)
    return table


def table_of_schemes(rows: Sequence[Measured]) -> Table:
    """What each scheme loses to nearest, least first."""
    table = Table("scheme", "bits", "KL divergence", "perplexity")
    for row in sorted(rows, key=lambda row: row.loss):
        table.add_row(row.scheme, f"{row.bits:.2f}", f"{row.loss:.3g}", f"{row.perplexity:.2f}")
    return table


def table_of_algorithms(nearest: Sequence[Measured], solved: Sequence[Measured]) -> Table:
    """The loss of each scheme of SOLVED under each algorithm, and the range of CPU seconds."""
    table = Table("scheme", "to nearest", *ALGORITHMS)
    loss = {(row.scheme, row.algorithm): row.loss for row in [*nearest, *solved]}
    for scheme in SOLVED:
        table.add_row(scheme, *(f"{loss[scheme, algorithm]:.3g}" for algorithm in ("", *ALGORITHMS)))
    ranges = []
    for algorithm in ("", *ALGORITHMS):
        seconds = [row.seconds for row in [*nearest, *solved] if (row.scheme in SOLVED) and row.algorithm == algorithm]
        ranges.append(f"{min(seconds):.1f} to {max(seconds):.1f}")
    table.add_row("CPU seconds", *ranges)
    return table


def draw(rows: Sequence[Measured], file: Path) -> None:
    """Loss against bits of a weight, below six bits and above: less is better. Needs matplotlib.

    Of several algorithms the last gives the colour.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "quark", "svg.fonttype": "none", "font.size": 9})
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 5.4), width_ratios=(3, 2), sharey=True, layout="constrained")
    for axes, (low, high) in zip(panels, PANELS, strict=True):
        shown = [row for row in rows if low <= row.bits < high]
        for label, color in COLORS.items():
            points = [row for row in shown if (row.algorithm or "to nearest").rpartition("+")[2] == label]
            axes.scatter([p.bits for p in points], [p.loss for p in points], 18, color=color, label=label, zorder=3)
        axes.set(yscale="log", xlim=(low, high), xlabel="bits of a weight on the disk")
        axes.grid(alpha=0.3)
        _label(axes, sorted((row for row in shown if not row.algorithm), key=lambda row: row.loss))
    panels[0].set_ylabel("KL divergence from the float model, millinats")
    panels[0].legend(loc="lower left")
    figure.savefig(file, metadata={"Date": None}, facecolor="white")


def _label(axes: Any, rows: Sequence[Measured]) -> None:
    """Names of schemes, from the least loss up, at the right of the points and apart from each other."""
    last: dict[int, float] = {}
    for row in rows:
        column = int(row.bits)  # what lies in one column of the panel may cover one another
        height = max(row.loss, last.get(column, 0) * 1.32)
        last[column] = height
        end = {"xytext": (max(r.bits for r in rows if int(r.bits) == column) + 0.1, height)}
        line = {"arrowstyle": "-", "color": "#bbbbbb", "lw": 0.6}
        axes.annotate(row.scheme, (row.bits, row.loss), **end, fontsize=7, va="center", arrowprops=line)


if __name__ == "__main__":
    main()
