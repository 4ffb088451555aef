"""ModelExporter and ModelImporter: the classes that earlier generations of scripts write and read checkpoints with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch.checkpoint.importer import import_model_from_safetensors
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.writers.onnx.export import export_onnx
from quark.torch.writers.safetensors import export_gguf, export_safetensors


def _load_weights_from_safetensors(model_info_dir: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a folder as they are stored. Raises FormatError for a folder without safetensors."""
    return {name: file.read(name) for file in OpenedFolder(Path(model_info_dir)).files for name in file.names}


class ModelExporter:
    """The exporter before `export_safetensors`.

    Args:
        config: An ExporterConfig, or the export folder itself (the oldest form).
        export_dir: Folder to write to.
    """

    def __init__(self, config: Any = None, export_dir: str | os.PathLike[str] | None = None) -> None:
        if export_dir is None:
            if not isinstance(config, (str, os.PathLike)):
                raise ConfigError("ModelExporter needs a folder: ModelExporter(export_dir) or (config, export_dir).")
            config, export_dir = None, config
        self.config = config
        self.export_dir = Path(export_dir)

    def export_safetensors_model(
        self, model: nn.Module, quant_config: QConfig | None = None, custom_mode: str = "quark", tokenizer: Any = None
    ) -> Path:
        """Write a Hugging Face checkpoint; see `export_safetensors`."""
        options = getattr(self.config, "json_export_config", None)
        return export_safetensors(
            model,
            self.export_dir,
            custom_mode,
            getattr(options, "weight_format", None),
            getattr(options, "pack_method", "reorder"),
            tokenizer=tokenizer,
        )

    def export_quark_model(
        self, model: nn.Module, quant_config: QConfig | None = None, custom_mode: str = "quark"
    ) -> Path:
        """Write a Hugging Face checkpoint: the "quark format" of old is the same tensors in the same layout."""
        return self.export_safetensors_model(model, quant_config, custom_mode)

    def export_onnx_model(
        self,
        model: nn.Module,
        input_args: Any,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        verbose: bool = False,
        opset_version: int | None = None,
        do_constant_folding: bool = True,
        operator_export_type: Any = None,
        uint4_int4_flag: bool | None = None,
        **options: Any,
    ) -> Path:
        """Write `quark_model.onnx`; see `export_onnx`, which knows further options.

        `uint4_int4_flag` is by default that of the config, if there is one.
        """
        config = getattr(self.config, "onnx_export_config", None)
        flag = getattr(config, "uint4_int4_flag", False) if uint4_int4_flag is None else uint4_int4_flag
        return export_onnx(
            model,
            self.export_dir,
            input_args,
            opset_version,
            input_names,
            output_names,
            verbose,
            do_constant_folding,
            operator_export_type,
            flag,
            **options,
        )

    def export_gguf_model(self, model: nn.Module, tokenizer_path: str | os.PathLike[str], model_type: str) -> Path:
        """Write one GGUF file; see `export_gguf`."""
        return export_gguf(model, self.export_dir, model_type, tokenizer_path)


class ModelImporter:
    """The importer before `import_model_from_safetensors`.

    Args:
        model_info_dir: The exported folder.
        saved_format: "hf_format" or "safetensors" (one and the same), or "quark_format".
        multi_device: For the documented signature.
    """

    def __init__(
        self, model_info_dir: str | os.PathLike[str], saved_format: str = "quark_format", multi_device: bool = False
    ) -> None:
        if saved_format not in ("quark_format", "hf_format", "safetensors"):
            raise ConfigError(f"saved_format={saved_format!r}; possible: 'quark_format', 'hf_format', 'safetensors'.")
        self.model_info_dir = Path(model_info_dir)

    def import_model_info(self, model: nn.Module) -> nn.Module:
        """Load the folder into a float model; see `import_model_from_safetensors`."""
        return import_model_from_safetensors(model, self.model_info_dir)
