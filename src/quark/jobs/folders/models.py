"""Loading for the commands: transformers is imported here, when a command runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import quark.torch  # noqa: F401 - first: where torch is absent, it says how to install it
from quark.base.garbage import without_collection

# isort: split
with without_collection():
    import torch

from quark.base.libraries.diffusers import is_network
from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.errors import ConfigError, FormatError, as_format_error, did_you_mean
from quark.jobs.folders.model_inputs import ModelInputs
from quark.jobs.folders.step_inputs import StepInputs
from quark.jobs.request import AS_STORED, Loading
from quark.torch import import_model_from_safetensors
from quark.torch.checkpoint.float_model import check_network, check_stored, load_float_model, shapes_of, stored_metas
from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.checkpoint.sources.methods import READ, method_of, quantization_of
from quark.torch.llm.model_loading import DTYPES, FOREIGN
from quark.torch.model.batches import named_device
from quark.torch.model.meta_model import build_skeleton
from quark.torch.model.model_folder import read_config


def _quiet_transformers() -> Any:
    """Transformers, without bars and reports unless --verbose asks for them: what they say is checked, and raised."""
    transformers = import_transformers()
    if not logger.isEnabledFor(logging.DEBUG):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    return transformers


def check_loading(loading: Loading) -> torch.device:
    """The device of a name. Raises ConfigError for one that is not there, or a dtype that is none."""
    if loading.dtype not in DTYPES:
        raise ConfigError(f"--dtype {loading.dtype!r} is unknown. {did_you_mean(loading.dtype, DTYPES)}")
    return named_device(loading.device)


def load_model(folder: Path, loading: Loading = AS_STORED, dequantize: bool = False) -> Any:
    """The model of a folder, float or quantized, in evaluation mode. Raises FormatError naming the folder.

    With `dequantize` one that is quantized in a way that sources may be is the float model that it stands for; one of a
    way that nobody here knows (hqq) raises NotSupportedError.
    """
    dequantize = is_read(folder) and dequantize
    method = None if dequantize else method_of(read_config(folder))
    where = check_loading(loading)
    _quiet_transformers()
    if method in FOREIGN:
        # transformers would need the package of each of these formats, and computes some only on a GPU.
        with as_format_error(folder):
            return import_model_from_safetensors(None, folder, attn_implementation=None).eval().to(where)
    wanted = loading.dtype if loading.dtype == "auto" else getattr(torch, loading.dtype)
    model = load_float_model(
        folder,
        wanted,
        trust_remote_code=loading.trust_remote_code,
        keep_unexpected=loading.keep_unexpected,
        dequantize=dequantize,
    )
    return model.to(where)


def is_read(folder: Path) -> bool:
    """Whether the weights of a folder are read as float: they are, or are quantized in a way that sources may be.

    Raises NotSupportedError for what neither sources nor formats read: a program, or a part of what it can do.
    """
    stored = read_config(folder)
    method = method_of(stored)
    if method is None and not stored.get("quantization_config"):
        return True
    if method not in READ and (method == "quark" or method in FOREIGN):
        return False
    return quantization_of(stored, folder) is not None


def inputs_of(folder: Path, model: Any) -> ModelInputs | StepInputs:
    """What the model of a folder takes."""
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    if is_network(model):
        return StepInputs(type(model), dtype)
    return ModelInputs(folder, model.config, type(model), dtype)


def load_meta_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """The float model of a folder without weights: parameters on the meta device.

    Raises:
        ConfigError: The folder is quantized already.
        FormatError: Its weight files are not those of the network of diffusers that config.json names. There may be
            none: a plan needs no weights.
    """
    check_stored(folder)
    if not is_read(folder):
        raise ConfigError(
            f"{folder} is quantized already; give the float model. Possible: quark convert --requantize SCHEME, "
            "which rounds the quantized values again."
        )
    _quiet_transformers()
    try:
        metas = stored_metas(folder)
    except FormatError:
        metas = {}
    model = build_skeleton(folder, shapes=shapes_of(metas), trust_remote_code=trust_remote_code)
    if metas and is_network(model):
        check_network(folder, model, metas)
    return model


def float_bytes(folder: Path, trust_remote_code: bool = False) -> int:
    """Bytes of the weights of a folder as float: those of its files, where these are float."""
    if not read_config(folder).get("quantization_config") or not is_read(folder):
        return folder_bytes(folder)
    return predicted_bytes(load_meta_model(folder, trust_remote_code), None)


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a model folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
