"""Results of a pass for the next one: tensors by name, in the host's memory or in a folder, where a killed run finds
them.

settings.json               what the run is of; another one does not go on here
<name>.safetensors          a series of tensors, one for each batch
<name>.json                 a result
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quark.base.files import atomic_file
from quark.base.json_objects import differences
from quark.errors import ConfigError, FormatError
from quark.torch.calibration.work_device import settle
from quark.torch.checkpoint.shards import read_tensors, save_tensors
from quark.torch.model.batches import to_host

SETTINGS = "settings"


class PassStore:
    """Tensors and results by name.

    Args:
        folder: Where they lie; None: in memory.
        settings: What must be equal where a run goes on.

    Raises:
        ConfigError: The folder is of a run with other settings; says which differ.
        FormatError: Its settings cannot be read.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._results: dict[str, Any] = {}
        if folder is None:
            return
        begun = self.result(SETTINGS)
        other = [] if begun is None else differences(begun, json.loads(json.dumps(dict(settings))))
        if other:
            raise ConfigError(
                f"{folder} was started with other settings: {'; '.join(other[:3])}. Possible: the same settings, or "
                "remove the folder to start again."
            )
        self.keep_result(SETTINGS, dict(settings))

    def has(self, name: str) -> bool:
        """Return True where tensors of this name are kept."""
        return name in self._tensors if self.folder is None else self._file(name, "safetensors").is_file()

    def keep(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep a series of tensors, whole or not at all."""
        if self.folder is None:
            self._tensors[name] = [to_host(x.detach()) for x in tensors]
            return
        found = [to_host(x.detach()) for x in tensors]
        settle()
        with atomic_file(self._file(name, "safetensors")) as path:
            save_tensors({str(index): x.contiguous() for index, x in enumerate(found)}, path, are_weights=False)

    def read(self, name: str) -> list[torch.Tensor]:
        """A series that was kept. Raises FormatError where its file is absent or damaged."""
        if self.folder is None:
            settle()
            return self._tensors[name]
        file = self._file(name, "safetensors")
        if not file.is_file():
            raise FormatError(f"{file} is missing, which this run had written. Remove {self.folder} to start again.")
        stored = dict(read_tensors([file]))
        return [stored[str(index)] for index in range(len(stored))]

    def drop(self, name: str) -> None:
        """Forget a series; nothing where it is not kept."""
        self._tensors.pop(name, None)
        if self.folder is not None:
            self._file(name, "safetensors").unlink(missing_ok=True)

    def result(self, name: str) -> Any:
        """A result that was kept, or None. Raises FormatError for a damaged file."""
        if self.folder is None:
            return self._results.get(name)
        file = self._file(name, "json")
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except (OSError, ValueError) as error:
            raise FormatError(f"{file} is corrupt: {error}. Remove {self.folder} to start again.") from None

    def keep_result(self, name: str, value: Any) -> None:
        """Keep what JSON can hold."""
        self._results[name] = value
        if self.folder is not None:
            with atomic_file(self._file(name, "json")) as path:
                path.write_text(json.dumps(value), encoding="utf-8")

    def remove(self) -> None:
        """Remove the files; the settings last, so that what is left at any moment is known as ours."""
        if self.folder is None:
            return
        names = [path for suffix in ("safetensors", "json") for path in self.folder.glob(f"*.{suffix}")]
        for path in sorted(names, key=lambda path: path.stem == SETTINGS):
            path.unlink()

    def _file(self, name: str, suffix: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.{suffix}"
