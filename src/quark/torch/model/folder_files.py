"""The files of a model folder: each a regular file that lies in it.

A folder comes from elsewhere. A name or a link in it that leads out would be read, and copied into the output, with the
rights of whoever runs quark; a pipe or a device would be waited for without end.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from quark.base.files import refuse_pickle
from quark.base.json_objects import plain_json
from quark.errors import FormatError, one_line
from quark.torch.diffusion.component import STEM

INDEX, PIPELINE = "model.safetensors.index.json", "model_index.json"
MODULES = "modules.json"
"""The file in which a sentence encoder lists its parts."""
_SHARD = re.compile(r"-\d+-of-\d+")
_SIDE_FILES = re.compile(
    r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|preprocessor|processor_config|\.model$|\.py$"
    r"|^modules\.json$|^(config_)?sentence_\w+\.json$"
)
"""Files of a source checkpoint that travel along, whatever their size."""
_TEMPLATES = "additional_chat_templates"
_STAYS = re.compile(
    r"^\.|^(generation_|adapter_)?config\.json$|quant\w*_config\.json$|^params\.json$|\.index\.json$"
    r"|\.(safetensors|bin|pt|pth|h5|msgpack|onnx|onnx_data|data|gguf|ckpt|npz|tflite|zip|gz|tar|partial)$"
)
"""Weights, and what is said of them: the output has its own."""
_LARGEST = 64 << 20
"""Bytes of a file of any other name that travels along: each tokenizer calls its files as it likes."""
_TOKENIZER = re.compile(r"tokeniz|vocab|tekken|tiktoken|\.model$")
"""Files without which a program finds no tokenizer; any one of them may be all that a tokenizer needs."""
_PREPROCESSOR = "preprocessor_config.json"
_READ = re.compile(rf"{_SIDE_FILES.pattern}|\.json$|\.safetensors$|\.bin$")
"""Files that quark, or transformers on its behalf, opens."""
_BLOB = re.compile(r"models--[^/]+/blobs/[0-9a-f]{40,64}$")
"""The path that links in a snapshot of huggingface's cache lead to: contents under their hashes."""


def regular_file(path: Path) -> Path:
    """The path itself. Raises FormatError where there is no regular file, or a link to one; opens nothing."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is a folder, a pipe or a device; a regular file is needed.")
    return path


def file_of(folder: Path, name: str) -> Path:
    """A regular file of a folder.

    Args:
        folder: The folder, which may itself be a link.
        name: Relative to it.

    Raises:
        FormatError: The name, or the link of that name, leads out of the folder; there is no such file, or no file.
    """
    return regular_file(_within(folder, name))


def folder_of(folder: Path, name: str) -> Path:
    """A folder inside a folder, by the way to it: not the folder itself.

    Raises:
        FormatError: The name, or a link of that name, leads out of the folder; there is no such folder.
    """
    path = _within(folder, name)
    if not PurePosixPath(name).parts or not path.is_dir():
        raise FormatError(f"{folder} names the folder {name!r}, which is not there.")
    return path


def components(folder: Path) -> dict[str, tuple[str, str]]:
    """The components of a pipeline of diffusers that have folders: name -> library and class, as model_index.json says.

    Raises:
        FormatError: model_index.json is none, or a name in it, or a link of that name, leads elsewhere.
    """
    return {name: value for name, value in _named_components(folder).items() if (folder / name).is_dir()}


def absent_components(folder: Path) -> list[str]:
    """The components that model_index.json names, and that have no folder. Raises FormatError as `components` does."""
    return [name for name in _named_components(folder) if not (folder / name).is_dir()]


def _named_components(folder: Path) -> dict[str, tuple[str, str]]:
    path = file_of(folder, PIPELINE)
    try:
        stored = plain_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is not JSON: {one_line(error)}.") from None
    if not isinstance(stored, dict):
        raise FormatError(f"{path} is no object of components.")
    found = {}
    for name, value in stored.items():
        named = isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
        if not named or name.startswith("_"):
            continue
        if PurePosixPath(name).parts != (name,):
            raise FormatError(f"{path} names the component {name!r:.80}, which is no folder beside it.")
        _within(folder, name)
        found[name] = (value[0], value[1])
    return found


def files_below(folder: Path, inside: Sequence[str] = ("",)) -> Iterator[str]:
    """Every file of a folder at any depth, in order, by its name relative to the folder.

    Args:
        folder: The folder.
        inside: Names of folders of it that are looked at alone.

    Raises:
        FormatError: As `file_of` does; a link to a folder is no file.
    """
    for name in inside:
        for place, folders, files in os.walk(folder / name):
            folders.sort()
            linked = [each for each in folders if (Path(place) / each).is_symlink()]
            for each in sorted([*files, *linked]):
                found = (Path(place) / each).relative_to(folder).as_posix()
                file_of(folder, found)
                yield found


def check_files(folder: Path) -> None:
    """Check every file of a folder that may be opened by its name. Raises FormatError as `file_of` does."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (_READ.search(path.name) and not path.is_dir()) or _travels(path):
            file_of(folder, path.name)
    if (folder / "adapter_config.json").exists():
        raise FormatError(
            f"{folder} holds an adapter (adapter_config.json), which transformers would put onto the quantized layers. "
            "Merge the adapter first (peft: merge_and_unload), or remove its files."
        )
    # A plan needs no weights, so that shards may be absent.
    index = _weights(folder)[0] if folder.is_dir() else folder
    for name in _shard_names(index) if index.is_file() else []:
        if _is_there(folder, name):
            file_of(folder, name)


def side_files(folder: Path) -> list[Path]:
    """The files that travel along with a checkpoint, relative to its folder. Raises FormatError as `file_of` does."""
    found = sorted(path.name for path in folder.iterdir() if _travels(path))
    found += sorted(f"{_TEMPLATES}/{path.name}" for path in folder.glob(f"{_TEMPLATES}/*") if not path.is_dir())
    if MODULES in found:
        # A sentence encoder: what stands after the model (pooling, a dense layer) lies in folders of the same folder.
        inner = [path for path in folder.glob("*/*") if re.match(r"\d+_\w+$", path.parent.name) and not path.is_dir()]
        found += sorted(path.relative_to(folder).as_posix() for path in inner)
    return [file_of(folder, name).relative_to(folder) for name in found]


def travels_by_name(name: str) -> bool:
    """Return True for files of tokenizers and processors, and lists of modules: they belong to a model by name."""
    return _SIDE_FILES.search(name) is not None


def lists_modules(*folders: Path) -> bool:
    """Look for a list of modules of sentence-transformers in one of some folders."""
    return any((folder / MODULES).is_file() for folder in folders)


def has_tokenizer(folder: Path) -> bool:
    """Look for a tokenizer in the folder of a model, or for a preprocessor in its place, as models of images have.

    Those of a sentence encoder, or of a pipeline, lie in folders of the folder.
    """
    names = [path.name for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return any(name == _PREPROCESSOR or _TOKENIZER.search(name) for name in names)


def _travels(path: Path) -> bool:
    """Return True where a file at the top of a folder goes into the output too."""
    if travels_by_name(path.name):
        return not path.is_dir()
    # Only a model folder has all of its files copied: where a model was built by hand, its name may be that of another.
    model = (path.parent / "config.json").is_file()
    return model and not _STAYS.search(path.name) and path.is_file() and path.stat().st_size <= _LARGEST


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: the single one where there is one, as transformers takes it.

    Raises:
        FormatError: There are none, the index is damaged, or names what is no file of the folder.
    """
    index, single = _weights(folder)
    if index.exists() and not single.exists():
        names = _shard_names(index)
        missing = next((name for name in names if not _is_there(folder, name)), None)
        if missing:
            raise FormatError(f"{index} names {missing}, which is not there.")
        return [file_of(folder, name) for name in names]
    if not single.exists():
        pickled = next(iter(sorted(folder.glob("*pytorch_model*.bin"))), None)
        if pickled is None or not (folder / "config.json").is_file():
            refuse_pickle(folder)
        network = single.name.startswith(STEM)
        read = "" if network else "is read for --scheme and --for, whole in memory; "
        block = "" if network else " for what reads it block by block"
        raise FormatError(
            f"{folder} holds neither {single.name} nor {index.name}."
            + (f" {pickled.name} {read or 'is not read: '}save the model once by save_pretrained{block}."
               if pickled else "")
        )  # fmt: skip
    return [file_of(folder, single.name)]


def _weights(folder: Path) -> tuple[Path, Path]:
    """Where the index and the single file of a folder lie, or would lie: of transformers, or of diffusers.

    diffusers has variants of them (fp16); one is taken where it is the only one.
    """
    if not any(folder.glob(f"{STEM}*")):
        return folder / INDEX, folder / "model.safetensors"
    index, single = folder / f"{STEM}.safetensors.index.json", folder / f"{STEM}.safetensors"
    if not index.exists() and not single.exists():
        indices = sorted(folder.glob(f"{STEM}.safetensors.index.*.json"))
        singles = [path for path in sorted(folder.glob(f"{STEM}.*.safetensors")) if not _SHARD.search(path.name)]
        if len(indices) + len(singles) > 1:
            found = ", ".join(path.name for path in (*indices, *singles))
            raise FormatError(f"{folder} holds several variants of its weights: {found}. Possible: one alone.")
        return next(iter(indices), index), next(iter(singles), single)
    return index, single


def _shard_names(index: Path) -> list[str]:
    """The files that an index names. Raises FormatError for one that is damaged."""
    content = file_of(index.parent, index.name).read_bytes()
    try:
        names = set(json.loads(content)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index} is not a safetensors index: {error}.") from None
    if not all(isinstance(name, str) for name in names):
        raise FormatError(f"{index} is not a safetensors index: its weight_map holds other things than file names.")
    return sorted(names)


def _is_there(folder: Path, name: str) -> bool:
    return os.path.exists(_within(folder, name))  # noqa: PTH110 - Path.exists raises for a name that is too long


def _within(folder: Path, name: str) -> Path:
    """The path of a name that does not lead out of a folder, whether it is there or not."""
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or "\0" in name:
        raise FormatError(f"{folder} names the file {name!r}, which is outside the folder.")
    path = folder / name
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise FormatError(f"{path} is a broken link: {error}.") from None
    if not target.is_relative_to(folder.resolve()) and not _BLOB.search(target.as_posix()):
        raise FormatError(f"{path} is a link to {target}, out of its folder: copy the file to its place.")
    return path
