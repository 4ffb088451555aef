"""Loading for the commands: transformers is imported here, when a command runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import quark.torch  # noqa: F401 - first: where torch is absent, it says how to install it
from quark.base.garbage import without_collection
from quark.torch.checkpoint.opened import OpenedFolder

# isort: split
with without_collection():
    import torch

from quark.base.libraries.diffusers import is_network
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.errors import ConfigError, QuarkError, did_you_mean
from quark.jobs.folders.model_inputs import ModelInputs, StepInputs
from quark.jobs.request import AS_STORED, Loading
from quark.jobs.words import DTYPES
from quark.torch.checkpoint.float_model import check_network, load_float_model
from quark.torch.checkpoint.importer import FOREIGN, import_model_from_safetensors
from quark.torch.checkpoint.shards import predicted_bytes
from quark.torch.model.batches import named_device


def check_loading(loading: Loading) -> torch.device:
    """The device of a name. Raises ConfigError for one that is not there, or a dtype that is none."""
    if loading.dtype not in DTYPES:
        raise ConfigError(f"--dtype {loading.dtype!r} is unknown. {did_you_mean(loading.dtype, DTYPES)}")
    return named_device(loading.device)


def open_folder(folder: Path, trust_remote_code: bool = False) -> OpenedFolder:
    """The folder of a model, whose class says nothing while it is built."""
    transformers = import_transformers()
    if not logger.isEnabledFor(logging.DEBUG):  # without --verbose, no bars and reports: what they say is raised
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    return OpenedFolder(folder, trust_remote_code)


def load_model(folder: OpenedFolder, loading: Loading = AS_STORED, dequantize: bool = False) -> Any:
    """The model of a folder, float or quantized, in evaluation mode. Raises FormatError naming the folder.

    With `dequantize` one that is quantized in a way that sources may be is the float model that it stands for; one of a
    way that nobody here knows (hqq) raises NotSupportedError.
    """
    dequantize = folder.is_read and dequantize
    where = check_loading(loading)
    if not dequantize and folder.method in FOREIGN:
        # transformers would need the package of each of these formats, and computes some only on a GPU.
        with as_format_error(folder.path, trusted=folder.trust_remote_code):
            return import_model_from_safetensors(None, folder.path, attn_implementation=None).eval().to(where)
    wanted = loading.dtype if loading.dtype == "auto" else getattr(torch, loading.dtype)
    model = load_float_model(folder, wanted, keep_unexpected=loading.keep_unexpected, dequantize=dequantize)
    return model.to(where)


def inputs_of(folder: Path, model: Any) -> ModelInputs | StepInputs:
    """Return the inputs of the model of a folder."""
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    if is_network(model):
        return StepInputs(type(model), dtype)
    return ModelInputs(folder, model.config, type(model), dtype)


def skeleton_of(folder: OpenedFolder) -> Any:
    """The float model of a folder without weights: parameters on the meta device; not to be changed.

    Raises:
        ConfigError: The folder is quantized already.
        FormatError: Its weight files are not those of the network of diffusers that config.json names. There may be
            none: a plan needs no weights.
    """
    folder.check()
    if not folder.is_read:
        raise ConfigError(
            f"{folder.path} is quantized already; give the float model. Possible: quark convert --requantize SCHEME, "
            "which rounds the quantized values again."
        )
    if folder.is_network and folder.metas_if_any:
        check_network(folder.path, folder.skeleton, folder.metas)
    return folder.skeleton


def skeleton_if_readable(folder: OpenedFolder) -> Any | None:
    """The model without weights; None where there is none, whose reason is the error of the work that follows."""
    try:
        return skeleton_of(folder)
    except QuarkError:
        return None


def float_bytes(folder: OpenedFolder) -> int:
    """Bytes of the weights of a folder as float: those of its files, where these are float."""
    if not folder.config.get("quantization_config") or not folder.is_read:
        return folder_bytes(folder.path)
    return predicted_bytes(folder.skeleton, None)


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a model folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
