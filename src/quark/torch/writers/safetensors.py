"""Writes a quantized model to files that other programs load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx, nn

from quark.base.files import check_apart, final_place
from quark.base.libraries.diffusers import is_network
from quark.base.libraries.peft import base_model, has_adapter
from quark.base.log import logger
from quark.errors import ConfigError, NotSupportedError
from quark.torch.calibration.distributed import rank
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.checkpoint.opened import OpenedFolder, opened_from
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS
from quark.torch.formats.readers import TRANSFORMERS
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks.offloading import with_weights
from quark.torch.model.folder_files import check_files
from quark.torch.plan import Plan
from quark.torch.writers.adapters import without_adapters
from quark.torch.writers.folder import FolderTarget, of_model
from quark.torch.writers.writer import OutputTarget
from quark.torch.writers.written_into import written_into


def export_safetensors(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    custom_mode: str = "quark",
    weight_format: str | None = None,
    pack_method: str = "reorder",
    *,
    tokenizer: Any = None,
    max_shard_size: str = "5GB",
    overwrite: bool | None = None,
    attachments: Mapping[str, str] | None = None,
    reader: str = TRANSFORMERS,
    goal: str | None = None,
) -> Path:
    """Write a Hugging Face checkpoint that `AutoModelForCausalLM.from_pretrained` and vLLM load.

    Args:
        model: A transformers model from `ModelQuantizer.quantize_model`, frozen or not; not changed.
        output_dir: Folder to make. It appears when all of it is written.
        custom_mode: The format: "quark" (takes every scheme), "awq", "gptq", "fp8" or "compressed-tensors".
        weight_format: "real_quantized" (default: integer codes, small) or "fake_quantized" (float values; quark only).
        pack_method: Order of 4-bit codes in a word: "reorder" (AWQ kernels) or "order" (quark only).
        tokenizer: Saved beside the model; default: the tokenizer files of the folder the model came from.
        max_shard_size: Largest safetensors file.
        overwrite: Replace `output_dir` if it is there; False: raise. None: a folder without a model is written into,
            and one that quark wrote gets the new model in the place of its own; other files stay, and are named.
        attachments: Files of text that lie beside the weights: name -> text.
        reader: What it is made for: "transformers", or "vllm" or "sglang", which find experts that it does not.
        goal: The program of `quark.goals.GOALS` whose command the model card has. None: those of the servers that are
            known to load the folder.

    Returns:
        The folder.

    Raises:
        ConfigError: An unknown option, or a model that was not quantized or is no transformers model.
        NotSupportedError: The format has no place for what is quantized; names the schemes that it takes.
        OutputExistsError, OutputError: See there.
        ShapeError: A weight that the layout cannot pack; names it.
    """
    _quantized_as(model)
    target = FolderTarget(
        custom_mode, weight_format or REAL_QUANTIZED, pack_method, max_shard_size, reader, goal, attachments or {},
        tokenizer,
    )  # fmt: skip
    _require_transformers(model, "export_safetensors")
    if is_network(model) and custom_mode != "quark":
        raise NotSupportedError(f"diffusers loads no {custom_mode} folder of quark's. Possible: custom_mode='quark'.")
    return write_model(model, Path(output_dir), target, overwrite, opened_from(model))


@with_weights
def write_model(
    model: nn.Module, output: Path, target: OutputTarget, overwrite: bool | None, source: OpenedFolder | None
) -> Path:
    """Write a model of transformers or diffusers; see `export_safetensors`.

    Args:
        model: Quantized, in memory.
        output: Folder or file to make.
        target: What is written.
        overwrite: See `written_into`.
        source: That the model was loaded from; None: it is not known.
    """
    model = base_model(model)
    with without_adapters(model):
        writer = target.writer(of_model(model, *_quantized_as(model), source))
        if (undecoded := writer.check()) is not None:
            logger.warning("%s", undecoded)
        if source is not None:
            check_apart(output, source.path, whole=not target.is_file)
            if not target.is_file:
                check_files(source.path)  # what is copied at the end is refused at the beginning
        with written_into(output, overwrite, target.is_file, bool(getattr(target, "tokenizer", None))) as made:
            if rank() == 0:
                writer.write(made)
    logger.info("Exported to %s.", final_place(output))
    return output


def save_quantized(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """Write a loaded quantized model into a folder, in the format that it came in, as its `save_pretrained`.

    Args:
        model: The model.
        save_directory: Folder to make.
        options: `max_shard_size`; others of transformers have no meaning here, unless it has an adapter: then
            transformers writes that alone, as it does for any model.

    Raises:
        NotSupportedError: Another option, or a model that was read from a GGUF file.
        OutputExistsError, OutputError: See `export_safetensors`.
    """
    if has_adapter(model) and not is_network(model):
        type(model).save_pretrained(model, save_directory, **options)
        return
    if model.quant_format not in FORMATS:
        raise NotSupportedError(
            "save_pretrained writes folders, and this model was read from a GGUF file. Possible: export_gguf."
        )
    size = options.pop("max_shard_size", "5GB")
    if given := [name for name, value in options.items() if value not in (None, True)]:
        raise NotSupportedError(
            f"save_pretrained({given[0]}=...) does not apply to a quantized model. Possible: max_shard_size, or "
            "export_safetensors."
        )
    export_safetensors(model, save_directory, model.quant_format, max_shard_size=str(size))


def export_gguf(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_type: str,
    tokenizer_path: str | os.PathLike[str],
    *,
    overwrite: bool | None = None,
) -> Path:
    """Write one GGUF file, tokenizer included, that llama.cpp and transformers load.

    Args:
        model: A transformers model from `ModelQuantizer.quantize_model`, frozen or not, its weights quantized in groups
            that are whole blocks of 32 (int4, uint4 asymmetric, int8, MXFP4) or in block types; not changed.
        output_dir: Folder of the file.
        model_type: Name of the file without ".gguf".
        tokenizer_path: Folder that holds the tokenizer.
        overwrite: Replace the file if it is there; False: raise. None: replace it where it is a GGUF file.

    Returns:
        The file.

    Raises:
        NotSupportedError: A model, scheme or tokenizer that GGUF has no place for; names what is possible.
        ConfigError, FormatError, ShapeError, OutputExistsError, OutputError: See there.
    """
    from quark.torch.writers.gguf.file import GgufTarget  # with the tables of architectures

    _quantized_as(model)
    _require_transformers(model, "export_gguf")
    file = Path(output_dir) / f"{model_type}.gguf"
    write_model(model, file, GgufTarget(Path(tokenizer_path)), overwrite, opened_from(model))
    return file


def _quantized_as(model: nn.Module) -> tuple[QConfig, Plan]:
    """The config of a quantized model, and the plan that it was quantized by."""
    config = getattr(model, "quant_config", None)
    layers = quantized_layers(model)
    if isinstance(model, fx.GraphModule):
        raise ConfigError("A graph has no safetensors layout. Possible: save_params(..., quant_mode=fx_graph_mode).")
    if not isinstance(config, QConfig) or not layers:
        raise ConfigError("Only a model from ModelQuantizer.quantize_model can be exported; this one is not quantized.")
    return config, model.quant_plan  # type: ignore[return-value]


def _require_transformers(model: nn.Module, function: str) -> None:
    of_diffusers = function == "export_safetensors" and is_network(model)
    if not of_diffusers and not hasattr(getattr(model, "config", None), "to_json_file"):
        raise ConfigError(
            f"{function} writes transformers models; {type(model).__name__} has no transformers config. "
            "Possible: quark.torch.save_params, which stores any module."
        )
