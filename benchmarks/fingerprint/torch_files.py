"""What the PyTorch flow writes: every scheme in every file format, from memory, from disk and in blocks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint.outputs import OUT, add
from benchmarks.fingerprint.program import quark
from benchmarks.fingerprint.torch_models import (
    FOLDER,
    LLAMA,
    language_model,
    linears,
    logits,
    quantized,
    tokens,
    vectors,
)
from quark.core.schemes import SCHEMES
from quark.torch import (
    LLMTemplate,
    ModelExporter,
    ModelQuantizer,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_gguf,
    import_model_from_safetensors,
)
from quark.torch.formats import FORMATS

CALIBRATION = "models/text/calibration.txt"


@lru_cache(maxsize=1)
def under(scheme: str) -> Any:
    """The language model under a scheme; outputs of one scheme follow each other, so one is kept."""
    return quantized(LLAMA.get_config(scheme), language_model(), tokens())


def forward(scheme: str) -> str:
    return logits(under(scheme))


def folder(scheme: str, form: str, options: dict[str, Any] | None = None) -> str:
    """A checkpoint, and what is computed after it is read back."""
    export_safetensors(under(scheme), OUT / "model", form, **(options or {}))
    return logits(import_model_from_safetensors(language_model(), OUT / "model"))


def gguf(scheme: str) -> str:
    file = export_gguf(under(scheme), OUT / "model", "model", tokenizer_path=FOLDER)
    return logits(import_model_from_gguf(language_model(), file))


def onnx(scheme: str, options: dict[str, Any] | None = None) -> None:
    """A network under a scheme as one ONNX file."""
    config = LLMTemplate.get("auto").get_config(scheme, exclude_layers=[])
    model = ModelQuantizer(config).quantize_model(linears(), vectors())
    export_onnx(model, OUT, vectors()[0], input_names=["x"], **{"uint4_int4_flag": True, **(options or {})})


def onnx_language_model(scheme: str) -> None:
    model = quantized(LLAMA.get_config(scheme), language_model(torch.float32), tokens())
    ModelExporter(OUT).export_onnx_model(model, tokens()[0])


def from_file(source: str, scheme: str, options: dict[str, Any]) -> None:
    ModelQuantizer(LLAMA.get_config(scheme)).direct_quantize_checkpoint(source, OUT / "model", **options)


def from_quantized_file(stored: str, form: str, scheme: str) -> None:
    """A checkpoint that is quantized already is decoded and quantized anew."""
    export_safetensors(under(stored), Path("stored"), form)
    from_file("stored", scheme, {})


def command(*options: str) -> str:
    """`quark quantize` of the language model."""
    return quark("quantize", FOLDER, "-o", str(OUT / "model"), *options)


for _scheme in SCHEMES:
    add(f"torch/schemes/{_scheme}/forward", forward, _scheme)
    for _form in FORMATS:
        add(f"torch/schemes/{_scheme}/{_form}", folder, _scheme, _form)
    add(f"torch/schemes/{_scheme}/gguf", gguf, _scheme)
    add(f"torch/onnx/schemes/{_scheme}", onnx, _scheme)
    add(f"torch/file2file/{_scheme}", from_file, FOLDER, _scheme, {})
for _name, _options in {
    "fake_quantized": {"weight_format": "fake_quantized"},
    "order": {"pack_method": "order"},
    "shards": {"max_shard_size": "2MB"},
}.items():
    add(f"torch/folder/{_name}", folder, "uint4_wo_64", "quark", _options)
    add(f"torch/file2file/{_name}", from_file, FOLDER, "uint4_wo_64", _options)
for _form, _stored in (("compressed-tensors", "int4_wo_64"), ("compressed-tensors", "fp8"), ("quark", "int8_wo")):
    add(f"torch/file2file/from/{_form}/{_stored}", from_quantized_file, _stored, _form, "mxfp4")
for _name, _options in {
    "opset": {"opset_version": 21},
    "bytes": {"uint4_int4_flag": False},
    "unfolded": {"do_constant_folding": False},
    "dynamic": {"dynamic_shapes": ({0: "batch"},)},
}.items():
    add(f"torch/onnx/options/{_name}", onnx, "uint4_wo_64", _options)
for _scheme in ("int8", "uint4_wo_64"):
    add(f"torch/onnx/language_model/{_scheme}", onnx_language_model, _scheme)
_DATA = ("--calib", CALIBRATION, "--samples", "1")
for _name, _arguments in {
    "int8": ("--scheme", "int8", *_DATA),
    "mxfp4": ("--scheme", "mxfp4"),
    "gptq": ("--scheme", "int3_wo_128", "--algorithm", "gptq", *_DATA),
    "cache": ("--scheme", "uint4_wo_32", "--kv-cache", "fp8", "--attention", "fp8", *_DATA),
    "layers": ("--scheme", "int8_wo", "--layer", "*.down_proj=mxfp4", "--exclude", "*.o_proj"),
}.items():
    add(f"torch/command/{_name}/memory", command, *_arguments, "--no-stream")
    add(f"torch/command/{_name}/stream", command, *_arguments, "--stream")
add("torch/command/gguf", command, "--scheme", "int4_wo_32", "--export-format", "gguf")
add("torch/command/onnx", command, "--scheme", "int8_wo", "--export-format", "onnx")
