"""Layers that multiply with their codes, against the float layer, and tokens of `generate`; one thread.

`layers`: the time of an accelerated bfloat16 layer of 4096 x 4096 over that of the float one, for 1 row (a token that
is decoded) and 64 (a prompt); for int8 inputs in float32 too. Layers take turns; the fewest CPU seconds of each count.
`generate`: 32 tokens after 8, by a random bfloat16 Llama of four layers of hidden size 2048, and `generate_small` by
one of the shape of the example model, whose products take less time than a call: tokens per second, and the time of
the accelerated model over that of the float one. `kernels` are the kernels that were chosen.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

SIZE, RUNS = 4096, 40
TOKENS, GENERATIONS = 32, {"generate": 3, "generate_small": 15}
SHAPES = {
    "generate": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "generate_small": {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SCHEMES = {"uint4_g128": "uint4_wo_128", "int8": "int8_wo", "int8_int8": "int8_dynamic"}


def shortest(functions: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """The shortest of some runs of each function, in CPU seconds; the first run of each is a warm-up."""
    times = {name: float("inf") for name in functions}
    for run in range(runs + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if run:
                times[name] = min(times[name], time.process_time() - start)
    return times


def accelerated(model: Any, scheme: str, exclude: list[str]) -> Any:
    """A quantized copy of the model with the kernels of this machine."""
    from quark.torch import LLMTemplate, ModelQuantizer, accelerate
    from quark.torch.quantization import QConfig

    quantizer = ModelQuantizer(QConfig(global_quant_config=LLMTemplate.scheme(scheme), exclude=exclude))
    return accelerate(quantizer.freeze(quantizer.quantize_model(copy.deepcopy(model))))


def kernels_of(model: Any) -> list[str]:
    return sorted({module.kernel.name for module in model.modules() if getattr(module, "is_packed", False)})


def layers() -> dict[str, Any]:
    """Ratios by dtype, scheme and number of rows."""
    import torch
    from torch import nn

    result: dict[str, Any] = {}
    for dtype, names in ((torch.bfloat16, list(SCHEMES)), (torch.float32, ["int8_int8"])):
        floats = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).to(dtype)
        models = {name: accelerated(floats, SCHEMES[name], []) for name in names}
        found: dict[str, Any] = {name: {"kernels": kernels_of(model)} for name, model in models.items()}
        for rows in (1, 64):
            x = torch.randn(rows, SIZE).to(dtype)
            calls = {name: partial(model, x) for name, model in {"float": floats, **models}.items()}
            seconds = shortest(calls, RUNS)
            for name in names:
                found[name][f"rows_{rows}"] = seconds[name] / seconds["float"]
        result[str(dtype).removeprefix("torch.")] = found
    return result


def generation(shape: Mapping[str, int], generations: int) -> dict[str, Any]:
    """Tokens per second and times of `generate`, by scheme."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=2048, **shape)  # type: ignore[arg-type]
    floats = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    models = {"float": floats, **{name: accelerated(floats, scheme, ["lm_head"]) for name, scheme in SCHEMES.items()}}
    ids = torch.randint(0, 2048, (1, 8))
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    calls = {name: partial(model.generate, ids, **options) for name, model in models.items()}
    seconds = shortest(calls, generations)
    return {
        name: {"time": spent / seconds["float"], "tokens_per_second": TOKENS / spent, "kernels": kernels_of(model)}
        for (name, model), spent in zip(models.items(), seconds.values(), strict=True)
    }


def main() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        generated = {name: generation(shape, GENERATIONS[name]) for name, shape in SHAPES.items()}
        result = {"benchmark": "kernels", "layers": layers(), **generated}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
