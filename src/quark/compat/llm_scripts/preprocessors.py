"""Tokenizers and processors, which turn texts, images and sound into inputs: saved beside a quantized model."""

from __future__ import annotations

import os
from pathlib import Path

from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.compat.llm_scripts.model_loading import model_path

__all__ = ["maybe_save_preprocessors"]

KINDS = ("AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor")


def maybe_save_preprocessors(
    src_name_or_path: str | os.PathLike[str],
    dest_dir: str | os.PathLike[str],
    src_subfolder: str = "",
    trust_remote_code: bool = False,
) -> None:
    """Save tokenizer, processor and feature extractor of a model, each where it has one.

    Args:
        src_name_or_path: Folder of the model, or its name on the hub.
        dest_dir: Made if it is not there; files of the same names are replaced.
        src_subfolder: Where they lie in that folder.
        trust_remote_code: Run the code that the folder brings.

    Raises:
        FormatError: There is no such model.
    """
    folder = model_path(src_name_or_path) / src_subfolder
    transformers = import_transformers()
    for kind in KINDS:
        try:
            found = getattr(transformers, kind).from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            # transformers has no question "is there one?": it fails in any of these ways where there is none.
            logger.debug("%s has no %s: %s", folder, kind.removeprefix("Auto"), error)
            continue
        found.save_pretrained(Path(dest_dir))
