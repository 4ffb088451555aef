"""The manifest of a run that can be resumed: its settings, what is finished, and the state to go on from.

    work/manifest.json           settings, finished blocks with the hashes of their bytes, the file of inputs
    work/inputs-3-0.safetensors  inputs of block 3 on rank 0, and the state of the random numbers there
    work/model/                  files of full size, filled as far as the manifest says

It is written anew after each block, under another name and then renamed, so what it says is always true. It comes first
and goes last: a folder without it is no work of ours, and one without the model is of a run that is over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.__version__ import __version__
from quark.base.files import atomic_file, hold, is_temporary, remove_dead, surely
from quark.base.json_objects import differences
from quark.errors import ConfigError, FormatError, OutputError
from quark.torch.algorithms.block_loop import LoopState
from quark.torch.algorithms.block_sweep import LEARNED
from quark.torch.calibration.distributed import rank, wait
from quark.torch.checkpoint.safetensors_file import ByteRange, read_range
from quark.torch.checkpoint.shards import read_tensors, save_tensors

SAMPLE, SAMPLES = 1 << 14, 64
"""Bytes of a sample, and samples of a file, that a fingerprint reads beside its first megabyte."""

MODEL = "model"
"""Where in the folder of a run its output is made: it, or the file in it."""
SERIES = ("hidden", "float", "observed")
"""Names of the inputs of a block, in the order of `LoopState`."""


class Manifest:
    """The state of a run that is on disk.

    Attributes:
        folder: Where it lies.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], blocks: list[dict[str, Any]]) -> None:
        self.folder = folder
        self._settings, self._blocks = settings, blocks

    @property
    def begun(self) -> bool:
        """True where there are finished blocks to go on from: not where the model has become the output."""
        model = self.folder / MODEL
        return bool(self._blocks) and model.is_dir() and any(model.iterdir())

    @property
    def finished(self) -> int:
        """How many blocks are finished."""
        return len(self._blocks)

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Manifest:
        """The manifest in `folder`, which is made if it is not there.

        Raises:
            ConfigError: The folder holds something else, or a run with other settings.
            FormatError: It is corrupt.
        """
        settings = json.loads(json.dumps({"quark": __version__, **settings}))
        path, model = folder / "manifest.json", folder / MODEL
        if not path.exists():
            if folder.exists() and not (folder.is_dir() and all(map(is_temporary, folder.iterdir()))):
                raise ConfigError(f"{folder} is no folder of an unfinished run. Choose another, or remove it.")
            return cls._begun(folder, settings)
        try:
            stored = json.loads(path.read_text())
            begun, blocks = stored["settings"], list(stored["blocks"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is corrupt: {error}. Remove {folder} to start again.") from None
        if not model.is_dir() or not any(model.iterdir()):
            return cls._begun(folder, settings)
        other = differences(begun, settings)
        if other:
            raise ConfigError(
                f"{folder} was started with other settings: {'; '.join(other[:3])}. Possible: the same settings, or "
                "remove the folder to start again."
            )
        return cls(folder, settings, blocks)

    @classmethod
    def _begun(cls, folder: Path, settings: Mapping[str, Any]) -> Manifest:
        """The manifest of a run that begins in a folder without a model."""
        manifest = cls(folder, settings, [])
        try:
            manifest._save()
            for inputs in folder.glob("inputs-*.safetensors"):
                inputs.unlink()
            (folder / MODEL).mkdir(exist_ok=True)
        except BaseException:
            manifest.remove()
            raise
        return manifest

    def state(self) -> LoopState:
        """Where the run stands. Raises FormatError when the inputs of the next block are absent or corrupt."""
        done = len(self._blocks)
        path = self._inputs(done)
        if done == 0 or not self._blocks[-1]["inputs"]:
            return LoopState(done)
        stored = dict(read_tensors([path]))
        torch.set_rng_state(stored.pop("random"))
        return LoopState(done, *(_series(stored, kind) for kind in SERIES))

    def finish(self, block: str, places: Mapping[str, ByteRange], state: LoopState) -> None:
        """Note that a block is written, and keep what the next one needs."""
        series = zip(SERIES, (state.hidden, state.float_hidden, state.observed), strict=True)
        tensors = {f"{kind}.{i}": x for kind, items in series for i, x in enumerate(items or ())}
        if tensors:
            with atomic_file(self._inputs(state.done)) as path:
                save_tensors({**tensors, "random": torch.get_rng_state()}, path, are_weights=False)
        # What the manifest says is there on all ranks before it says so, and what it said before until it does.
        wait()
        if rank() == 0:
            done = {"name": block, "inputs": bool(tensors), "sha256": _hash(places), "tensors": sorted(places)}
            self._blocks.append(done)
            self._save()
        wait()
        self._inputs(state.done - 1).unlink(missing_ok=True)

    def _save(self) -> None:
        with atomic_file(self.folder / "manifest.json") as path:
            path.write_text(json.dumps({"settings": self._settings, "blocks": self._blocks}, indent=1) + "\n")

    def verify(self, places: Mapping[str, ByteRange]) -> None:
        """Raise FormatError when the bytes of a finished block are not those that were written."""
        for block in self._blocks:
            if _hash({name: places[name] for name in block["tensors"]}) != block["sha256"]:
                raise FormatError(
                    f"{self.folder}: the block {block['name']!r} has changed since it was written. Remove the folder "
                    "to start again."
                )

    def remove(self) -> None:
        """The run is finished. The manifest goes last, so that what is left at any moment is known as ours."""
        shutil.rmtree(self.folder / MODEL, ignore_errors=True)
        for learned in self.folder.glob(LEARNED.format(index="*", rank="*")):
            shutil.rmtree(learned, ignore_errors=True)
        for inputs in self.folder.glob("inputs-*.safetensors"):
            inputs.unlink()
        (self.folder / "manifest.json").unlink(missing_ok=True)

    def _inputs(self, block: int) -> Path:
        return self.folder / f"inputs-{block}-{rank()}.safetensors"


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Within: no other run works in the folder, which is made, and stays unless it is empty. Raises ConfigError."""
    if rank() > 0:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder)
    except BlockingIOError:
        raise ConfigError(f"Another run works in {folder}. Wait for it, or choose another output.") from None
    except OSError as error:
        raise OutputError(f"{folder}, the folder of the unfinished run, cannot be used: {error.strerror}.") from None
    remove_dead(folder)  # a run that finds every block finished would make nothing there, and so not look
    try:
        yield
    finally:
        surely(partial(_remove_if_empty, folder))
        if lock is not None:
            os.close(lock)


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Hash of sizes, first megabytes (headers) and samples of files: other weights of equal shapes differ."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            digest.update(f"{path.name} {size}".encode())
            handle.seek(0)
            digest.update(handle.read(1 << 20))
            for i in range(SAMPLES):
                handle.seek(size * i // SAMPLES)
                digest.update(handle.read(SAMPLE))
    return digest.hexdigest()


def fingerprint_of_data(batches: Sequence[Any] | None) -> str | None:
    """Hash of calibration batches."""
    if batches is None:
        return None
    digest = hashlib.sha256()
    _add(digest, list(batches))
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "keys"):
        for key in value.keys():  # noqa: SIM118 (BatchEncoding)
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())


def _hash(places: Mapping[str, ByteRange]) -> str:
    digest = hashlib.sha256()
    for name in sorted(places):
        digest.update(read_range(places[name]))
    return digest.hexdigest()


def _series(stored: Mapping[str, torch.Tensor], kind: str) -> list[torch.Tensor] | None:
    found = [stored[f"{kind}.{i}"] for i in range(len(stored)) if f"{kind}.{i}" in stored]
    return found or None
