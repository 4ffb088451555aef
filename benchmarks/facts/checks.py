"""What a program makes of a file, one function for each program and form: it returns what was seen, or raises."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from quark.core.metrics import sqnr
from quark.errors import NothingToQuantizeError
from quark.goals.facts import ONNX_FILE
from quark.onnx import ModelQuantizer as FileQuantizer
from quark.onnx import PathDataReader, get_library_path
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx, export_safetensors
from tests.models.denoisers import denoiser, output, step
from tests.models.onnx_zoo import cnn, images, mlp, vectors
from tests.models.torch_zoo import tiny_llama, token_batches

Feed = dict[str, Any]
LEAST = 30.0
"""dB between what a program computes and what the quantized model does: kernels may round what codes meet."""


class DiffersError(Exception):
    """The program computes something else."""


def frozen_model(scheme: str) -> Any:
    """A Llama of two layers, as wide as the widest groups and tiles."""
    model = tiny_llama(hidden_size=256, intermediate_size=512)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    return quantizer.freeze(quantizer.quantize_model(model, token_batches()))


def in_transformers(scheme: str) -> str:
    """A folder of the quark format, loaded by its `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    model, tokens = frozen_model(scheme), token_batches(1)[0]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        export_safetensors(model, Path(folder) / "model")
        loaded = AutoModelForCausalLM.from_pretrained(Path(folder) / "model")
        if not torch.equal(loaded(tokens).logits, model(tokens).logits):
            raise DiffersError("logits differ from those of the frozen model")
    return "logits to the bit those of the frozen model"


def in_diffusers(scheme: str) -> str:
    """The same of a denoiser, loaded by diffusers."""
    sizes = ("caption_projection_dim", "joint_attention_dim", "pooled_projection_dim")
    model = denoiser("sd3", attention_head_dim=64, **dict.fromkeys(sizes, 256))
    batch = {**step("sd3"), "encoder_hidden_states": torch.randn(1, 7, 256), "pooled_projections": torch.randn(1, 256)}
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config(scheme))
    frozen = quantizer.freeze(quantizer.quantize_model(model, [batch]))
    with tempfile.TemporaryDirectory() as folder:
        export_safetensors(frozen, Path(folder) / "model")
        if not torch.equal(output(type(model).from_pretrained(Path(folder) / "model"), batch), output(frozen, batch)):
            raise DiffersError("outputs differ from those of the frozen model")
    return "outputs to the bit those of the frozen model"


def folder_in_onnx_runtime(scheme: str) -> str:
    """The ONNX file of a language model."""
    model, tokens = frozen_model(scheme), token_batches(1)[0]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = export_onnx(model, folder, tokens, uint4_int4_flag=True, dynamo=True)
        return _near(session(file).run(None, {"input_ids": tokens.numpy()})[0], model(tokens).logits.numpy())


def file_in_onnx_runtime(config: str) -> str:
    """An ONNX file: with the fused kernels of the program, beside Q/DQ computed as they are written."""
    with tempfile.TemporaryDirectory() as folder:
        file, feed = quantized_file(config, Path(folder))
        return _near(session(file).run(None, feed)[0], session(file, fused=False).run(None, feed)[0])


def file_in_openvino(config: str) -> str:
    """The same in OpenVINO."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file, feed = quantized_file(config, Path(folder))
        found = openvino.Core().compile_model(str(file), "CPU")(feed)
        return _near(np.asarray(next(iter(found.values()))), session(file, fused=False).run(None, feed)[0])


def quantized_file(config: str, folder: Path) -> tuple[Path, Feed]:
    """A network of random weights by a named configuration, convolutional where that has work there, and a feed."""
    from quark.jobs.run_file import named_config

    for model, feeds in ((cnn(), images(5)), (mlp(), vectors(5))):
        onnx.save(model, folder / "float.onnx")
        np.savez(folder / "samples.npz", x=np.concatenate([feed["x"] for feed in feeds[1:]]))
        reader = PathDataReader(folder / "float.onnx", folder / "samples.npz")
        with suppress(NothingToQuantizeError):
            FileQuantizer(named_config(config)).quantize_model(folder / "float.onnx", folder / "out.onnx", reader)
            return folder / "out.onnx", feeds[0]
    raise DiffersError("nothing to quantize in either network")


def session(file: Path, fused: bool = True) -> Any:
    """A session of ONNX Runtime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if fused else level.ORT_DISABLE_ALL
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _near(found: Any, expected: Any) -> str:
    decibels = float(sqnr(torch.tensor(expected), torch.tensor(found)))
    if not decibels >= LEAST:
        raise DiffersError(f"outputs {decibels:.1f} dB from the quantized model's")
    return f"outputs {min(decibels, 200):.0f} dB from the quantized model's"


CHECKS: dict[tuple[str, str], tuple[str, Callable[[str], str]]] = {
    ("transformers", "quark"): ("transformers", in_transformers),
    ("diffusers", "quark"): ("diffusers", in_diffusers),
    ("ONNX Runtime", "onnx"): ("onnxruntime", folder_in_onnx_runtime),
    ("ONNX Runtime", ONNX_FILE): ("onnxruntime", file_in_onnx_runtime),
    ("OpenVINO", ONNX_FILE): ("openvino", file_in_openvino),
}
"""Program and form -> the distribution that brings it, and the check. Of other programs rows stay as they are."""


def installed(distribution: str) -> str | None:
    """Major and minor version of a package; None where it is not installed."""
    if util.find_spec(distribution) is None:
        return None
    return ".".join(metadata.version(distribution).split(".")[:2])
