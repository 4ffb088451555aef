"""Undamaged inputs: small real models, made once for a run in a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.child import Limits, in_child
from tests.fuzz.encoded import ENCODINGS, write_encoded
from tests.models.torch_zoo import LANGUAGE_MODEL, ROOT

MAKING = Limits(seconds=300)
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = {"vocab_size": 2048, "max_position_embeddings": 128}


def _save(model: Any, folder: Path, **options: Any) -> None:
    """With weights so large that every part matters, and the tokenizer of the example model."""
    import torch
    from transformers import AutoTokenizer

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder, **options)
    AutoTokenizer.from_pretrained(LANGUAGE_MODEL).save_pretrained(folder)


def _transformer(folder: Path, prefix: str, head: str, settings: dict[str, Any], **options: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    _save(getattr(transformers, f"{prefix}{head}")(config), folder, **options)


def _example(folder: Path) -> None:
    shutil.copytree(LANGUAGE_MODEL, folder, ignore=shutil.ignore_patterns("README.md"))


def _quantized(folder: Path, source: Path, scheme: str, form: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme))
    batches = [torch.arange(2 * 16).reshape(2, 16) * 31 % 2048]
    model = quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(source), batches)
    export_safetensors(quantizer.freeze(model), folder, form)


def _onnx(folder: Path, name: str, outside: bool = False) -> None:
    import onnx

    from tests.models.onnx_odd import a_local_function
    from tests.models.onnx_zoo import ZOO

    model = a_local_function() if name == "function" else ZOO[name]()
    folder.mkdir()
    options: dict[str, Any] = {"save_as_external_data": True, "location": "model.data", "size_threshold": 16}
    onnx.save(model, folder / "model.onnx", **(options if outside else {}))


def _digits(folder: Path) -> None:
    shutil.copytree(ROOT / "examples" / "models" / "digits_cnn", folder, ignore=shutil.ignore_patterns("*.md"))


LLAMA = partial(
    _transformer, prefix="Llama", head="ForCausalLM",
    settings={**SIZES, **WORDS, "num_key_value_heads": 2, "tie_word_embeddings": False},
)  # fmt: skip
FOLDERS: dict[str, Callable[[Path], None]] = {
    "llama": LLAMA,
    # Rows of whole blocks of 256.
    "imatrix-llama": partial(
        _transformer, prefix="Llama", head="ForCausalLM",
        settings={**SIZES, **WORDS, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
                  "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
    "sharded": partial(LLAMA, max_shard_size="200KB"),
    "mixtral": partial(
        _transformer, prefix="Mixtral", head="ForCausalLM",
        settings={**SIZES, **WORDS, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": partial(
        _transformer, prefix="GptOss", head="ForCausalLM",
        settings={**SIZES, **WORDS, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
                  "num_experts_per_tok": 2},
    ),
    "bert": partial(_transformer, prefix="Bert", head="ForSequenceClassification", settings={**SIZES, **WORDS}),
    "vit": partial(
        _transformer, prefix="ViT", head="ForImageClassification",
        settings={**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5},
    ),
    "t5": partial(
        _transformer, prefix="T5", head="ForConditionalGeneration",
        settings={"vocab_size": 2048, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "language_model": _example,
}  # fmt: skip
"""Float model folders."""

QUANTIZED = {
    "quark-int8": ("int8", "quark"),
    "quark-uint4": ("uint4_wo_32", "quark"),
    "quark-mxfp4": ("mxfp4_weight_only", "quark"),
    "quark-nvfp4": ("nvfp4", "quark"),
    "fp8-fp8": ("fp8", "fp8"),
    "awq-uint4": ("uint4_wo_32", "awq"),
    "compressed-int8": ("int8_wo", "compressed-tensors"),
    "compressed-int4": ("int4_wo_32", "compressed-tensors"),
}
"""Quantized folders of the llama: scheme and format."""

MODELS = ("mlp", "cnn", "layer_norms", "shared", "clutter", "branches", "half", "legacy", "function")
ONNX: dict[str, Callable[[Path], None]] = {
    **{f"onnx-{name}": partial(_onnx, name=name) for name in MODELS},
    "onnx-outside": partial(_onnx, name="cnn", outside=True),
    "onnx-digits": _digits,
}
"""Folders with a `model.onnx`."""


@dataclass(frozen=True)
class Bases:
    """Makes each input when it is first asked for, in a process of its own."""

    folder: Path

    def get(self, name: str) -> Path:
        """The folder of an input; to be read only."""
        folder = self.folder / name
        if not folder.exists():
            if name in ENCODINGS:
                make = partial(write_encoded, folder, self.get(ENCODINGS[name].base), name)
            elif name in QUANTIZED:
                make = partial(_quantized, folder, self.get("llama"), *QUANTIZED[name])
            else:
                make = partial({**FOLDERS, **ONNX}[name], folder)
            self._run(make, name)
        return folder

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """A file that `make` writes when it is first asked for."""
        file = self.folder / name
        if not file.exists():
            self._run(partial(make, file), name)
        return file

    def _run(self, make: Callable[[], None], name: str) -> None:
        ending = in_child(make, self.folder.parent / "logs", MAKING)
        assert ending.how == "returned", f"{name}: {ending.text}\n{ending.err}"

    def copy(self, name: str, target: Path) -> Path:
        """A copy that a case may damage."""
        return Path(shutil.copytree(self.get(name), target))
