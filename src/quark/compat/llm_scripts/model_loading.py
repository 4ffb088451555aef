"""Models and tokenizers by folder or by their name on the hub, as language-model scripts load and save them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.base.files import refuse_pickle, require_config
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers, require_readable_tokenizer
from quark.base.log import logger
from quark.errors import ConfigError, FormatError, NotSupportedError, did_you_mean, one_line
from quark.jobs.words import DTYPES
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.importer import FOREIGN, import_model_from_safetensors
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.model.batches import evaluating, input_device, named_device
from quark.torch.model.meta_model import fill_buffers
from quark.torch.model.passes.unfuse_experts import unfuse_known

__all__ = [
    "check_compatibility_before_quantization", "create_model_skeleton", "get_model", "get_tokenizer",
    "move_model_to_device_if_it_fits", "prepare_for_moe_quant", "preprocess_for_quantization", "revert_model_patching",
    "save_model", "set_seed",
]  # fmt: skip

PLACEMENTS: dict[object, str | None] = {None: None, False: None, True: "auto", "auto": "auto", "balanced": "balanced"}
"""`multi_gpu` -> the `device_map` of transformers."""
SPARE = 1.1
"""A model is moved to a device whose free memory is so many times its own: a forward needs some too."""


def get_model(
    ckpt_path: str | os.PathLike[str],
    data_type: str = "auto",
    device: str = "cuda",
    multi_gpu: str | bool | None = False,
    multi_device: bool = False,
    attn_implementation: str = "eager",
    trust_remote_code: bool = False,
) -> tuple[nn.Module, torch.dtype]:
    """Load a model, float or quantized, in evaluation mode.

    Args:
        ckpt_path: Folder, or a name on the Hugging Face hub, from where it is downloaded.
        data_type: "auto" (as config.json says, else as stored), "float32", "float16" or "bfloat16".
        device: Where it goes whole: "cuda", "cpu".
        multi_gpu: "auto" or True, or "balanced": spread over all GPUs, by accelerate; `device` has no say then.
        multi_device: Spread over all GPUs and the memory of the machine.
        attn_implementation: "eager" or "sdpa".
        trust_remote_code: Run the code that the folder brings. The documented default is True; here none runs unasked.

    Returns:
        The model and the dtype of its parameters.

    Raises:
        ConfigError: An option is wrong, or the device is not there.
        FormatError: The folder is incomplete, or not the model that its config.json names.
    """
    if data_type not in DTYPES:
        raise ConfigError(f"data_type {data_type!r} is unknown. {did_you_mean(data_type, DTYPES)}")
    if multi_gpu not in PLACEMENTS:
        raise ConfigError(f"multi_gpu is {multi_gpu!r}; possible: False, True, 'auto', 'balanced'.")
    folder = model_path(ckpt_path)
    spread = PLACEMENTS[multi_gpu] or ("auto" if multi_device else None)
    where = None if spread else named_device(device)
    dtype = data_type if data_type == "auto" else getattr(torch, data_type)
    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    opened = OpenedFolder(folder, trust_remote_code)
    if opened.method in FOREIGN:
        if spread:
            raise NotSupportedError(f"{folder} is quantized: it is loaded to one device. Leave multi_gpu at False.")
        with as_format_error(folder, trusted=trust_remote_code):
            model = import_model_from_safetensors(None, folder, device=str(where), **options)
    elif spread:
        model = load_float_model(opened, dtype, device_map=spread, **options)
    else:
        model = load_float_model(opened, dtype, **options).to(where)
    return model.eval(), next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)


def model_path(name: str | os.PathLike[str]) -> Path:
    """The folder of a model: itself, or what huggingface_hub downloads of that name. Raises FormatError."""
    if Path(name).is_dir():
        return Path(name)
    refuse_pickle(Path(name))
    if Path(name).is_file():
        require_config(Path(name))
    if Path(name).is_absolute() or str(name).startswith(".") or str(name).count("/") > 1:
        raise FormatError(f"{name} is no folder.")
    import huggingface_hub  # only for a name: a folder needs nothing of it

    try:
        return Path(huggingface_hub.snapshot_download(str(name)))
    except (OSError, ValueError) as error:  # of the hub, of the network, and for what is no name
        raise FormatError(f"{name} is no folder, and the hub does not give it: {one_line(error)[:300]}") from error


def get_tokenizer(
    ckpt_path: str | os.PathLike[str],
    max_seq_len: int = 2048,
    model_type: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load the tokenizer of a model, which pads on the left.

    Args:
        ckpt_path: Folder, or a name on the hub.
        max_seq_len: The longest sequence, in tokens, where the files of the tokenizer name none.
        model_type: For the message where it cannot pad.
        trust_remote_code: As for `get_model`.

    Raises:
        FormatError: The folder has no tokenizer.
        ConfigError: It has neither a padding nor an end token.
    """
    folder = model_path(ckpt_path)
    transformers = import_transformers()
    require_readable_tokenizer(folder)
    with as_format_error(folder, trusted=trust_remote_code):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, padding_side="left", trust_remote_code=trust_remote_code
        )
    if tokenizer.model_max_length > transformers.tokenization_utils_base.LARGE_INTEGER:
        tokenizer.model_max_length = max_seq_len
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"The tokenizer of {model_type or folder} has no padding token and no end token.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def create_model_skeleton(
    model_dir: str | os.PathLike[str], trust_remote_code: bool = False, attn_implementation: str = "eager"
) -> nn.Module:
    """The float model of a folder, parameters on the meta device and buffers computed.

    `import_model_from_safetensors` fills it.

    Args:
        model_dir: Folder with config.json; its weights are not read.
        trust_remote_code: As for `get_model`.
        attn_implementation: "eager" or "sdpa".
    """
    model: Any = OpenedFolder(Path(model_dir), trust_remote_code).skeleton
    with as_format_error(Path(model_dir)):
        model.set_attn_implementation(attn_implementation)
        fill_buffers(model)
    skeleton: nn.Module = model
    return skeleton


def check_compatibility_before_quantization(model: nn.Module, raise_on_error: bool = False) -> bool:
    """Return True where the model takes eight tokens and gives finite logits, as calibration needs; it takes a moment.

    Args:
        model: A language model of transformers.
        raise_on_error: Raise in place of logging a warning and returning False.

    Raises:
        ConfigError: With `raise_on_error`: the model fails, or gives NaN or infinity.
    """
    fault = _fault(model)
    if fault is not None and raise_on_error:
        raise ConfigError(fault)
    if fault is not None:
        logger.warning("%s", fault)
    return fault is None


def _fault(model: nn.Module) -> str | None:
    ids = torch.arange(8, device=input_device(model))[None]
    try:
        with evaluating(model), torch.no_grad():
            logits = model(ids).logits
    except Exception as error:  # noqa: BLE001 - the forward of any model
        return f"{type(model).__name__} cannot run on eight tokens: {type(error).__name__}: {one_line(error)[:300]}"
    if not bool(torch.isfinite(logits).all()):
        return f"{type(model).__name__} gives NaN or infinity for eight tokens."
    return None


def preprocess_for_quantization(model: nn.Module, reload: bool = False) -> None:
    """Take the fused experts of a mixture-of-experts model apart: each projection of each expert is a linear layer.

    `quantize_model` and the loaders do it too, for the experts that a config quantizes, so no call is needed; and they
    put those together again of which nothing is quantized, as checkpoints hold them.

    Args:
        model: Changed in place; its outputs and the memory of its weights stay the same.
        reload: Whether the model is about to be filled from a quantized checkpoint; no difference.

    Raises:
        ConfigError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"A model is a torch.nn.Module, got {model!r:.60}.")
    unfuse_known(model)


prepare_for_moe_quant = preprocess_for_quantization
"""The older name."""


def revert_model_patching(model: nn.Module) -> None:
    """Nothing is left to do here: transformers is not patched, so there is nothing to put back."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"A model is a torch.nn.Module, got {model!r:.60}.")


def move_model_to_device_if_it_fits(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a model to a device that has room for it; else log a warning and leave it where it is.

    Args:
        model: Changed in place.
        device: With what it needs free, and a tenth more; of a CPU no question is asked.
    """
    where = torch.device(device)
    needed = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    if where.type == "cuda":
        free = torch.cuda.mem_get_info(where)[0]
        if free < SPARE * needed:
            logger.warning(
                "The model stays where it is: it needs %.1f GB, and %s has %.1f GB free.",
                needed / 1e9, where, free / 1e9,
            )  # fmt: skip
            return model
    return model.to(where)


def save_model(model: Any, tokenizer: Any, save_dir: str | os.PathLike[str]) -> None:
    """`save_pretrained` of a float model, and of its tokenizer unless that is None.

    Raises ConfigError for a quantized model: `export_safetensors` writes those, with their config.
    """
    if getattr(model, "quark_quantized", False):
        raise ConfigError("The model is quantized: save it with export_safetensors, which stores its scales.")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"{type(model).__name__} is no transformers model; save_params writes any module.")
    model.save_pretrained(save_dir)
    if tokenizer is not None:
        tokenizer.save_pretrained(save_dir)


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's random numbers, those of GPUs too."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
