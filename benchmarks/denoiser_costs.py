"""`python -m benchmarks.denoiser_costs`: what schemes and algorithms cost the example denoiser.

steps       SQNR of its output on steps of held-out prompts and noise, over all timesteps
last steps  the same of the last quarter of the schedule, where errors are largest
pictures    SQNR of the pictures from equal noise
read        how many of 100 pictures the example classifier reads as the digit of the prompt
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import quark
from examples.models.train_digits_denoiser import FOLDER, WORDS, DigitsPipeline
from quark.torch import compare_denoisers, record_steps

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("int8", ()),
    ("int8", ("smooth",)),
    ("fp8", ()),
    ("ptpc_fp8", ()),
    ("mxfp4", ()),
    ("int4_wa_64", ()),
    ("int4_wa_64", ("svdquant:svd_rank=8,min_layer_size=32",)),
    ("int4_wa_64", ("svdquant:svd_rank=32,min_layer_size=32",)),
    ("int4_wa_64", ("svdquant:svd_rank=32,min_layer_size=32", "gptq")),
    ("uint4_wo_64", ()),
    ("uint4_wo_64", ("awq",)),
    ("uint4_wo_64", ("gptq",)),
)
"""Scheme and algorithms."""
PROMPTS = [word for word in WORDS for _ in range(10)]


def example() -> Any:
    """The example denoiser, in float32."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel.from_pretrained(FOLDER).float().eval()


def read_as_asked(model: Any) -> float:
    """The share of pictures that the example classifier reads as the digits they were asked for."""
    pictures = DigitsPipeline(model)(PROMPTS, generator=torch.Generator().manual_seed(7))
    images = ((pictures + 1) / 2).clamp(0, 1).numpy()
    session = onnxruntime.InferenceSession(FOLDER.parent / "digits_cnn" / "model.onnx")
    digits = session.run(None, {"image": images})[0].argmax(1)
    return float(np.mean(digits == [WORDS.index(word) for word in PROMPTS]))


def main() -> None:
    """Print a row for each."""
    logging.getLogger("quark").setLevel("ERROR")
    torch.set_num_threads(1)
    model = example()
    pipeline = DigitsPipeline(model)
    print(f"float: {read_as_asked(model):.0%} read")
    with tempfile.TemporaryDirectory() as folder:
        data = record_steps(pipeline, WORDS * 2, Path(folder, "data"))
        held_out = record_steps(pipeline, WORDS, Path(folder, "held_out"), steps=5, seed=500)
        for scheme, algorithms in ROWS:
            start = time.process_time()
            quantized = quark.quantize(copy.deepcopy(model), scheme, data=data, algorithm=algorithms)
            seconds = time.process_time() - start
            costs = compare_denoisers(pipeline, quantized, held_out, WORDS)
            last = costs.by_timestep.rows(4)[-1][1]
            print(
                f"| {scheme} | {', '.join(algorithms)} | {costs.sqnr:.1f} | {last:.1f} | {costs.picture_sqnr:.1f} | "
                f"{read_as_asked(quantized):.0%} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
