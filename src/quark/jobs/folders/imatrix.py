"""`--imatrix` and `--save-imatrix` of `quark quantize`: importance matrices of llama.cpp, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.base.files import check_apart, check_file
from quark.errors import CalibrationError, ConfigError, visible
from quark.jobs.request import FolderRequest


@dataclass(frozen=True)
class Imatrices:
    """The options of importance matrices.

    Attributes:
        read: The file that weighs errors; None: none.
        saved: The file to make of the calibration data; None: none.
        force: Replace it.
    """

    read: Path | None = None
    saved: Path | None = None
    force: bool = False

    @classmethod
    def of(cls, request: FolderRequest) -> Imatrices:
        """Return the options of a request."""
        return cls(request.imatrix, request.save_imatrix, request.force)

    def check(self, mixed: bool, calib: Path | None, algorithm: Sequence[str] | None) -> None:
        """Raise for options that do not go together, a file that cannot be read, or one that cannot be written."""
        from quark.gguf import check_imatrix_name, read_imatrix

        for name, given in (("--imatrix", self.read), ("--save-imatrix", self.saved)):
            if given is not None and not mixed:
                raise ConfigError(f"{name} belongs to a mix of GGUF. Possible: --scheme q4_k_m --export-format gguf.")
        if self.read is not None:
            read_imatrix(self.read)
            if calib is not None and not algorithm:
                raise ConfigError(
                    "--imatrix and --calib both describe the inputs of the layers. Possible: one of them, or "
                    "--algorithm qronos, which rounds by --calib on the scales of --imatrix."
                )
        if self.saved is not None:
            if calib is None:
                raise CalibrationError("--save-imatrix sums what reaches the layers from calibration data: --calib.")
            check_file(check_imatrix_name(self.saved), self.force)
            check_apart(self.saved, calib)
            if self.read is not None:
                check_apart(self.saved, self.read)

    def save(self, model: Any, data: Sequence[Any] | None, calib: Path | None) -> None:
        """Write the file, if it is asked for, of a model that is still float."""
        from quark.gguf import save_imatrix
        from quark.torch.writers.gguf.imatrix import collect_imatrix

        if self.saved is not None and data is not None and calib is not None:
            save_imatrix(collect_imatrix(model, data), self.saved, [visible(calib.name)], self.force)
