"""Loading for the commands: transformers is imported here, when a command runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError, FormatError, MissingDependencyError, did_you_mean
from quark.torch import import_model_from_safetensors
from quark.torch.formats import FORMATS

FOREIGN = frozenset(FORMATS) - {"quark"}
DTYPES = ("auto", "float32", "float16", "bfloat16")


def _transformers() -> Any:
    try:
        import transformers  # costs seconds: imported when a command needs it
    except ImportError:
        raise MissingDependencyError("This command needs transformers: pip install 'openquark[torch]'.") from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def check_folder(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises FormatError when it is not one."""
    path = folder / "config.json"
    if not path.is_file():
        raise FormatError(f"{folder} is no model folder: it has no config.json.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise FormatError(f"{path} is not the config of a transformers model: it has no model_type.")
    return config


def load_model(folder: Path, device: str = "cpu", dtype: str = "auto") -> Any:
    """The causal language model of a folder, in evaluation mode. Raises FormatError naming the folder."""
    stored = check_folder(folder).get("quantization_config") or {}
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is unknown. {did_you_mean(dtype, DTYPES)}")
    where = _device(device)
    transformers = _transformers()
    with _as_format_error(folder):
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
    check_folder(folder)
    transformers = _transformers()
    with _as_format_error(folder):
        return transformers.AutoConfig.from_pretrained(folder)


def load_meta_model(folder: Path) -> Any:
    """The float model of a folder without weights: parameters on the meta device."""
    if "quantization_config" in check_folder(folder):
        raise ConfigError(f"{folder} is quantized already; give the float model.")
    transformers = _transformers()
    with _as_format_error(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises FormatError when there is none."""
    transformers = _transformers()
    with _as_format_error(folder):
        return transformers.AutoTokenizer.from_pretrained(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a model folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextlib.contextmanager
def _as_format_error(folder: Path) -> Iterator[None]:
    """transformers, safetensors and tokenizers raise many kinds of error for a bad folder; here it is one."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, FormatError):
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FormatError(f"{folder} cannot be loaded: {first}") from error
