"""A pipeline of diffusers: its denoiser in int8, and pictures of both from the same noise.

python examples/tasks/diffusion.py [--model FOLDER] [-o pipeline-int8]

Without --model it is a random pipeline without a prompt. For a real one: --model FOLDER of Stable Diffusion 3, FLUX or
another, and its arguments in place of NOISE (prompt="a cat", num_inference_steps=28). --bits 4 and text encoders:
docs/guide/diffusers.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import tiny_models
import torch
from diffusers import DiffusionPipeline

import quark

NOISE = {"num_inference_steps": 4, "output_type": "np"}


def main(words: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", help="folder of a pipeline")
    arguments.add_argument("-o", "--output", default="pipeline-int8")
    args = arguments.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        model = args.model or tiny_models.pipeline(Path(place) / "pipeline")

        made = quark.quantize(model, goal="diffusers", output=args.output, overwrite=True)

        expected, found = (pictures(folder) for folder in (model, made))
    error = np.square(expected - found).mean()
    psnr = float(-10 * np.log10(max(error, 1e-12)))
    sys.stdout.write(f"pictures of the quantized pipeline, PSNR: {psnr:.1f} dB\n")
    return psnr


def pictures(folder: str | Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What a pipeline makes, from 0 to 1: (pictures, height, width, channels)."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    images: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = pipeline(
        generator=torch.Generator().manual_seed(0), **NOISE
    ).images
    return images


if __name__ == "__main__":
    main()
