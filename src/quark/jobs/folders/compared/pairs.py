"""A float model and a quantized one that is compared with it: both in memory, or both read block by block."""

from __future__ import annotations

from pathlib import Path

from quark.base.log import logger
from quark.errors import ConfigError
from quark.jobs.folders.flows import fits_memory
from quark.jobs.folders.models import check_loading, float_bytes, load_model
from quark.jobs.request import Loading
from quark.torch import import_model_from_gguf
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.compared.coded_layers import coded_layers
from quark.torch.flows.parted import PartedModel, float_in_parts, gguf_in_parts, quantized_in_parts
from quark.torch.model.passes import prepare


def open_pair(
    folder: OpenedFolder, quantized: OpenedFolder | Path, loading: Loading, stream: bool | None
) -> tuple[PartedModel, PartedModel]:
    """The float model of a folder, and the quantized one, whose layers have the same names in both.

    Args:
        folder: Of the float model, or of one that is read as float.
        quantized: A folder, or a GGUF file.
        loading: How both are loaded.
        stream: Whether to read them block by block; None: where they do not fit into memory.

    Raises:
        ConfigError: Another type is asked for, and block by block has that of the folder.
        QuarkError: One of both cannot be read.
    """
    parted = reads_in_parts(folder, loading, stream)
    return _in_parts(folder, quantized, loading) if parted else _in_memory(folder, quantized, loading)


def reads_in_parts(folder: OpenedFolder, loading: Loading, stream: bool | None) -> bool:
    """Return True where a model and its quantized copy are read block by block, as is asked for or memory needs.

    Raises ConfigError for another type than that of the folder, in which blocks compute.
    """
    if stream and loading.dtype != "auto":
        raise ConfigError(
            f"--dtype {loading.dtype}: block by block computes in the dtype of the model. Possible: --dtype auto."
        )
    if stream is None and loading.dtype == "auto" and not fits_memory(float_bytes(folder)):
        logger.info("Block by block, as the model and a quantized one do not fit into memory.")
        return True
    return bool(stream)


def _in_memory(
    folder: OpenedFolder, quantized: OpenedFolder | Path, loading: Loading
) -> tuple[PartedModel, PartedModel]:
    before = load_model(folder, loading, dequantize=True)
    if isinstance(quantized, Path):
        after = load_model(folder, loading, dequantize=True)
        import_model_from_gguf(after, quantized)
    else:
        after = load_model(quantized, loading)
    prepare(before, coded_layers(after).__contains__)  # the same layers, where the model had them in another form
    return PartedModel(before), PartedModel(after)


def _in_parts(
    folder: OpenedFolder, quantized: OpenedFolder | Path, loading: Loading
) -> tuple[PartedModel, PartedModel]:
    device, keep = check_loading(loading), loading.keep_unexpected
    if isinstance(quantized, Path):
        after = gguf_in_parts(folder, quantized, device)
    elif quantized.computes_in_float:
        after = float_in_parts(quantized, (), device, keep)
    else:
        after = quantized_in_parts(quantized, device)
    return float_in_parts(folder, [*coded_layers(after.model)], device, keep), after
