"""Peers: `python peers.py PACKAGE METHOD SCHEME FOLDER TOKENS OUTPUT` quantizes one model, in the peer's environment.

No import of this package or of quark: each runs with the interpreter that has the peer. TOKENS is a JSON list of
windows of token ids. For llama.cpp, FOLDER is a GGUF file in float, and TOKENS its importance matrix as .npz.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP = 64
FIRST, FEW = 4, "first blocks"
"""Blocks that are quantized where all would take hours, and how the method of such a row ends."""
OTHERS = rf"re:.*layers\.(?!({'|'.join(map(str, range(FIRST)))})\.).*"
"""The blocks after these, as llm-compressor takes them."""
EMBEDDED = "embeddings.npy"
"""What a peer writes whose models only it can run: embeddings of the held-out sentences beside its model."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "uint4_wo_64": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP},
    "int4_wo_64": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
}
"""Scheme -> the weights of a scheme of compressed-tensors."""
NAMED = {"nvfp4": "NVFP4", "mxfp4": "MXFP4"}
"""Scheme -> what llm-compressor and auto-round call it."""


def _float_model(folder: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    # A processor without products of bfloat16 takes many times as long for them, and the values are the same.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def llm_compressor(method: str, scheme: str, folder: str, windows: list[list[int]], output: str) -> None:
    """GPTQ, AWQ or rounding to nearest by llm-compressor, as a folder of compressed-tensors."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    if not torch.cuda.is_available():  # its AWQ pins what it keeps for a GPU, and fails where there is none
        torch.Tensor.pin_memory = lambda tensor, *where: tensor
    model, tokenizer = _float_model(folder)
    kind = {"gptq": GPTQModifier, "awq": AWQModifier, "nearest": QuantizationModifier}[method.split()[0]]
    ignored = ["lm_head", OTHERS] if method.endswith(FEW) else ["lm_head"]
    what: dict[str, Any] = {"scheme": NAMED.get(scheme), "targets": "Linear"}
    if scheme in WEIGHTS:
        what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS[scheme]}}}
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]})
    oneshot(
        model=model, processor=tokenizer, dataset=data, recipe=kind(ignore=ignored, **what),
        max_seq_length=len(windows[0]), num_calibration_samples=len(windows),
    )  # fmt: skip
    model.save_pretrained(output, save_compressed=True)
    tokenizer.save_pretrained(output)


def auto_round(method: str, scheme: str, folder: str, windows: list[list[int]], output: str) -> None:
    """AutoRound with its default steps, as a folder of GPTQ or of its own; or of FIRST blocks, with rounded floats."""
    import torch
    from auto_round import AutoRound

    model, tokenizer = _float_model(folder)
    what: dict[str, Any] = {"scheme": NAMED.get(scheme)}
    if scheme in WEIGHTS:
        what = {"bits": 4, "group_size": GROUP, "sym": bool(WEIGHTS[scheme]["symmetric"])}
    few = method == FEW
    if few:
        what["to_quant_block_names"] = [[f"model.layers.{index}" for index in range(FIRST)]]
    rounder = AutoRound(
        model, tokenizer, dataset=[{"input_ids": torch.tensor([window])} for window in windows],
        nsamples=len(windows), seqlen=len(windows[0]), batch_size=8, device_map="cpu", **what,
    )  # fmt: skip
    whole = "auto_gptq" if scheme in WEIGHTS else "llm_compressor"
    rounder.quantize_and_save(output, format="fake" if few else whole)


def amd_quark(method: str, scheme: str, folder: str, windows: list[list[int]], output: str) -> None:
    """AMD Quark's own configurations for Llama, as a folder of quark."""
    import torch

    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    model, tokenizer = _float_model(folder)
    algorithm = None if method == "nearest" else method
    config = LLMTemplate.get("llama").get_config(scheme, algorithm=algorithm)
    quantizer = ModelQuantizer(config)
    made = quantizer.quantize_model(model, [torch.tensor([window]) for window in windows])
    export_safetensors(quantizer.freeze(made), output, custom_mode="quark")
    tokenizer.save_pretrained(output)


def llama_cpp(method: str, scheme: str, file: str, moments: str, output: str) -> None:
    """llama.cpp's own quantization of a GGUF file, with an importance matrix or without."""
    import ctypes

    import llama_cpp
    import numpy as np

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{scheme.upper()}")
    if method == "imatrix":
        held = {name: np.ascontiguousarray(values, np.float32) for name, values in np.load(moments).items()}
        rows = (llama_cpp.llama_model_imatrix_data * (len(held) + 1))()  # the last one, without a name, ends it
        for row, (name, values) in zip(rows, held.items(), strict=False):
            row.name, row.size = name.encode(), values.size
            row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = rows
    code = llama_cpp.llama_model_quantize(file.encode(), output.encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}.")


def pooled(hidden: Any, mask: Any) -> Any:
    """The mean of the states of words, of unit length, as arrays of numpy.

    Args:
        hidden: (sentences, tokens, width).
        mask: (sentences, tokens), 1 for a word and 0 for padding.
    """
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / (mean**2).sum(1, keepdims=True) ** 0.5


def torchao(method: str, scheme: str, folder: str, sentences: dict[str, list[list[int]]], output: str) -> None:
    """Torchao's own classes of linear layers, and the embeddings that they give."""
    import numpy as np
    import torch
    import torchao.quantization as kinds
    from transformers import AutoModel

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    made = {
        "int8_wo": lambda: kinds.Int8WeightOnlyConfig(),
        "int8_dynamic": lambda: kinds.Int8DynamicActivationInt8WeightConfig(),
        "int4_wo_128": lambda: kinds.IntxWeightOnlyConfig(torch.int4, granularity=kinds.PerGroup(128)),
    }
    kinds.quantize_(model, made[scheme]())
    place = Path(output)
    place.mkdir()
    torch.save(model.state_dict(), place / "model.pt")
    with torch.inference_mode():
        states = (model(torch.tensor([ids])).last_hidden_state.numpy() for ids in sentences["held out"])
        np.save(place / EMBEDDED, np.concatenate([pooled(one, np.ones(one.shape[:2])) for one in states]))


def sentence_transformers(method: str, scheme: str, folder: str, sentences: Any, output: str) -> None:
    """The ONNX file of sentence-transformers, in float or with its dynamic int8 for AVX2."""
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    model = SentenceTransformer(folder, backend="onnx", model_kwargs={"export": True, "file_name": "model.onnx"})
    if scheme == "float32":
        model.save_pretrained(output)
    else:
        export_dynamic_quantized_onnx_model(model, "avx2", output)


PACKAGES: dict[str, Callable[..., None]] = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "amd-quark": amd_quark,
    "llama.cpp": llama_cpp,
    "torchao": torchao,
    "sentence-transformers": sentence_transformers,
}


def main() -> None:
    package, method, scheme, source, data, output = sys.argv[1:]
    given = data if package == "llama.cpp" else json.loads(Path(data).read_text())
    PACKAGES[package](method, scheme, source, given, output)


if __name__ == "__main__":
    main()
