"""What a user with `mypy --strict` sees of the public calls; `make check` reads this file, and nothing runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import assert_type

import quark
from quark.errors import QuarkError
from quark.jobs.compare import ComparedSchemes
from quark.torch import LLMTemplate, ModelQuantizer, QConfig, accelerate, export_safetensors


def in_one_call(model: torch.nn.Linear) -> None:
    """A module stays of its class; a path gives a path."""
    assert_type(quark.quantize(model, "int8_wo"), torch.nn.Linear)
    assert_type(quark.quantize("llama", goal="llama.cpp", output="llama.gguf"), Path)
    assert_type(quark.compare("cnn.onnx", ["A8W8", "XINT8"], calib="samples.npz"), ComparedSchemes)


def by_hand(model: torch.nn.Module) -> None:
    """Config, quantizer, file."""
    config = LLMTemplate.get("llama").get_config("uint4_wo_128", "gptq")
    assert_type(config, QConfig)
    quantizer = ModelQuantizer(config)
    try:
        made = quantizer.freeze(quantizer.quantize_model(model, [torch.zeros(1, 8, dtype=torch.int64)]))
    except QuarkError as error:
        raise SystemExit(str(error)) from None
    assert_type(accelerate(made), torch.nn.Module)
    export_safetensors(made, Path("out"))
