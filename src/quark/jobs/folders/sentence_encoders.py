"""Folders of sentence-transformers whose model lies in a folder of its own: `modules.json`, `0_Transformer/`, ...

Where the model lies beside `modules.json`, as newer versions save it, the folder is one of transformers, and what else
it holds comes along.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.base.files import check_apart, check_folder, move_folder, temporary_folder
from quark.base.json_objects import plain_json
from quark.errors import FormatError, NotSupportedError
from quark.jobs.words import FOLDER_FORMS

MODULES = "modules.json"


def is_sentence_encoder(folder: Path) -> bool:
    """Return True where a folder lists modules, of which the model is one with a folder of its own."""
    return (folder / MODULES).is_file() and not (folder / "config.json").is_file()


def model_of(folder: Path) -> Path:
    """The folder of the model. Raises FormatError where the list names none, several, or one that lies elsewhere."""
    from quark.torch.model.folder_files import file_of, folder_of  # imports torch

    try:
        listed = plain_json((folder / MODULES).read_text(encoding="utf-8"))
        paths = [str(module["path"]) for module in listed if str(module["type"]).endswith("Transformer")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{folder / MODULES} is no list of modules: {error!r:.80}.") from None
    if len(paths) != 1:
        raise FormatError(
            f"{folder / MODULES} names {len(paths)} models of transformers. Possible: one, with its folder, as in "
            "0_Transformer/config.json."
        )
    found = folder_of(folder, paths[0])
    file_of(folder, f"{paths[0]}/config.json")
    return found


@contextmanager
def around(folder: Path, output: Path, form: str, force: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the model, and that to make of it; all else of the folder lies around it, as it was.

    Raises:
        FormatError: See `model_of`; a link leads out of the folder, or something in it is no file.
        NotSupportedError: A form that is one file.
        OutputError, OutputExistsError: See `check_folder`.
    """
    from quark.torch.model.folder_files import files_below  # imports torch

    inner = model_of(folder)
    if form not in FOLDER_FORMS:
        raise NotSupportedError(
            f"{folder} is a list of modules, and --export-format {form} is a file of one. Possible: {inner}."
        )
    check_apart(output, folder, whole=True)
    check_folder(output, force)
    around_it = [name for name in files_below(folder) if inner not in (folder / name).parents and name[0] != "."]
    with temporary_folder(output.absolute()) as scratch:
        whole = scratch / output.absolute().name  # which messages show
        for file in around_it:
            (whole / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, whole / file)
        place = whole / inner.relative_to(folder)
        yield inner, place
        move_folder(whole, output)
