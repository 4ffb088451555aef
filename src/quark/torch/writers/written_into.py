"""Outputs of functions that are documented to write into what is there: a folder without a model, or one of quark's.

    processor saved, then the model       preprocessor_config.json            + config.json, model.safetensors
    the same script again                 all of these                        each replaced by the new one
    SentenceTransformer.save_pretrained   modules.json, 1_Pooling/            + config.json, model.safetensors

The folder is replaced by a new one that has the other files of the old: whole or not at all. config.json is the
youngest file of a folder as it is written, so that what is younger was saved there since.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quark.base.files import final_place, is_temporary
from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.errors import OutputExistsError
from quark.torch.calibration.distributed import from_first, rank, shared_output
from quark.torch.model.folder_files import travels_by_name

_WEIGHTS = re.compile(r"\.(safetensors|gguf|onnx)$|^pytorch_model.*\.bin$|\.index\.json$")
_OF_MODEL = re.compile(rf"{_WEIGHTS.pattern}|^(adapter_)?config\.json$|^model_index\.json$")
"""Files of which a folder with one holds a model, but config.json alone, which a script copies there first."""
_OTHER_WEIGHTS = re.compile(r"\.(bin|pth?|h5|msgpack|ckpt|npz)$")
_ABOUT = re.compile(rf"{_WEIGHTS.pattern}|^(generation_)?config\.json$|^README(_base)?\.md$|^quark_recipe\.yaml$")
"""Files of a folder of quark that say something of its model alone: they go with it."""
_TAG = re.compile(r"^- quark$", re.MULTILINE)
_MOST_NAMED = 5


@contextmanager
def written_into(path: Path, overwrite: bool | None, is_file: bool = False, tokenizer: bool = False) -> Iterator[Path]:
    """Yield what becomes `path` when the body ends; `shared_output` says what is raised.

    Args:
        path: Folder or file to write.
        overwrite: Replace what is there; False: raise. None: replace a GGUF file by another, and write into a folder
            that holds no model, or replace one that quark wrote.
        is_file: Whether it is a file.
        tokenizer: Whether the files of a tokenizer are written anew, instead of those that were saved there.
    """
    there = from_first(overwrite is None and (_is_gguf(path) if is_file else any(map(_counts, _entries(path)))))
    if not there or is_file:
        with shared_output(path, bool(overwrite) or there, is_file) as made:
            yield made
        if there:
            logger.info("Replaced %s, which was there.", path)
        return
    had_model = _require_of_quark(path)
    with shared_output(path, True, anything=True) as made:
        yield made
        if rank() == 0:
            kept = _keep(path.resolve(), made, had_model, tokenizer)
            named = ", ".join([*kept[:_MOST_NAMED], *(["..."] if kept[_MOST_NAMED:] else [])])
            logger.info(
                "%s %s%s.",
                "Replaced the model in" if had_model else "Written into",
                final_place(path),
                f", where these files stay: {named}" if kept else "",
            )


def _is_gguf(path: Path) -> bool:
    """Return True for a file of the kind that is one here: a file of another kind was not meant."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # not there, or no file
        return False


def _entries(folder: Path) -> list[Path]:
    if folder.is_dir():
        return list(folder.iterdir())
    return [folder] if folder.exists() else []


def _counts(path: Path) -> bool:
    return not is_temporary(path)


def _require_of_quark(folder: Path) -> bool:
    """Return True where a folder holds a model of quark's, and False where it holds none. Raises for another's."""
    names = [each.name for each in _entries(folder)]
    models = sorted(name for name in names if _OF_MODEL.search(name))
    if models == ["config.json"] and not any(map(_OTHER_WEIGHTS.search, names)):
        models = []  # copied there, or saved, before the weights
    if not folder.is_dir() or (models and not _is_of_quark(folder)):
        raise OutputExistsError(
            f"{folder} exists already"
            + (f", and holds a model that quark did not write ({', '.join(models[:3])})" if folder.is_dir() else "")
            + ". Choose another output, or replace it with overwrite=True."
        )
    return bool(models)


def _is_of_quark(folder: Path) -> bool:
    """Return True where config.json, or the card, says that quark wrote a folder."""
    if (folder / "adapter_config.json").exists():  # transformers would put it onto the new layers
        return False
    try:
        stored = plain_json((folder / "config.json").read_text(encoding="utf-8"))
        card = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
    except (OSError, ValueError):
        return False
    quantization = stored.get("quantization_config") if isinstance(stored, dict) else None
    if not isinstance(quantization, dict):
        return _holds_scales(folder)
    front = card.split("\n---\n")[0] if card.startswith("---\n") else ""
    return quantization.get("quant_method") == "quark" or "export" in quantization or bool(_TAG.search(front))


def _holds_scales(folder: Path) -> bool:
    """Return True where a float config lies over codes and scales: a script copied it there again, before the model."""
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                if any(name.endswith("weight_scale") for name in tensors.keys()):  # noqa: SIM118
                    return True
    except (OSError, SafetensorError):
        pass
    return False


def _keep(old: Path, new: Path, had_model: bool, tokenizer: bool) -> list[str]:
    """Put the files of a folder beside the new ones, but for those of its model; return their names.

    Args:
        old, new: The folder as it is, and as it will be.
        had_model: Whether it had_model a model.
        tokenizer: See `written_into`.
    """
    since = (old / "config.json").stat().st_mtime_ns if had_model else 0
    kept = []
    for place, folders, files in os.walk(old):
        folders[:] = sorted(each for each in folders if _counts(Path(place) / each))
        links = [each for each in folders if (Path(place) / each).is_symlink()]
        for name in sorted([*files, *links]):
            path = Path(place) / name
            relative = path.relative_to(old)
            target, at_top = new / relative, relative.parent == Path()
            saved = travels_by_name(relative.name) and path.lstat().st_mtime_ns > since and not tokenizer
            if (had_model and at_top and _ABOUT.search(name)) or (os.path.lexists(target) and not saved):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            _second_name(path, target)
            kept.append(relative.as_posix())
    return kept


def _second_name(path: Path, target: Path) -> None:
    """Make a file the same file under another name, or a copy where the file system has no such names."""
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)
