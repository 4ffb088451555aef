"""Tokenizers and processors, which turn texts, images and sound into inputs: saved beside a quantized model."""

from __future__ import annotations

import os
from pathlib import Path

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.compat.llm_scripts.model_loading import model_path
from quark.errors import FormatError

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
        FormatError: There is no such model, or its files are damaged.
    """
    folder = model_path(src_name_or_path) / src_subfolder
    transformers = import_transformers()
    for kind in KINDS:
        try:
            with as_format_error(folder, trusted=trust_remote_code):
                found = getattr(transformers, kind).from_pretrained(
                    folder, trust_remote_code=trust_remote_code, local_files_only=True
                )
        except FormatError as error:
            # transformers has no question "is there one?": it fails in any of these ways where there is none.
            if not isinstance(error.__cause__, (OSError, ValueError, KeyError, ImportError)):
                raise
            logger.debug("%s has no %s: %s", folder, kind.removeprefix("Auto"), error)
            continue
        found.save_pretrained(Path(dest_dir))
