"""Loading for the commands: transformers is imported here, when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quark.torch  # noqa: F401 - first: where torch is absent, it says how to install it

# isort: split
import torch

from quark.errors import ConfigError, did_you_mean
from quark.torch import import_model_from_safetensors
from quark.torch.formats import FORMATS
from quark.torch.model.meta_model import as_format_error, build_skeleton, import_transformers, read_config

FOREIGN = frozenset(FORMATS) - {"quark"}
DTYPES = ("auto", "float32", "float16", "bfloat16")


def _transformers() -> Any:
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def load_model(folder: Path, device: str = "cpu", dtype: str = "auto") -> Any:
    """The causal language model of a folder, in evaluation mode. Raises FormatError naming the folder."""
    stored = read_config(folder).get("quantization_config") or {}
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is unknown. {did_you_mean(dtype, DTYPES)}")
    where = _device(device)
    transformers = _transformers()
    with as_format_error(folder):
        if stored.get("quant_method") in FOREIGN:
            # transformers would need the package of each of these formats, and computes some only on a GPU.
            return import_model_from_safetensors(None, folder, attn_implementation="sdpa").eval().to(where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
        )
    return model.eval().to(where)


def _device(name: str) -> torch.device:
    """The device of a name. Raises ConfigError for a name that torch does not know or a device that is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--device {name!r} cannot be used: {first}. Possible: cpu, cuda, cuda:1.") from None
    return device


def load_config(folder: Path) -> Any:
    """The transformers config of a folder."""
    read_config(folder)
    transformers = _transformers()
    with as_format_error(folder):
        return transformers.AutoConfig.from_pretrained(folder)


def load_meta_model(folder: Path) -> Any:
    """The float model of a folder without weights: parameters on the meta device."""
    if "quantization_config" in read_config(folder):
        raise ConfigError(f"{folder} is quantized already; give the float model.")
    _transformers()
    return build_skeleton(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises FormatError when there is none."""
    transformers = _transformers()
    with as_format_error(folder):
        return transformers.AutoTokenizer.from_pretrained(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a model folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
