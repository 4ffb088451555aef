"""Static w8a8 calibration of a small random Llama, against the float forward of the same data.

Six layers, hidden 1024, float32, int8 per tensor for weights and inputs (min_max), lm_head
excluded; 8 batches of 1 x 512 tokens from a DataLoader. Each round makes a fresh model, runs one
forward as a warm-up, times the float forward of all batches under no_grad, then times
`quantize_model` on the same model and batches. The first round is reported as `first_*` (the peer
may compile there, with an empty compiler cache), the others as medians. `ratio` is the median of
the ratios within each round; `cpu_ratio` is the same in CPU seconds of the process, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

ROUNDS = 2
BATCHES = 8
TOKENS = 512
VOCABULARY = 2048


class Seconds(NamedTuple):
    """Duration of one action, on the clock and in CPU time of all threads."""

    wall: float
    cpu: float


def seconds_of(action: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def run_round() -> tuple[Seconds, Seconds]:
    """Durations of the float forward and of quantize_model, on one fresh model."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from quark.torch import ModelQuantizer
    from quark.torch.quantization import Int8PerTensorSpec, QConfig, QLayerConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=2752,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=8,
        )
    ).eval()
    loader = DataLoader(torch.randint(0, VOCABULARY, (BATCHES, TOKENS)), batch_size=1)

    spec = Int8PerTensorSpec(observer_method="min_max", is_dynamic=False)
    layer = QLayerConfig(weight=spec.to_quantization_spec(), input_tensors=spec.to_quantization_spec())
    quantizer = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"]))

    def forward() -> None:
        for batch in loader:
            model(batch)

    with torch.no_grad():
        model(next(iter(loader)))
        float_seconds = seconds_of(forward)
    return float_seconds, seconds_of(lambda: quantizer.quantize_model(model, loader))


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        (first_forward, first_quantize), *rounds = [run_round() for _ in range(1 + ROUNDS)]
    result = {
        "benchmark": "calibrate_w8a8",
        "first_ratio": first_quantize.wall / first_forward.wall,
        "first_quantize_seconds": first_quantize.wall,
        "forward_seconds": statistics.median(forward.wall for forward, _ in rounds),
        "quantize_seconds": statistics.median(quantize.wall for _, quantize in rounds),
        "ratio": statistics.median(quantize.wall / forward.wall for forward, quantize in rounds),
        "cpu_ratio": statistics.median(quantize.cpu / forward.cpu for forward, quantize in rounds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
