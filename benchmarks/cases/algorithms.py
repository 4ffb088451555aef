"""Accuracy algorithms on a small random Llama, against the float forward of the same data.

Six layers, hidden 1024, float32, lm_head excluded; 16 batches of 1 x 512 tokens. Cases: GPTQ and AWQ on uint4 in
groups of 128, SmoothQuant with static int8 per tensor. A fresh model for each case: one warm-up, the float forward of
all batches, then `quantize_model`. `ratio` is wall time over wall time, `cpu_ratio` the same in CPU seconds of the
process, `peak_extra_mb` the growth of its peak memory over what it was with the model loaded and run.
Give names of cases as arguments to run only those; the peer takes minutes for each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCHES, TOKENS, VOCABULARY = 16, 512, 2048
CASES = ("gptq", "awq", "smooth")
INSIDE = [
    *(f"self_attn.{name}_proj" for name in ("k", "v", "q", "o")),
    *(f"mlp.{name}_proj" for name in ("up", "gate", "down")),
]
SCALING = [
    {
        "prev_op": "input_layernorm",
        "layers": [f"self_attn.{n}_proj" for n in "qkv"],
        "inp": "self_attn.q_proj",
        "module2inspect": "self_attn",
    },
    {
        "prev_op": "post_attention_layernorm",
        "layers": ["mlp.gate_proj", "mlp.up_proj"],
        "inp": "mlp.gate_proj",
        "module2inspect": "mlp",
    },
    {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
]


def seconds_of(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def config_of(case: str) -> Any:
    """The documented config of one case."""
    from quark.torch.quantization import Int8PerTensorSpec, QConfig, QLayerConfig, Uint4PerGroupSpec
    from quark.torch.quantization.config.config import AWQConfig, GPTQConfig, SmoothQuantConfig

    if case == "smooth":
        tensor = Int8PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
        algorithm = SmoothQuantConfig(alpha=0.5, scaling_layers=SCALING[:2], model_decoder_layers="model.layers")
        layer = QLayerConfig(weight=tensor, input_tensors=tensor)
    else:
        tensor = Uint4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()
        layer = QLayerConfig(weight=tensor)
        algorithm = (
            GPTQConfig(inside_layer_modules=INSIDE, model_decoder_layers="model.layers")
            if case == "gptq"
            else AWQConfig(scaling_layers=SCALING, model_decoder_layers="model.layers")
        )
    return QConfig(global_quant_config=layer, exclude=["lm_head"], algo_config=[algorithm])


def run(case: str) -> dict[str, float]:
    """One case in this process."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from quark.torch import ModelQuantizer

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=8,
        )
    ).eval()
    data = list(DataLoader(torch.randint(0, VOCABULARY, (BATCHES, TOKENS)), batch_size=1))

    def forward() -> None:
        with torch.no_grad():
            for batch in data:
                model(batch)

    model(data[0])
    wall, cpu = seconds_of(forward)
    before = peak()
    quantizer = ModelQuantizer(config_of(case))
    taken, used = seconds_of(lambda: quantizer.quantize_model(model, DataLoader(torch.cat(data), batch_size=1)))
    return {
        "forward_seconds": wall,
        "seconds": taken,
        "ratio": taken / wall,
        "cpu_ratio": used / cpu,
        "peak_extra_mb": peak() - before,
    }


def peak() -> float:
    """Peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if len(names) == 1:
        print(json.dumps({names[0]: run(names[0])}))
        return
    result: dict[str, Any] = {}
    for name in names:
        # A process for each case: peak memory never falls.
        line = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True).stdout
        result |= json.loads(line.strip().splitlines()[-1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
