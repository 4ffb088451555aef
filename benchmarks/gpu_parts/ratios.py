"""How fast it is, as ratios of the same run: to a copy of memory, to a forward of the block, to bfloat16.

    share of the copy    (bytes read and written / seconds) / (the same of a copy of 1 GB from the device to itself)
    GPTQ                 seconds of `quantize_model` of one block / seconds of its forward over all samples
    its memory           peak above the model / what `quark.torch.flows.preflight.on_gpu` says but for the block
    accelerate           tokens a second of `generate` / those of the bfloat16 model

The page on large models has its table from the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.rows import Found, Report, median_seconds, once
from quark.core.kernels.trust import device_of
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.solvers.columns.block_solvers import SOLVERS
from quark.core.solvers.columns.kernels import Kernels
from quark.torch import GPTQConfig, LLMTemplate, ModelQuantizer, accelerate
from quark.torch.flows.preflight import on_gpu

WEIGHTS = ("int4_wo_128", "fp8", "mxfp4")
DECODED = ("uint4_wo_128", "int8_wo", "ptpc_fp8")


@dataclass(frozen=True)
class Shape:
    """A Llama, and its calibration data."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    samples: int = 16
    tokens: int = 512
    decoded_blocks: int = 4
    new_tokens: int = 32
    copied: int = 1 << 30

    def model(self, device: torch.device, blocks: int) -> Any:
        """With random weights, made on the device, in bfloat16."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)

    def data(self, device: torch.device) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        return [torch.randint(0, 1024, (1, self.tokens), generator=draw).to(device) for _ in range(self.samples)]

    def gptq_bytes(self, model: Any) -> int:
        """What GPTQ of a block needs above the model."""
        needed = on_gpu(model, self.samples * self.tokens)
        return needed.together - needed.block


SMALL = Shape(256, 512, 4, 2, 2, 32, 1, 4, 1 << 20)


def shape_of(report: Report) -> Shape:
    return SMALL if report.small else Shape()


def copy_speed(report: Report) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(shape_of(report).copied, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def copied(report: Report) -> Found:
    return Found(f"{copy_speed(report) / 1e9:.1f} GB/s", "", "told")


def fake_quantized(report: Report, scheme: str, compiled: bool = False) -> Found:
    """Shares of the copy's speed: of rounding alone, and with the search of its scales."""
    shape, rule = shape_of(report), SCHEMES[scheme].weight
    assert rule is not None
    torch.manual_seed(0)
    x = torch.randn(shape.hidden, shape.inner, dtype=torch.bfloat16).to(report.device)
    params = compute_qparams(x, rule)
    rounding = torch.compile(lambda x: fake_quantize(x, params, rule)) if compiled else None
    least = 2 * x.numel() * x.element_size() / copy_speed(report)
    rounded = least / median_seconds(partial(rounding or fake_quantize, x, *(() if rounding else (params, rule))))
    if compiled:
        return Found(f"{rounded:.1%}", "100%", "told")
    both = least / median_seconds(lambda: fake_quantize(x, compute_qparams(x, rule), rule))
    return Found(f"{rounded:.1%}, with its scales {both:.1%}", "100%", "told")


def gptq(report: Report, plain: bool) -> Found:
    """Seconds of one block over its forward, and the peak over the formula; with the kernels, or without."""
    shape = shape_of(report)
    config = LLMTemplate.get("llama").get_config("uint4_wo_128", [GPTQConfig()])
    data = shape.data(report.device)
    (kernels,) = (solver for solver in SOLVERS if isinstance(solver, Kernels))
    name = device_of(data[0])
    assert name is not None
    refused, asked = name in kernels.trust.refused, len(kernels.trust.passed)
    if plain:
        kernels.trust.refused.add(name)
    try:
        model = shape.model(report.device, 1)

        def forward() -> None:
            with torch.no_grad():
                for batch in data:
                    model.model(batch)

        forwards = median_seconds(forward, 5, 2)
        before, needed = torch.cuda.memory_allocated(), shape.gptq_bytes(model)
        torch.cuda.reset_peak_memory_stats()
        seconds = once(lambda: ModelQuantizer(config).quantize_model(model, data))
        peak = torch.cuda.max_memory_allocated() - before
    finally:
        if plain and not refused:
            kernels.trust.refused.discard(name)
    form = (
        "plain form"
        if name in kernels.trust.refused or plain
        else f"kernels, {len(kernels.trust.passed) - asked} compiled"
    )
    value = (
        f"{seconds:.2f} s, forward {forwards:.3f} s: x {seconds / forwards:.1f}; "
        f"peak {peak / 1e9:.2f} GB, x {peak / needed:.2f}"
    )
    return Found(value, f"{needed / 1e9:.2f} GB", form)


def decoded(report: Report, scheme: str | None) -> float:
    """Tokens a second of `generate`."""
    shape = shape_of(report)
    model, ids = shape.model(report.device, shape.decoded_blocks), shape.data(report.device)[0][:, :8]
    if scheme is not None:
        quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
        model = accelerate(quantizer.freeze(quantizer.quantize_model(model)))
    options: dict[str, Any] = {"max_new_tokens": shape.new_tokens, "min_new_tokens": shape.new_tokens}
    with torch.no_grad():
        call = partial(model.generate, ids, do_sample=False, pad_token_id=0, **options)
        return shape.new_tokens / median_seconds(call, 3, 1)


def decoding(report: Report, scheme: str) -> Found:
    base, found = decoded(report, None), decoded(report, scheme)
    return Found(f"{found:.1f} tokens/s, bfloat16 {base:.1f}: x {found / base:.2f}", "", "told")


def run(report: Report) -> None:
    """One row for each figure; those that compile at the end."""
    report.run("ratios", "copy on the device", partial(copied, report))
    for scheme in WEIGHTS:
        report.run("ratios", f"fake-quantize {scheme}", partial(fake_quantized, report, scheme))
    # The first run compiles kernels and loads libraries; the second is the one to read.
    for name, plain in (("first", False), ("again", False), ("plain form", True)):
        report.run("ratios", f"GPTQ of a block, {name}", partial(gptq, report, plain), needs=30)
    for scheme in DECODED:
        report.run("ratios", f"accelerate {scheme}", partial(decoding, report, scheme), needs=25)
    for scheme in () if report.small else WEIGHTS:
        report.run(
            "ratios", f"fake-quantize {scheme}, compiled", partial(fake_quantized, report, scheme, True), needs=40
        )
