"""Outputs that are whole or absent: written into a temporary folder beside their place, flushed, then renamed.

    .quark-1f0c93ab.tmp/        locked as long as its process lives
        out                     the new output under its own name, so that no name becomes too long
        .quark-old/out          the output before, where the system cannot exchange two names
        .quark-gone/out.data    a second name of a file that goes with the output before, as soon as `out` is renamed

A process that is killed leaves such a folder there. Nobody has its lock any longer, by which the next run that
writes into the same folder knows that it may remove it. Where there are no such locks (Windows, NFS) it stays.

A link to a folder stays, and the folder that it names is replaced: it says where there is room. A link to a file is
replaced by the file, and what it names stays as it is: stores that keep equal files once are full of such links.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from quark.errors import FormatError, OutputError, OutputExistsError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.quark-[0-9a-f]{8}\.tmp")
"""Names of temporary folders."""
OLD, GONE = ".quark-old", ".quark-gone"
PIECE = 1 << 25
"""Bytes of a file that are hashed at once: whole pages of memory."""
KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
}


@contextmanager
def atomic_folder(path: str | os.PathLike[str], overwrite: bool = False, anything: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the body ends, and vanishes when it fails.

    Args:
        path: The folder.
        overwrite: Replace what is there.
        anything: What is replaced may hold no model: the body takes care of it.

    Raises:
        OutputExistsError: `path` is a file or a folder that is not empty, and `overwrite` is False.
        OutputError: The disk is full or the folder cannot be written.
    """
    target = (check_place if anything else check_folder)(path, overwrite)
    with temporary_folder(target) as temporary:
        folder = temporary / target.name
        folder.mkdir()
        yield folder
        _put(folder, target, temporary)


def move_folder(folder: Path, path: str | os.PathLike[str]) -> None:
    """Move a folder to `path`, which is replaced if it is there. Raises OutputError, and leaves `path` as it was.

    From another file system it is copied, and stays where it was.
    """
    target = check_folder(path, overwrite=True)
    with temporary_folder(target) as temporary:
        whole = temporary / target.name
        _renamed(folder, whole)
        _put(whole, target, temporary)


def move_file(file: Path, path: str | os.PathLike[str]) -> None:
    """Move a file to `path`, which is replaced if it is there; as `move_folder`."""
    with atomic_file(path) as whole:
        _renamed(file, whole)


def _renamed(path: Path, to: Path) -> None:
    try:
        path.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(path, to) if path.is_dir() else shutil.copyfile(path, to)


@contextmanager
def atomic_file(path: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `path` when the body ends, and vanishes when it fails.

    Raises:
        OutputExistsError: `path` is there, and `overwrite` is False; or it is a folder.
        OutputError: The disk is full or the file cannot be written.
    """
    target = check_file(path, overwrite)
    with temporary_folder(target) as temporary:
        file = temporary / target.name
        yield file
        _keep_modes(file, target)
        flush(file)
        file.replace(target)
        flush(target.parent)


def replace_file(file: Path, target: Path, stale: Collection[Path]) -> None:
    """Rename a new file, which lies alone in a temporary folder, to `target`; then remove what only the old one read.

    Where the process is killed between the two, the next run that writes into the folder removes the rest.

    Args:
        file: In a folder of `temporary_folder(target)`.
        target: What it becomes.
        stale: Files beside `target`.
    """
    gone = file.parent / GONE
    if stale:
        gone.mkdir()
    for path in stale:
        with suppress(OSError):  # a file system without second names: what a kill leaves stays
            os.link(path, gone / path.name)
    _keep_modes(file, target)
    flush(file)
    file.replace(target)
    flush(target.parent)
    for path in stale:
        with suppress(OSError):  # Windows: while a session reads it
            path.unlink()


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, made for this process alone, and gone when the body ends.

    Folders above `target` are made, and removed where the body fails.

    Raises:
        OutputError: In the place of an OSError of the body; names `target`.
    """
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target.parent) as temporary:
            yield temporary
    except BaseException as error:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        if not isinstance(error, OSError) or isinstance(error, (OutputError, OutputExistsError)):
            raise
        raise OutputError(
            f"Could not write {final_place(target)}: {error.strerror or error}. No part of it was left."
        ) from error


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder in `parent` for this user alone, gone when the body ends.

    Where the process is killed, the next run that makes such a folder in `parent` removes it.
    """
    remove_dead(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        surely(lambda: shutil.rmtree(folder, ignore_errors=True))
        if lock is not None:
            os.close(lock)


def surely(end: Callable[[], None]) -> None:
    """Call what ends something; once more where a signal comes meanwhile, whose handler raises wherever it comes."""
    try:
        end()
    except KeyboardInterrupt:
        with suppress(FileNotFoundError):
            end()
        raise


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk: what the system still holds, a loss of power loses.

    Raises:
        OSError: The disk is full, or broken.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    except PermissionError:  # a file that its owner may not read, and folders under Windows
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # what is no disk
            raise
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Return True where a folder is, by its name, one of those that runs work in."""
    return _TEMPORARY.fullmatch(path.name) is not None


def final_place(path: str | os.PathLike[str]) -> Path:
    """Where something in a temporary folder of an output is to be: what messages call it."""
    return Path(*(part for part in Path(path).parts if _TEMPORARY.fullmatch(part) is None))


def hold(folder: Path) -> int | None:
    """Lock a folder for this process; a descriptor, or None where the system or the file system has no such locks.

    The lock ends with the descriptor, which children made by fork share.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It is not there.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def digest_of(file: Path, ended: Event | None = None) -> str:
    """SHA-256 of the bytes of a file, in hexadecimal digits.

    Args:
        file: Of any size.
        ended: Set by another thread that needs it no more.

    Raises:
        CancelledError: `ended` was set.
    """
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size < PIECE:
            digest.update(opened.read())
            return digest.hexdigest()
        # Nothing is copied, and Python's lock is asked for once a piece: imports, which run beside it, hold it long.
        with mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            for start in range(0, size, PIECE):
                if ended is not None and ended.is_set():
                    raise CancelledError
                with whole[start : start + PIECE] as piece:
                    digest.update(piece)
                if hasattr(mapped, "madvise"):
                    mapped.madvise(mmap.MADV_DONTNEED, start, min(PIECE, size - start))
    return digest.hexdigest()


def _holds(folder: Path, path: Path) -> bool:
    """Return True where a path, or what it links to, lies in a folder."""
    return any(_same(folder, parent) for parent in (*path.parents, *_real(path).parents))


# What may be written. ------------------------------------------------------------------------------------------------


def check_apart(output: str | os.PathLike[str], *inputs: Any, whole: bool = False) -> None:
    """Raise OutputExistsError where an output is, or holds, an input: by its own name, a link, or another case.

    Args:
        output: A file or folder to write.
        inputs: Files and folders that are read; what is no path (a model in memory, None) is passed over.
        whole: Of folders: they stay as they are, so that the output may not lie in one either.
    """
    target = _absolute(output)
    for given in inputs:
        if not isinstance(given, (str, os.PathLike)) or not os.fspath(given) or "\0" in os.fspath(given):
            continue
        source = Path(os.path.abspath(given))  # noqa: PTH100 - resolve() would follow links
        if _same(target, source):
            raise OutputExistsError(f"{output} is {given} itself, which is read. Choose another output.")
        # A folder may be made of links to files that lie elsewhere.
        read = [source, *(path for path in _entries(source) if whole and path.is_symlink())]
        if _is_folder(target) and any(_holds(target, path) for path in read):
            raise OutputExistsError(f"{output} holds {given}, which is read. Choose another output.")
        if whole and any(_same(parent, source) for parent in _real(target).parents):
            raise OutputExistsError(f"{output} lies in {given}, which is read. Choose an output outside it.")


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)  # noqa: PTH121
    except OSError:  # one is not there
        return not os.path.exists(one) and not os.path.exists(other) and _real(one) == _real(other)  # noqa: PTH110


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for links in a circle


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # no folder, or one that cannot be read
        return []


def check_file(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """The absolute path of a file that can be written. To be called before the work, whose end is too late to say no.

    Raises:
        OutputExistsError: It is there, and may not be replaced; or it is a folder.
        OutputError: It cannot be written there; says why.
    """
    target = _absolute(path)
    if os.fspath(path).endswith((os.sep, os.altsep or os.sep)):
        raise OutputError(f"{path} ends like a folder, and the output is a file. Possible: a name after it.")
    if _is_folder(target):
        raise OutputExistsError(f"{path} is a folder, and the output is a file. Choose another output.")
    return _checked(target, Path(path), overwrite)


def check_folder(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """The absolute path of a folder that can be written. An empty one may be there; what is replaced holds a model.

    Where `path` is a link to a folder: the path of that folder.
    """
    target = check_place(path, overwrite)
    found = [entry for entry in _entries(target) if not is_temporary(entry)]
    if found and not any(map(_is_of_model, found)):
        raise OutputExistsError(
            f"{path} is a folder that holds no model, but {found[0].name!a}: it is not replaced. Choose another output."
        )
    return target


_MODEL_FILES = ("config.json", "model_index.json", "modules.json")
"""Of a model, of a pipeline of diffusers, and of a list of modules: a folder with one holds a model."""


def _is_of_model(path: Path) -> bool:
    return path.name in _MODEL_FILES or path.suffix.lower() in (".safetensors", ".gguf", ".onnx")


def check_place(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """The absolute path of a folder that can be written, where one that is replaced may hold anything."""
    target = _absolute(path)
    if _is_folder(target):
        target = target.resolve()
        if os.path.ismount(target):  # Path.is_mount raises under Windows before Python 3.12
            raise OutputError(f"{path} is a mount point, which cannot be replaced. Possible: a folder inside it.")
        if Path.cwd().is_relative_to(target):
            raise OutputError(f"{path} is or holds the folder that this program runs in. Choose another output.")
    return _checked(target, Path(path), overwrite)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a name that is too long


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Without "." and "..", but with links. Raises OutputError for what no system takes as a path."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise OutputError(f"{os.fspath(path)!r} is no path of an output.")
    try:
        target = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    except FileNotFoundError:
        raise OutputError(f"{path} cannot be written: the folder that this program runs in is gone.") from None
    try:
        same = os.fsencode(target) == target.encode()
    except UnicodeError:
        same = False
    if not same:  # libraries that are not Python take each path for UTF-8
        raise OutputError(f"{target!a} is no UTF-8 under this locale. Possible: PYTHONUTF8=1, or a name in ASCII.")
    return Path(target)


def _checked(target: Path, named: Path, overwrite: bool) -> Path:
    try:
        found = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError as error:
        raise OutputError(f"Could not write {named}: {error.strerror}. No part of it was left.") from error
    if found is not None:
        _check_replaceable(target, named, overwrite)
    _check_parents(target, named)
    return target


def _check_replaceable(target: Path, named: Path, overwrite: bool) -> None:
    """Raise for what is there and may not, or cannot, be replaced."""
    if not target.exists():
        raise OutputError(f"{named} is a link to {target.readlink()}, which does not exist. Remove the link.")
    kind = stat.S_IFMT(target.stat().st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise OutputError(f"{named} is {KINDS.get(kind, 'no file')}, which is never replaced. Choose another output.")
    empty_folder = kind == stat.S_IFDIR and not any(target.iterdir())
    if not overwrite and not empty_folder:
        raise OutputExistsError(
            f"{named} exists already. Choose another output, or replace it with overwrite (--force)."
        )


def _check_parents(target: Path, named: Path) -> None:
    """Raise OutputError where the folder of the output cannot be made, or cannot be written."""
    folder = next(folder for folder in target.parents if os.path.lexists(folder))
    if not _is_folder(folder):
        raise OutputError(f"{named} cannot be written: {folder} is not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{named} cannot be written: {folder} is read-only, for this user or at all.")
    try:  # what a system lets root do everywhere else, it may not let anyone do in /proc
        trial, lock = _make(folder)
        surely(trial.rmdir)
    except OSError as error:
        raise OutputError(f"{named} cannot be written: {folder} takes no file ({error.strerror}).") from None
    if lock is not None:
        os.close(lock)
    longest = os.pathconf(folder, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    for name in target.relative_to(folder).parts:
        if len(os.fsencode(name)) > longest:
            raise OutputError(f"{named} cannot be written: the name {name[:20]}... has more than {longest} bytes.")


# Temporary folders. --------------------------------------------------------------------------------------------------


def _make(parent: Path) -> tuple[Path, int | None]:
    """A new temporary folder, and its lock."""
    while True:
        folder = parent / f".quark-{uuid.uuid4().hex[:8]}.tmp"
        try:
            folder.mkdir(mode=0o700)
            # Until there is the lock, another run may take the folder for a dead one.
            with suppress(FileNotFoundError, BlockingIOError):
                lock = hold(folder)
                if lock is None or folder.exists():
                    return folder, lock
                os.close(lock)
        except BaseException:  # a signal
            with suppress(OSError):
                folder.rmdir()
            raise


def remove_dead(parent: Path) -> None:
    """Remove the temporary folders that no process holds."""
    try:
        found = list(filter(is_temporary, parent.iterdir()))
    except OSError:  # a folder may be written and not be read
        return
    for folder in found:
        try:
            lock = hold(folder)
        except OSError:  # alive, another's, or gone meanwhile
            continue
        if lock is not None:
            _put_back(folder)
            _take_away(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _put(new: Path, target: Path, temporary: Path) -> None:
    """Give `new` the name `target`; what had it goes into `temporary`."""
    for path in (*new.rglob("*"), new):
        if not path.is_symlink():
            _keep_modes(path, target / path.relative_to(new))
            flush(path)
    _rename(new, target, temporary)
    flush(target.parent)


def _keep_modes(new: Path, old: Path) -> None:
    """Give what replaces a file or folder its permissions: what others could not read, they cannot read then."""
    with suppress(OSError):  # nothing is replaced, or the file system has no permissions
        new.chmod(stat.S_IMODE(old.stat().st_mode))


def _rename(new: Path, target: Path, temporary: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    if _exchange(new, target):
        return
    (temporary / OLD).mkdir()
    try:
        target.rename(temporary / OLD / target.name)
        new.rename(target)
    except OSError:
        _put_back(temporary)
        raise


def _put_back(temporary: Path) -> None:
    """Undo the first of two renames between which a run failed or was killed."""
    for old in (temporary / OLD).glob("*"):
        if not os.path.lexists(temporary.parent / old.name):
            with suppress(OSError):
                old.rename(temporary.parent / old.name)


def _take_away(temporary: Path) -> None:
    """Do what a run was killed before: remove the files of an output that has been replaced.

    A second name of the file itself proves that they are meant; a name alone could be anyone's.
    """
    gone = temporary / GONE
    if {entry.name for entry in _entries(temporary)} != {GONE}:
        return  # the new output was not renamed yet, and the old one reads them
    for second in _entries(gone):
        first = temporary.parent / second.name
        if _same(first, second):
            with suppress(OSError):
                first.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD of Linux; RENAME_EXCHANGE, and RENAME_SWAP of macOS
    paths = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "linux":
            return ctypes.CDLL(None).renameat2(here, paths[0], here, paths[1], exchange) == 0
        if sys.platform == "darwin":
            return ctypes.CDLL(None).renamex_np(*paths, exchange) == 0
    except (AttributeError, OSError):  # an older C library
        return False
    return False


def require_regular(path: Path) -> None:
    """Raise FormatError for what is no regular file, or not there: opening a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FormatError(f"{path} is not a file: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is not a file but a folder, pipe or device.")


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""Endings of files that torch and pickle write; what reads them can be made to run anything."""


def require_config(folder: Path) -> None:
    """Raise FormatError for a folder without the config.json of a model, before the libraries that read it load."""
    try:
        found = (folder / "config.json").is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL
        found = False
    if not found:
        refuse_pickle(folder)
    if not found and _is_hub_name(folder):
        raise FormatError(
            f"{folder} is no model folder: nothing is there. Possible: a folder that holds config.json and weights, as "
            f"a model of the Hugging Face hub is after `hf download {folder} --local-dir DIR`."
        )
    if not found:
        raise FormatError(f"{folder} is no model folder: {why_no_model(folder)}.{_hint(folder)}")


def refuse_pickle(path: Path, inside: bool = True) -> None:
    """Raise FormatError for a pickle in the place of a model.

    Args:
        path: A file, or a folder whose only weights may be such files.
        inside: Whether a folder is looked into.
    """
    try:
        files = sorted(path.iterdir()) if inside and path.is_dir() else [path] if path.is_file() else []
    except (OSError, ValueError):  # a name too long, or with a NUL
        return
    suffixes = [file.suffix.lower() for file in files]
    pickled = next((file for file, suffix in zip(files, suffixes, strict=True) if suffix in _PICKLES), None)
    if pickled is not None and ".safetensors" not in suffixes:
        raise FormatError(
            f"{pickled} is a pickle, whose reader would run what it contains, and is never read as a model. Possible: "
            "a folder with config.json and model.safetensors, which save_pretrained of its model writes."
        )


def why_no_model(folder: Path) -> str:
    """Why a path without a config.json inside is no model folder."""
    return "it has no config.json" if os.path.lexists(folder) else "nothing is there"


def _hint(folder: Path) -> str:
    """Return the use of a folder without a config.json, where names in it tell; "" where they do not."""
    if folder.suffix.lower() == ".gguf":
        return f" It is a GGUF file. Possible: quark convert {folder} -o FOLDER, and that folder here."
    try:
        inside = sorted(path for path in folder.glob("snapshots/*") if (path / "config.json").is_file())
        adapter = (folder / "adapter_config.json").is_file()
        lora, modules = ((folder / name).is_file() for name in ("pytorch_lora_weights.safetensors", "modules.json"))
        models = sorted(path.parent for path in folder.glob("*_Transformer/config.json")) if modules else []
    except (OSError, ValueError):
        return ""
    if adapter:
        return " It is an adapter: `quark quantize` takes it, other commands take its model (peft: merge_and_unload)."
    if lora:
        return (
            " It is a LoRA of diffusers, without what it belongs to. Possible: load_lora_weights and fuse_lora of the "
            "pipeline, unload_lora_weights, save_pretrained, and the folder that this writes."
        )
    if modules:
        return (
            " It is a list of modules (sentence-transformers), which `quark quantize` and `quark plan` take; other "
            f"commands take its model{': ' + ' or '.join(map(str, models[:3])) if models else ''}."
        )
    if inside:  # of the cache of huggingface_hub
        return f" Possible: {' or '.join(map(str, inside[:3]))}."
    return ""


def _is_hub_name(path: Path) -> bool:
    """Return True where a path where nothing is reads like OWNER/NAME."""
    try:
        there = path.exists() or path.parent.exists()
    except (OSError, ValueError):
        there = True
    return not there and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path.as_posix()) is not None
