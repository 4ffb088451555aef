"""What a KL divergence means for tasks: the bounds of the verdict, on a real model.

    python -m benchmarks.verdict_bounds FOLDER [SCHEME ...]

Tasks are made of the package's texts, so that nothing is downloaded: which of four endings of ENDING tokens follows
the CONTEXT tokens before it (one is right, three stand elsewhere in the text; the likeliest is chosen), and which
token comes next. Both are held against the float model's answers. A scheme is rounded to nearest; a folder in its
place is loaded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from quark.core.metrics import kl_by_row
from quark.goals.efforts import HELD_OUT_TEXT
from quark.jobs.folders.compared.verdict import word_of_kl
from quark.torch import LLMTemplate, ModelQuantizer, import_model_from_safetensors

SCHEMES = (
    "int8_wo",
    "ptpc_fp8",
    "mxfp6_e2m3",
    "uint4_wo_32",
    "uint4_wo_64",
    "mxfp4_weight_only",
    "nvfp4_weight_only",
    "mxfp4",
    "int2_wo_64",
)
CONTEXT, ENDING, CHOICES, ITEMS = 36, 12, 4, 160
LENGTH, WINDOWS = 512, 8


def items(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(ITEMS x CHOICES, CONTEXT + ENDING) token ids, of each item the right ending first; and how many items."""
    span = CONTEXT + ENDING
    count = min(ITEMS, len(ids) // span)
    cut = ids[: count * span].reshape(count, span)
    rows = []
    for i in range(count):
        others = [(i + shift * (count // CHOICES) + 1) % count for shift in range(1, CHOICES)]
        rows += [cut[i]] + [torch.cat([cut[i, :CONTEXT], cut[j, CONTEXT:]]) for j in others]
    return torch.stack(rows), count


@torch.no_grad()
def answers(model: torch.nn.Module, rows: torch.Tensor, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen ending of each item, and the logits of each window in float16."""
    scores = []
    for batch in rows.split(16):
        logits = model(batch).logits[:, CONTEXT - 1 : -1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch[:, CONTEXT:].flatten(), reduction="none")
        scores.append(-losses.reshape(len(batch), ENDING).sum(1))
    chosen = torch.cat(scores).reshape(-1, CHOICES).argmax(1)
    return chosen, torch.stack([model(window[None]).logits[0].half() for window in windows])


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, schemes = Path(sys.argv[1]), sys.argv[2:] or SCHEMES
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(HELD_OUT_TEXT.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    rows, count = items(ids)
    windows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)[:WINDOWS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen, before = answers(model, rows, windows)
    right = (chosen == 0).float().mean()
    following = windows[:, 1:]
    hits = (before[:, :-1].argmax(-1) == following).float().mean()
    print(f"float: {right:.1%} of {count} endings, {hits:.1%} of {following.numel()} next tokens", flush=True)
    print("scheme | KL, nats | word | endings | other ending than float | next token | same first choice | seconds")
    for scheme in schemes:
        start = time.process_time()
        if Path(scheme).is_dir():
            made = import_model_from_safetensors(None, scheme).float().eval()
        else:
            made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            quantizer = ModelQuantizer(LLMTemplate.get(made.config.model_type).get_config(scheme))
            made = quantizer.freeze(quantizer.quantize_model(made))
        picked, after = answers(made, rows, windows)
        kl = torch.cat([kl_by_row(x.float(), y.float()) for x, y in zip(before, after, strict=True)]).mean()
        print(
            f"{Path(scheme).name} | {kl:.4f} | {word_of_kl(float(kl))} | {(picked == 0).float().mean():.1%} | "
            f"{(picked != chosen).float().mean():.1%} | {(after[:, :-1].argmax(-1) == following).float().mean():.1%} | "
            f"{(after.argmax(-1) == before.argmax(-1)).float().mean():.1%} | {time.process_time() - start:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
