"""Weight solvers at the shape of a 1 billion Llama: hidden 2048, intermediate 5632, three layers of it.

Random weights whose norms have a few strong channels; 8 x 512 random tokens. A process for each case: one warm-up, the
float forward of all batches, then `quantize_model`. Cases: GPTQ, AWQ, GPTAQ and Qronos on uint4 in groups of 128.

    forward_seconds, forward_cpu             of the float forward, wall and CPU time
    seconds, cpu_seconds                     of `quantize_model`
    peak_extra_mb                            growth of the peak memory over what it was with the model loaded and run
    layer_error                              mean over the layers of |x (W - Q)^T|^2 / |x W^T|^2, x the float model's
    kl                                       mean KL(float || quantized) of the next token, in nats

Both errors are on 512 tokens that were not used. Names of cases as arguments run only those; --shape wide takes one
layer of 4096 x 14336, --batches 128 as many as users take. Beside other packages: `python -m benchmarks.solver_peers`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int


SHAPES = {"1b": Shape(2048, 5632, 3, 32, 4), "wide": Shape(4096, 14336, 1, 32, 8)}
DTYPES = ("bfloat16", "float32")
VOCABULARY, TOKENS, BATCHES = 2048, 512, 8
STRONG, FACTOR = 6, 12.0
CASES = ("gptq", "awq", "gptaq", "qronos", "importance")
OURS = ("importance",)
"""Cases that only this package has."""


def config_of(case: str) -> Any:
    """The documented config of one case."""
    from quark.torch.quantization import QConfig, QLayerConfig, Uint4PerGroupSpec
    from quark.torch.quantization.config import config as configs

    inside = [f"self_attn.{name}_proj" for name in "kvqo"] + [f"mlp.{name}_proj" for name in ("up", "gate", "down")]
    names: dict[str, Any] = {"inside_layer_modules": inside, "model_decoder_layers": "model.layers"}
    if case == "gptq":
        algorithm: Any = configs.GPTQConfig(**names)
    elif case == "gptaq":
        algorithm = configs.GPTAQConfig(**names)
    elif case == "qronos":
        algorithm = configs.QronosConfig(**names)
    elif case == "awq":
        algorithm = configs.AWQConfig(scaling_layers=scaling(), model_decoder_layers="model.layers")
    else:
        algorithm = configs.ImportanceScaleConfig()
    layer = QLayerConfig(weight=Uint4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec())
    return QConfig(global_quant_config=layer, exclude=["lm_head"], algo_config=[algorithm])


def scaling() -> list[dict[str, Any]]:
    """What AWQ may scale, in the documented form."""
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    gates = ["mlp.gate_proj", "mlp.up_proj"]
    return [
        {"prev_op": "input_layernorm", "layers": attention, "inp": attention[0], "module2inspect": "self_attn"},
        {"prev_op": "post_attention_layernorm", "layers": gates, "inp": gates[0], "module2inspect": "mlp"},
        {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
    ]


def model_of(shape: Shape, dtype: Any) -> Any:
    """The float model; some channels of every norm are FACTOR times as strong."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.model.layers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[torch.randperm(shape.hidden)[:STRONG]] = FACTOR
    return model.to(dtype)


def measured(shape: Shape, type_name: str, batches: int, work: Callable[[Any, Any], Any]) -> dict[str, float]:
    """Costs and errors of one package in this process.

    Args:
        shape, type_name, batches: Of the model, and of its calibration data.
        work: Takes the float model and the data, (batches, TOKENS); gives the model that computes with what was found.
    """
    import torch

    dtype = getattr(torch, type_name)
    model = model_of(shape, dtype)
    tokens = torch.randint(0, VOCABULARY, (batches + 1, TOKENS))
    with torch.no_grad():
        model(tokens[:1])
        start, used = time.perf_counter(), time.process_time()
        for row in tokens[:batches]:
            model(row[None])
        forward, forward_cpu = time.perf_counter() - start, time.process_time() - used
    before = peak()
    start, used = time.perf_counter(), time.process_time()
    quantized = work(model, tokens[:batches])
    result = {
        "forward_seconds": forward,
        "forward_cpu": forward_cpu,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
        "peak_extra_mb": peak() - before,
    }
    with torch.no_grad():
        return result | errors(model_of(shape, dtype), quantized, tokens[batches:])


def run(case: str, shape: Shape, type_name: str, batches: int) -> dict[str, float]:
    """One case in this process."""

    def work(model: Any, tokens: Any) -> Any:
        from torch.utils.data import DataLoader

        from quark.torch import ModelQuantizer

        quantizer = ModelQuantizer(config_of(case))
        found = quantizer.quantize_model(model, DataLoader(tokens, batch_size=1))
        # Frozen, so that every weight is what the layer computes with, solved or only scaled.
        return quantizer.freeze(found)

    return measured(shape, type_name, batches, work)


def errors(float_model: Any, quantized: Any, tokens: Any) -> dict[str, float]:
    """How far the quantized model is from the float one."""
    import torch
    from torch.nn import functional

    found = []

    def compare(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            x, inner = args[0].float(), quantized.get_submodule(name)
            expected = functional.linear(x, module.weight.float())
            lost = functional.linear(x, inner.weight.float()) - expected
            found.append(float(lost.square().sum() / expected.square().sum()))

        return hook

    # AWQ moves scales between layers, so its layers have no counterpart in the float model.
    for name, module in float_model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(compare(name))
    expected = float_model(tokens).logits.float().log_softmax(-1)
    other = quantized(tokens).logits.float().log_softmax(-1)
    kl = functional.kl_div(other, expected, reduction="none", log_target=True).sum(-1).mean()
    return {"layer_error": sum(found) / len(found), "kl": float(kl)}


def peak() -> float:
    """Peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def arguments() -> argparse.ArgumentParser:
    """What describes the model and its data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batches", type=int, default=BATCHES, help="of 512 tokens each")
    return parser


def main() -> None:
    parser = arguments()
    parser.add_argument("cases", nargs="*", help="some of: " + ", ".join(CASES))
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; possible: {', '.join(CASES)}")
    if len(args.cases) == 1:
        print(json.dumps({args.cases[0]: run(args.cases[0], SHAPES[args.shape], args.dtype, args.batches)}))
        return
    result: dict[str, Any] = {}
    for name in args.cases or CASES:
        # A process for each case: peak memory never falls. The peer has no `importance`.
        described = ["--shape", args.shape, "--dtype", args.dtype, "--batches", str(args.batches)]
        command = [sys.executable, __file__, *described, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode and name not in OURS:
            raise SystemExit(done.returncode)
        result |= json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
