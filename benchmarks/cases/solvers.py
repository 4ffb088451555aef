"""Weight solvers at the shape of a 1 billion Llama: hidden 2048, intermediate 5632, three layers of it.

Random weights whose norms have a few strong channels; 8 x 512 random tokens. A process for each case: one warm-up, the
float forward of all batches, then `quantize_model`. Cases: GPTQ, AWQ and Qronos on uint4 in groups of 128.

    forward_seconds, seconds, cpu_seconds    wall time of the forward, wall and CPU time of `quantize_model`
    peak_extra_mb                            growth of the peak memory over what it was with the model loaded and run
    layer_error                              mean over the layers of |x (W - Q)^T|^2 / |x W^T|^2, x the float model's
    kl                                       mean KL(float || quantized) of the next token, in nats

Both errors are on 512 tokens that were not used. Names of cases as arguments run only those; `float32` in front takes
that type instead of bfloat16.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, BATCHES, TOKENS = 2048, 5632, 3, 2048, 8, 512
STRONG, FACTOR = 6, 12.0
CASES = ("gptq", "awq", "qronos", "importance")
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


def model_of(dtype: Any) -> Any:
    """The float model; some channels of every norm are FACTOR times as strong."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.model.layers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[torch.randperm(HIDDEN)[:STRONG]] = FACTOR
    return model.to(dtype)


def run(case: str, type_name: str) -> dict[str, float]:
    """One case in this process."""
    import torch
    from torch.utils.data import DataLoader

    from quark.torch import ModelQuantizer

    model = model_of(getattr(torch, type_name))
    tokens = torch.randint(0, VOCABULARY, (BATCHES + 1, TOKENS))
    config = config_of(case)
    with torch.no_grad():
        model(tokens[:1])
        start = time.perf_counter()
        for row in tokens[:BATCHES]:
            model(row[None])
        forward = time.perf_counter() - start
        before = peak()
        start, used = time.perf_counter(), time.process_time()
        quantizer = ModelQuantizer(config)
        found = quantizer.quantize_model(model, DataLoader(tokens[:BATCHES], batch_size=1))
        result = {
            "forward_seconds": forward,
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - used,
            "peak_extra_mb": peak() - before,
        }
        # Frozen, so that every weight is what the layer computes with, solved or only scaled.
        return result | errors(model_of(getattr(torch, type_name)), quantizer.freeze(found), tokens[BATCHES:])


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


def main() -> None:
    type_name = "float32" if "float32" in sys.argv else "bfloat16"
    named = [name for name in sys.argv[1:] if name in CASES]
    if len(named) == 1:
        print(json.dumps({named[0]: run(named[0], type_name)}))
        return
    result: dict[str, Any] = {}
    for name in named or CASES:
        # A process for each case: peak memory never falls. The peer has no `importance`.
        done = subprocess.run(
            [sys.executable, __file__, type_name, name], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode and name not in OURS:
            raise SystemExit(done.returncode)
        result |= json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
