"""Representatives of what holds on every device: each on the GPU beside the CPU, by the logits of a tiny Llama.

    difference = |logits of the GPU - logits of the CPU| / |logits of the CPU|
    bound      = sums + share * loss,  loss = |logits of the CPU - float logits| / |float logits|

A GPU sums in another order, so its logits differ by some roundings: `sums` is 16 units of the dtype, 1e-5 in float32.
That alone is allowed where weights are rounded to nearest, as their codes need no sum. Where inputs are rounded too, a
sum beside a tie becomes the other code: half the loss. What an algorithm solves or learns is one of many solutions of
about the same loss: two of them are apart by up to the root of 2 times it, and the loss on the GPU may be 1.25 times as
large. The share for each kind is in the column of bounds, as the number that follows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.rows import Found, Report
from quark.core.schemes import SCHEMES
from quark.torch import LLMTemplate, ModelQuantizer, accelerate, import_model_from_gguf, import_model_from_safetensors
from quark.torch.config.algo_configs import AlgoConfig, AutoRoundConfig, DistillationConfig
from quark.torch.config.named_algorithms import algo_config_by_name
from tests.commands.program import quark
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, text_windows, tiny_llama, token_batches

UNTIL = 0.55
"""Share of the time after which none is begun."""
BATCHES = token_batches(4)
SEEN, HELD_OUT = BATCHES[:3], BATCHES[3]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HALF_SCHEMES = ("uint4_wo_128", "fp8", "mxfp4")
"""Also in float16."""
ALGORITHMS = {
    "awq": "uint4_wo_32", "smooth": "int8", "gptq": "uint4_wo_32", "gptaq": "uint4_wo_32", "qronos": "uint4_wo_32",
    "importance": "uint4_wo_32", "rotation": "int8", "quarot": "int8", "autoround": "uint4_wo_32",
    "distillation": "uint4_wo_32",
}  # fmt: skip
"""Algorithm -> a scheme under which it has something to do."""
FEW: dict[str, AlgoConfig] = {
    "autoround": AutoRoundConfig(iters=8, lr=0.04, minmax_lr=0.02, batch_size=2),
    "distillation": DistillationConfig(epochs=2, lr=0.01, scale_lr=0.001),
}
"""Learners, for as long as shows that they run."""
TIES, SOLVED = 0.5, 2**0.5
LARGER_LOSS = 1.25


def sums(dtype: torch.dtype) -> float:
    """What another order of sums may change, relative."""
    return max(16 * torch.finfo(dtype).eps / 2, 1e-5)


def float_model(dtype: torch.dtype, device: Any) -> Any:
    return tiny_llama(dtype=dtype).to(device)


def logits(model: Any, ids: torch.Tensor = HELD_OUT) -> torch.Tensor:
    """Of data that no algorithm has seen, float32 on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(ids.to(device)).logits.float().cpu()


@cache
def float_logits(dtype: torch.dtype) -> torch.Tensor:
    return logits(float_model(dtype, "cpu"))


def quantized(device: Any, dtype: torch.dtype, scheme: str, algorithm: str | None = None, **options: Any) -> Any:
    """The tiny Llama, quantized on a device."""
    algorithms = [FEW.get(algorithm) or algo_config_by_name(algorithm)] if algorithm else []
    config = LLMTemplate.get("llama").get_config(scheme, algorithms, **options)
    torch.manual_seed(0)
    return ModelQuantizer(config).quantize_model(float_model(dtype, device), [x.to(device) for x in SEEN])


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|; infinite where a number is not finite."""
    found = float((a - b).norm() / b.norm())
    return found if found == found else float("inf")


def judged(found: torch.Tensor, host: torch.Tensor, base: torch.Tensor, room: float, share: float) -> Found:
    """The verdict on logits of a device.

    Args:
        found, host, base: Logits of the device, of the CPU, and of the float model.
        room: What sums may change.
        share: Of the loss that is allowed on top; for `SOLVED` the loss is held against the CPU's, too.
    """
    if torch.equal(found, host):
        return Found("0", verdict="equal")
    loss, difference = apart(host, base), apart(found, host)
    bound = room + share * loss
    value, within = f"{difference:.2g}", difference <= bound
    if share == SOLVED:
        ratio = apart(found, base) / loss
        value, within = f"{value}, loss x {ratio:.3f}", within and ratio <= LARGER_LOSS
    return Found(value, f"{bound:.2g}", "within" if within else "BEYOND")


def quantization(
    report: Report, dtype: torch.dtype, share: float, scheme: str, algorithm: str | None = None, **options: Any
) -> Found:
    """One configuration on the device and on the CPU."""
    found = logits(quantized(report.device, dtype, scheme, algorithm, **options))
    host = logits(quantized("cpu", dtype, scheme, algorithm, **options))
    return judged(found, host, float_logits(dtype), sums(dtype), share)


def share_of(scheme: str) -> float:
    """Of the loss, for rounding to nearest under a scheme."""
    return TIES if SCHEMES[scheme].input is not None else 0.0


def generated(report: Report) -> Found:
    """Greedy tokens, the model quantized once on the CPU: only what runs it differs."""
    model, ids = quantized("cpu", torch.float32, "uint4_wo_32"), HELD_OUT[:1, :8]
    options: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        host = model.generate(ids, **options)
        found = model.to(report.device).generate(ids.to(report.device), **options).cpu()
    same = int((found == host)[0, 8:].long().cumprod(0).sum())
    return Found(f"{same} of 16 tokens", "16", "equal" if same == 16 else "BEYOND")


def accelerated(report: Report, scheme: str) -> Found:
    """Layers that multiply with their codes, beside those that decode them on the CPU."""
    dtype = torch.bfloat16
    found = logits(accelerate(ModelQuantizer.freeze(quantized(report.device, dtype, scheme))))
    host = logits(quantized("cpu", dtype, scheme))
    # A kernel keeps in float32 what the frozen layer rounds to the dtype: its weight and its scales.
    return judged(found, host, float_logits(dtype), 2 * sums(dtype), share_of(scheme))


def by_command(*arguments: object, share: float, gguf: bool = False) -> Found:
    """`quark quantize` of the example language model with --device; logits of what it wrote, read on the CPU."""
    windows, written = text_windows("heldout", 32, 2), []
    with tempfile.TemporaryDirectory() as scratch:
        for device in ("cuda", "cpu"):
            output = Path(scratch) / (f"{device}.gguf" if gguf else device)
            done = quark("quantize", LANGUAGE_MODEL, *arguments, "--device", device, "-o", output)
            if done.code:
                said = (done.err.strip().splitlines() or ["it said nothing"])[-1]
                raise RuntimeError(f"{device}: {said}")
            written.append(logits(read(output, gguf), torch.cat([x.reshape(1, -1) for x in windows])))
        base = logits(plain_language_model(), torch.cat([x.reshape(1, -1) for x in windows]))
    return judged(*written, base, sums(torch.float16), share)  # it is stored, and streamed, in float16


def plain_language_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()


def read(output: Path, gguf: bool) -> Any:
    if gguf:
        return import_model_from_gguf(plain_language_model(), output)
    return import_model_from_safetensors(plain_language_model(), output)


def cases(report: Report) -> dict[str, Callable[[], Found]]:
    """Name -> what is run; those that say most first."""
    found: dict[str, Callable[[], Found]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, scheme in ALGORITHMS.items():
            found[f"{name} {scheme} {NAMES[dtype]}"] = partial(quantization, report, dtype, SOLVED, scheme, name)
        cache_too = partial(quantization, report, dtype, TIES, "uint4_wo_32")
        found[f"kv cache and attention fp8 {NAMES[dtype]}"] = partial(
            cache_too, kv_cache_scheme="fp8", attention_scheme="fp8"
        )
    found["gptq uint4_wo_32 float16"] = partial(quantization, report, torch.float16, SOLVED, "uint4_wo_32", "gptq")
    text = ("--calib", TEXT / "calibration.txt", "--samples", 4, "--length", 64)
    streamed = partial(by_command, "--stream", "--scheme")
    found["streamed uint4_wo_32"] = partial(streamed, "uint4_wo_32", share=0.0)
    found["streamed gptq uint4_wo_32"] = partial(streamed, "uint4_wo_32", "--algorithm", "gptq", *text, share=SOLVED)
    found["streamed int8"] = partial(streamed, "int8", *text, share=TIES)
    for name in ("q4_0", "q4_k_m"):
        found[f"gguf {name}"] = partial(by_command, "--scheme", name, "--export-format", "gguf", share=0.0, gguf=True)
    found["generate uint4_wo_32"] = partial(generated, report)
    for scheme in ("uint4_wo_32", "int8_wo", "int8_dynamic", "fp8"):
        found[f"accelerate {scheme} bfloat16"] = partial(accelerated, report, scheme)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scheme in SCHEMES if dtype != torch.float16 else HALF_SCHEMES:
            found[f"{scheme} {NAMES[dtype]}"] = partial(quantization, report, dtype, share_of(scheme), scheme)
    return found


def run(report: Report) -> None:
    """One row for each case."""
    for name, action in cases(report).items():
        report.run("contracts", name, action, UNTIL)
