"""`python -m benchmarks.gpu`: the figures that need a GPU, each as a ratio or against a limit of the same run.

    fake-quantization   bytes read and written per second, as a share of what a copy of the tensor reaches
    GPTQ                one block of Llama-8B shape (4096, 14336), 16 x 2048 tokens, uint4 g128: seconds
    equality            codes and outputs equal to the CPU's

`--device cpu --small` runs the same code on small shapes, so that it stays alive on machines without a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

SPECS = {"int8": "int8", "fp8": "fp8", "mxfp4": "mxfp4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No GPU is there. Possible: --device cpu --small.")
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "fake_quantize": fake_quantization(device, 512 if options.small else 8192),
        "gptq": gptq_block(device, options.small),
    }
    print(json.dumps(result, indent=2))


def fake_quantization(device: torch.device, size: int) -> dict[str, Any]:
    """Share of copy bandwidth of eager and compiled fake-quantization, and equality with the CPU."""
    from quark.core.quantize import compute_qparams, fake_quantize
    from quark.core.schemes import SCHEMES

    torch.manual_seed(0)
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    copy = seconds(lambda: x.clone(), device)
    rows: dict[str, Any] = {"copy_gb_per_s": 2 * x.numel() * x.element_size() / copy / 1e9}
    for name, scheme in SPECS.items():
        spec = SCHEMES[scheme].weight
        assert spec is not None
        params = compute_qparams(x, spec)
        compiled = torch.compile(lambda x, params=params, spec=spec: fake_quantize(x, params, spec))
        found = fake_quantize(x, params, spec)
        expected = fake_quantize(x.cpu(), compute_qparams(x.cpu(), spec), spec)
        rows[name] = {
            "eager_share": copy / seconds(lambda params=params, spec=spec: fake_quantize(x, params, spec), device),
            "compiled_share": copy / seconds(lambda run=compiled: run(x), device),
            "equal_to_cpu": bool(torch.equal(found.cpu(), expected)),
        }
    return rows


def gptq_block(device: torch.device, small: bool) -> dict[str, Any]:
    """Seconds for one block, peak memory, and its output error beside that of rounding to nearest."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from quark.torch import ModelQuantizer
    from quark.torch.quantization import GPTQConfig, QConfig, QLayerConfig, Uint4PerGroupSpec

    hidden, inner, batches, tokens = (256, 512, 4, 64) if small else (4096, 14336, 16, 2048)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
    )
    spec = Uint4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()
    torch.manual_seed(0)
    data = list(torch.randint(0, 1024, (batches, 1, tokens), device=device))
    errors = {}
    result: dict[str, Any] = {}
    for name, algorithms in {"none": None, "gptq": [GPTQConfig()]}.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
        with torch.no_grad():
            reference = model(data[0]).logits.float()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        settings = QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"], algo_config=algorithms)
        model = ModelQuantizer(settings).quantize_model(model, data)
        if device.type == "cuda":
            torch.cuda.synchronize()
            result[f"{name}_peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        result[f"{name}_seconds"] = time.perf_counter() - start
        with torch.no_grad():
            errors[name] = float((model(data[0]).logits.float() - reference).square().mean())
    return {**result, "error_of_rounding": errors["gptq"] / errors["none"]}


def seconds(action: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of an action, warmed up."""
    times = []
    for index in range(repeats + 5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 5:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
