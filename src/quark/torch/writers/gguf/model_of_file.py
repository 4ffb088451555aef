"""A model of a GGUF file alone: transformers reads its config and tokenizer, and we its blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quark.base.files import require_regular
from quark.base.libraries.transformers import import_transformers, set_folder
from quark.errors import FormatError, as_format_error
from quark.gguf.hyperparameters import refuse_other_config, with_scaled_rope
from quark.gguf.reader import open_gguf
from quark.torch.writers.gguf.import_file import DTYPES, check_tensors, import_model_from_gguf

EXACT = (torch.float16, torch.bfloat16)
"""Dtypes of 16 bits, the first of which is taken that holds all that the file has in float."""


def model_of_gguf(file: Path, companions: Path) -> Any:
    """Load a GGUF file without the folder that it was made from.

    Args:
        file: The file.
        companions: Folder to make, for the tokenizer; its last part is what the model is called from now on.

    Returns:
        The model, computing with the blocks of the file; in the 16-bit dtype that holds its float tensors to the bit,
        else in float32.

    Raises:
        FormatError: No GGUF file, or one that transformers cannot make a config or tokenizer of.
    """
    require_regular(file)
    reader, transformers = open_gguf(file), import_transformers()
    options = {"gguf_file": file.name, "local_files_only": True}
    with as_format_error(file, "holds no model that transformers knows as GGUF"):
        config = transformers.AutoConfig.from_pretrained(file.parent, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    tokenizer.save_pretrained(companions)
    _drop_made_up(companions / "tokenizer.json", len(reader.get_field("tokenizer.ggml.tokens").contents()))
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise FormatError(f"{file}: {config.model_type} models have no class for language models in transformers.")
    with_scaled_rope(reader, config)
    refuse_other_config(
        file, reader, config, "that transformers makes of it. Possible: import_model_from_gguf with the float model."
    )
    dtype = _dtype(reader)
    with as_format_error(file, "has metadata that no model can be built of"), torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_tensors(file, reader, skeleton)  # sizes of the metadata may be any, and need no memory so far
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.config.dtype = dtype
    set_folder(model, str(companions))
    return import_model_from_gguf(model, file)


def _drop_made_up(described: Path, count: int) -> None:
    """Take out tokens that transformers adds to those of the file (one for the end of text): no row is theirs."""
    content = json.loads(described.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    described.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _dtype(reader: Any) -> torch.dtype:
    """The narrowest dtype that holds the tensors that are no blocks."""
    plain = []
    for tensor in reader.tensors:
        if tensor.tensor_type.name in DTYPES:
            value = torch.from_numpy(tensor.data.copy())
            plain.append(value.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else value)
    return next((d for d in EXACT if all(torch.equal(x.to(d).float(), x.float()) for x in plain)), torch.float32)
