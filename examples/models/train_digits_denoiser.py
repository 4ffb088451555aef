"""Train the small text-to-image denoiser of the diffusion tests: handwritten digits from the words for them.

It is an `SD3Transformer2DModel` of diffusers, of which each block carries an image and a text stream, trained by flow
matching (Esser et al. 2024, arXiv:2403.03206):

    x_t = (1 - s) x + s e,    e ~ N(0, 1),  s = sigmoid(N(0, 1)),  timestep = 1000 s
    loss = |model(x_t, timestep, prompt) - (e - x)|^2

The images are the digits of scikit-learn, 8 by 8, in [-1, 1]; a prompt is a word such as "seven", a token for each
letter; one in ten is empty, for guidance. Writes ``config.json`` and ``diffusion_pytorch_model.safetensors``, as
diffusers does. `DigitsPipeline` makes pictures of prompts, as a pipeline of diffusers would.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(__file__).parent / "digits_denoiser"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS, LENGTH = 26, 5
WIDTH = LETTERS + LENGTH + 1
"""Of a token: which letter, at which place, or neither."""


def encoded(prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, words of at most five letters, as tokens (n, 5, 32), and their mean (n, 32)."""
    tokens = torch.zeros(len(prompts), LENGTH, WIDTH)
    for row, prompt in enumerate(prompts):
        for place in range(LENGTH):
            if place < len(prompt):
                tokens[row, place, ord(prompt[place]) - ord("a")] = 1
                tokens[row, place, LETTERS + place] = 1
            else:
                tokens[row, place, -1] = 1
    return tokens, tokens.mean(1)


class DigitsPipeline:
    """Pictures of prompts: what `StableDiffusion3Pipeline` does, without a text encoder and a VAE.

    Args:
        transformer: The denoiser.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    @torch.no_grad()
    def __call__(
        self,
        prompt: Sequence[str],
        num_inference_steps: int = 20,
        guidance_scale: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Pictures (n, 1, 8, 8) in about [-1, 1], by Euler's method from s = 1 to 0.

        Each step asks the denoiser once for the empty prompts and the prompts together, as diffusers does.
        """
        count = len(prompt)
        x = torch.randn(count, 1, 8, 8, generator=generator)
        tokens, pooled = encoded([*[""] * count, *prompt])
        schedule = torch.linspace(1, 0, num_inference_steps + 1)
        for now, then in itertools.pairwise(schedule):
            velocity = self.transformer(
                hidden_states=torch.cat([x, x]),
                encoder_hidden_states=tokens,
                pooled_projections=pooled,
                timestep=(1000 * now).expand(2 * count),
                return_dict=False,
            )[0]
            without, of_prompt = velocity.chunk(2)
            x = x + (then - now) * (without + guidance_scale * (of_prompt - without))
        return x


def new_model() -> Any:
    """The denoiser with random weights: three blocks of two streams of 64 channels."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=1, out_channels=1, num_layers=3, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=WIDTH, caption_projection_dim=64, pooled_projection_dim=WIDTH,
        pos_embed_max_size=4,
    )  # fmt: skip


def train(images: torch.Tensor, labels: torch.Tensor, steps: int) -> nn.Module:
    """Train with AdamW and a one-cycle rate; return the moving average of the weights."""
    model = new_model().train()
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    tokens, pooled = encoded([*WORDS, ""])
    lost = 0.0
    for step in range(steps):
        rows = torch.randint(len(images), (128,))
        x, words = images[rows], torch.where(torch.rand(128) < 0.1, len(WORDS), labels[rows])
        noise, s = torch.randn_like(x), torch.randn(128).sigmoid()
        mixed = torch.lerp(x, noise, s[:, None, None, None])
        velocity = model(mixed, tokens[words], pooled[words], 1000 * s, return_dict=False)[0]
        loss = nn.functional.mse_loss(velocity, noise - x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, min(0.002, 10 / (step + 10)) if step > 1000 else 0.05)
        lost += float(loss)
        if step % 250 == 249:
            print(f"step {step + 1} of {steps}: loss {lost / 250:.4f}", flush=True)
            lost = 0.0
    return average


def main() -> None:
    """Train on the digits that the example classifier was trained on, and write the folder."""
    import numpy as np
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument("--steps", type=int, default=6000, help="of 128 images")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    training = np.random.default_rng(0).permutation(len(digits.target))[597:]
    images = torch.tensor(digits.images[training, None] / 8 - 1, dtype=torch.float32)
    model: Any = train(images, torch.tensor(digits.target[training]), options.steps)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    model.to(torch.float16).save_pretrained(options.output)


if __name__ == "__main__":
    main()
