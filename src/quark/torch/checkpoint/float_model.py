"""Loads the float model of a folder: of the class that config.json names, with every tensor that its files hold.

transformers fills what a checkpoint lacks with random numbers, drops what the class does not know, and reports both to
a log. Here each is an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import left_out, set_folder, set_left_out
from quark.base.log import logger
from quark.errors import FormatError
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.sources.methods import AS_FLOAT, quantization_of
from quark.torch.checkpoint.sources.source import Source, check_finite
from quark.torch.diffusion.component import CLASS, STEM
from quark.torch.diffusion.network import import_diffusers, network_class
from quark.torch.model.meta_model import read_generation_config
from quark.torch.model.model_folder import model_class
from quark.torch.model.names import dropped_names, loaded_as, merged_names, source_names


def load_float_model(
    folder: OpenedFolder,
    dtype: torch.dtype | str = "auto",
    *,
    keep_unexpected: bool = False,
    dequantize: bool = False,
    **options: Any,
) -> Any:
    """The model of a folder, in evaluation mode, on the CPU. One that quark quantized is loaded as it computes.

    Args:
        folder: With config.json and weights.
        dtype: To load in; "auto": as config.json says, else as stored.
        keep_unexpected: Accept tensors that the class has no place for; a checkpoint that is made of the model holds
            them as they are.
        dequantize: Load a folder in FP8 or compressed-tensors as the float model that it stands for. One of MXFP4,
            ModelOpt, bitsandbytes, torchao or MLX always is.
        options: For `from_pretrained`.

    Raises:
        ConfigError, NotSupportedError: With `dequantize`: the folder is quantized in another way.
        FormatError: The folder is incomplete or corrupt, its config calls for other shapes than its files have, or
            tensors are missing, unexpected or of another shape; names them.
    """
    folder.check_sizes()
    folder.metas  # noqa: B018 - raises where there are no weights
    folder.check()
    if not dequantize and folder.method in AS_FLOAT:
        # transformers would need the program, or take the codes for the weights.
        dequantize = True
        logger.info(
            "%s is loaded as the float model that its weights stand for: inputs are not quantized.", folder.path
        )
    quantization = quantization_of(folder.config, folder.path) if dequantize else None
    source = None if quantization is None else folder.source
    if source is not None or not folder.config.get("quantization_config"):
        check_folder(folder)
    model = load_whole(folder, keep_unexpected=keep_unexpected, source=source, dtype=dtype, **options)
    if source is not None:
        model.decoded_layers = decoded_layers(folder, model)
    return model.eval()


def decoded_layers(folder: OpenedFolder, model: Any) -> tuple[str, ...]:
    """Names of the layers of a float model whose weights a folder stores in codes."""
    named, source = folder.names(model), folder.source
    weights = {name for name, stored in named.items() if name.endswith(".weight") and source.is_coded(stored)}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return tuple(name.removesuffix(".weight") for name in named if name in weights & own)


def load_whole(
    folder: OpenedFolder,
    *,
    keep_unexpected: bool = False,
    source: Source | None = None,
    **options: Any,
) -> Any:
    """Return the model that `from_pretrained` of the class that config.json names gives, with a place for every tensor.

    Args:
        folder, keep_unexpected: See `load_float_model`.
        source: The float tensors of a quantized folder, to be loaded in place of what the files hold.
        options: For `from_pretrained`.

    Raises:
        FormatError: See `load_float_model`.
    """
    if folder.is_network:
        return _load_component(folder, options)
    config, trusted = copy.deepcopy(folder.of_transformers), folder.trust_remote_code
    chosen = model_class(folder.path, config, trusted)
    given = {"trust_remote_code": trusted, "local_files_only": True, "output_loading_info": True, **options}
    with as_format_error(folder.path, trusted=trusted):
        if source is None:
            model, report = chosen.from_pretrained(folder.path, config=config, **given)
        else:
            model, report = _from_source(chosen, config, source, folder.path, given)
    unexpected = _unexpected(model, report["unexpected_keys"], folder, source)
    if keep_unexpected and unexpected:
        # What the class leaves out by design is named so; writers store it as it was.
        set_left_out(model, {*left_out(model), *(f"^{re.escape(name)}$" for name in unexpected)})
        unexpected = []
    _refuse(folder.path, chosen, "has no", sorted(report["missing_keys"]), "its weights would be random")
    _refuse(folder.path, chosen, "holds, and the class has no place for,", unexpected, "--keep-unexpected copies them")
    _refuse(folder.path, chosen, "has in another shape", sorted(map(str, report["mismatched_keys"])), "")
    for name, tensor in model.named_parameters():
        check_finite(name, tensor)
    return model


def _load_component(folder: OpenedFolder, options: Mapping[str, Any]) -> Any:
    """Return the network of diffusers that `from_pretrained` gives, in the type of its folder or the one asked for."""
    kind, dtype = network_class(folder.path / "config.json", folder.config[CLASS]), options.get("dtype", "auto")
    dtype = folder.dtype if dtype == "auto" else dtype
    variant = re.fullmatch(rf"{STEM}\.(\w+)(-\d+-of-\d+)?\.safetensors", folder.files[0].path.name)
    import_diffusers()
    with as_format_error(folder.path):
        model, report = kind.from_pretrained(
            folder.path, torch_dtype=dtype, device_map=options.get("device_map"), local_files_only=True,
            use_safetensors=True, output_loading_info=True, variant=variant[1] if variant else None,
        )  # fmt: skip
    _refuse(folder.path, kind, "has no", sorted(report["missing_keys"]), "its weights would be random")
    _refuse(folder.path, kind, "holds, and the class has no place for,", sorted(report["unexpected_keys"]), "")
    for name, tensor in model.named_parameters():
        check_finite(name, tensor)
    return model.eval()


def _unexpected(model: Any, reported: Iterable[str], folder: OpenedFolder, source: Source | None) -> list[str]:
    """The tensors of a folder that a class has no place for, by their own names, but those that are carried anyway.

    transformers reports the experts of a layer that it does not build under the name that they would have merged.
    """
    reported = set(reported)
    if not reported:
        return []
    names = list(folder.metas if source is None else source.names())
    target, carried = loaded_as(model, model.state_dict()), set(dropped_names(model, names))
    return sorted(name for name in names if target(name) in reported and name not in carried)


def _from_source(chosen: Any, config: Any, source: Source, folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the results of `from_pretrained` for the float tensors of a source, each decoded when its turn comes."""
    config.__dict__.pop("quantization_config", None)
    if options.get("dtype", "auto") == "auto":
        options = {**options, "dtype": config.dtype or source.dtype()}
    tensors = {name: WhenRead(source, name) for name in source.names()}
    model, report = chosen.from_pretrained(None, config=config, state_dict=tensors, **options)
    set_folder(model, str(folder))
    read_generation_config(model, folder)
    return model, report


class WhenRead:
    """A tensor of a source that is read when transformers asks for its values, as it does of safetensors files."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        # float32, so that it is rounded once, to the type of the parameter.
        coded = self.source.is_coded(self.name)
        x = self.source.float(self.name) if coded else self.source.stored(self.name)
        return x[index]


def _refuse(folder: Path, chosen: type, what: str, names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise FormatError(
            f"{folder} is not the model that its config.json names ({chosen.__name__}): it {what} "
            f"{', '.join(names[:5])}{more}{f' ({why})' if why else ''}."
        )


def check_network(folder: Path, network: Any, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise FormatError where the files of a network of diffusers lack a tensor, or hold one of another shape.

    Args:
        folder: For the message.
        network: Without weights, of the class that config.json names.
        stored: Dtype and shape of the stored tensors, on the meta device.
    """
    _refuse(folder, type(network), "has no", sorted(network.state_dict().keys() - stored.keys()), "")
    check_metas(folder, network, stored)


def check_folder(folder: OpenedFolder) -> None:
    """Raise FormatError as `check_metas` does for the float tensors of a folder that is read as float.

    Of weights in codes the source compares the shapes when it decodes them.
    """
    names = folder.names(folder.skeleton)
    if folder.method is not None:
        names = {
            name: stored
            for name, stored in names.items()
            if stored in folder.metas and not folder.source.is_coded(stored)
        }
    check_metas(folder.path, folder.skeleton, folder.metas, names)


def check_metas(
    folder: Path, model: Any, stored: Mapping[str, torch.Tensor], named: Mapping[str, str] | None = None
) -> None:
    """Raise FormatError where the tensor in the files cannot be the parameter of its name.

    It has another shape, or it holds integers where the model has floats: codes, or bytes that were mislabelled.

    Args:
        folder: For the message.
        model: A skeleton of the float model.
        stored: Dtype and shape of the stored tensors. What transformers merges when it loads has no shape to compare.
        named: Name in the model -> name in the files, where it is known.
    """
    own = model.state_dict()
    sources = source_names(model, stored) if named is None else named
    merged = merged_names(model, own)
    for name, source in sources.items():
        if name not in own:
            continue
        there, needed = stored[source], own[name]
        if name not in merged and there.shape != needed.shape:
            raise FormatError(
                f"{folder}: {source} has shape {tuple(there.shape)} in the files, and config.json calls for "
                f"{tuple(needed.shape)}."
            )
        if needed.dtype.is_floating_point and not there.dtype.is_floating_point:
            raise FormatError(
                f"{folder}: {source} holds {str(there.dtype).removeprefix('torch.')} in the files, and config.json, "
                "which names no codes there, calls for float numbers."
            )
