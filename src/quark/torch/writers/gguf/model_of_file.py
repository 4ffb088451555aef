"""A model of a GGUF file alone, computing with its blocks; see folder_of_file.py for its config and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quark.base.libraries.transformers import import_transformers, set_folder
from quark.gguf.reader import open_gguf
from quark.torch.writers.gguf.folder_of_file import tensors_of_gguf
from quark.torch.writers.gguf.import_file import import_opened

TYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes, the first of which is taken that holds all that the file has in float: float16 has more bits of a block."""


def model_of_gguf(file: Path, companions: Path) -> Any:
    """Load a GGUF file without the folder that it was made from.

    Args:
        file: The file.
        companions: Folder to make, for config and tokenizer; its last part is what the model is called from now on.

    Returns:
        The model, computing with the blocks of the file; in the 16-bit dtype that holds its float tensors to the bit,
        else in float32.

    Raises:
        FormatError, NotSupportedError: See `folder_of_gguf`.
    """
    reader = open_gguf(file)
    companions.mkdir(parents=True, exist_ok=True)
    # Sizes of the metadata may be any, and need no memory until they were compared with the tensors.
    skeleton = tensors_of_gguf(file, reader, companions, TYPES).model
    auto, dtype = import_transformers().AutoModelForCausalLM, skeleton.dtype
    model = auto.from_config(skeleton.config, dtype=dtype).eval()
    model.config.dtype = dtype
    set_folder(model, str(companions))
    return import_opened(model, file, reader)
