"""The main job from end to end on the embedded language model; `make demo` runs it.

Quantizes the model to three schemes, prints what each costs, exports the last, loads it with transformers and shows
that both give the same logits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.core.metrics import decibel
from quark.tools.models import folder_bytes
from quark.tools.text import perplexity, token_windows
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

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


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=96, help="held-out windows of 256 tokens")
    parser.add_argument("--output", type=Path, default=None, help="where the exported models go")
    args = parser.parse_args()
    console = Console()
    source = MODELS / "language_model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    heldout = token_windows(tokenizer, MODELS / "text" / "heldout.txt", 256, args.windows)
    calibration = token_windows(tokenizer, MODELS / "text" / "calibration.txt", 256, 16)
    table = Table("scheme", "size MB", "perplexity", "weight SQNR dB", "seconds", title="Embedded language model")
    float_model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    base = perplexity(float_model, heldout)
    table.add_row("float16", f"{folder_bytes(source) / 1e6:.2f}", f"{base:.3f}", "", "")
    with tempfile.TemporaryDirectory() as temporary:
        for scheme in SCHEMES:
            # In the dtype it is stored in: the file then holds no more than it must.
            model = AutoModelForCausalLM.from_pretrained(source).eval()
            start = time.perf_counter()
            quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
            model = quantizer.freeze(quantizer.quantize_model(model, calibration))
            seconds = time.perf_counter() - start
            folder = export_safetensors(model, (args.output or Path(temporary)) / scheme, overwrite=True)
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


if __name__ == "__main__":
    main()
