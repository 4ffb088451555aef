"""Outputs of the PyTorch flow: every scheme in every file format, and what the quantized model computes."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fingerprint.outputs import MODELS, OUT, add, hash_arrays
from quark.core.schemes import SCHEMES
from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.formats import FORMATS

FOLDER = "models/language_model"
"""Seen from the folder in which outputs are written."""


@cache
def tokens() -> list[torch.Tensor]:
    """Two batches of calibration data, (1, 64) each."""
    text = (MODELS / "text" / "calibration.txt").read_text(encoding="utf-8")[:4000]
    ids = AutoTokenizer.from_pretrained(MODELS / "language_model")(text, return_tensors="pt").input_ids[0]
    return list(ids[: 2 * 64].reshape(2, 1, 64))


def float_model(dtype: torch.dtype = torch.float16) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()


@lru_cache(maxsize=1)
def quantized(scheme: str) -> Any:
    """The language model under a scheme, frozen; outputs of one scheme follow each other, so one is kept."""
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    return quantizer.freeze(quantizer.quantize_model(float_model(), tokens()))


def logits(model: Any) -> str:
    with torch.no_grad():
        return hash_arrays(model(tokens()[1]).logits.float())


def forward(scheme: str) -> str:
    """What the quantized model computes: live activations are in no file."""
    return logits(quantized(scheme))


def folder(scheme: str, form: str) -> str:
    """A checkpoint, and what is computed after it is read back."""
    export_safetensors(quantized(scheme), OUT / "model", form)
    return logits(import_model_from_safetensors(float_model(), OUT / "model"))


def gguf(scheme: str) -> None:
    export_gguf(quantized(scheme), OUT / "model", "model", tokenizer_path=FOLDER)


def onnx(scheme: str) -> None:
    """A network under a scheme as one ONNX file."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 40)).eval()
    x = torch.randn(4, 128)
    config = LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])
    export_onnx(ModelQuantizer(config).quantize_model(network, [x]), OUT, x, input_names=["x"], overwrite=True)


for _scheme in SCHEMES:
    add(f"torch/schemes/{_scheme}/forward", forward, _scheme)
    for _form in FORMATS:
        add(f"torch/schemes/{_scheme}/{_form}", folder, _scheme, _form)
    add(f"torch/schemes/{_scheme}/gguf", gguf, _scheme)
    add(f"torch/onnx/{_scheme}", onnx, _scheme)
