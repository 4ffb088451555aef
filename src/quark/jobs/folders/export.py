"""How `quark quantize` writes a language model: --export-format, checked before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.files import atomic_file, check_apart, check_file, check_folder
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.jobs.words import GGUF, ONNX, RECIPE

if TYPE_CHECKING:
    from quark.torch.checkpoint.opened import OpenedFolder
    from quark.torch.writers.writer import OutputTarget

FILES = (GGUF, ONNX)
"""Forms of a language model that are one file."""


@dataclass(frozen=True)
class Export:
    """Where a model goes, and in which form.

    Attributes:
        source: The folder or file that it is of.
        output: Folder to make; for GGUF also a file.
        form: A name in FORMATS, "gguf" or "onnx".
        weight_format, pack_method, max_shard_size: See `export_safetensors`.
        force: Replace the output.
        attachments: What lies beside the model in a folder: name of a file -> text.
        reader: What the folder is made for; see `export_safetensors`.
        goal: The program that is said to run it, one of GOALS; None: none.
    """

    source: Path
    output: Path
    form: str
    weight_format: str
    pack_method: str
    max_shard_size: str
    force: bool
    attachments: Mapping[str, str] = field(default_factory=dict)
    reader: str = "transformers"
    goal: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `export_safetensors`, but for where the folder goes."""
        return {
            "custom_mode": self.form,
            "weight_format": self.weight_format,
            "pack_method": self.pack_method,
            "max_shard_size": self.max_shard_size,
            "attachments": self.attachments,
            "reader": self.reader,
            "goal": self.goal,
        }

    def target(self) -> OutputTarget:
        """The target of a model that is written tensor by tensor."""
        if self.form == GGUF:
            from quark.torch.writers.gguf.file import GgufTarget  # with the tables of architectures

            return GgufTarget(self.source)
        from quark.torch.writers.folder import FolderTarget

        return FolderTarget(**self.options)

    def check(self, schemes: Iterable[str], folder: OpenedFolder | None = None) -> None:
        """Raise for a format, an option, a scheme or a model that do not go together.

        Args:
            schemes: Names of those that are asked for.
            folder: Of a float model, whose config says what it can become; None: it is not known.
        """
        from quark.torch.formats import FORMATS

        known = (*FORMATS, *FILES)
        if self.form not in known:
            raise ConfigError(f"--export-format {self.form!r} is unknown. {did_you_mean(self.form, known)}")
        of_folders = (self.weight_format, self.pack_method, self.max_shard_size)
        if self.form in FILES and of_folders != ("real_quantized", "reorder", "5GB"):
            raise ConfigError(
                f"--weight-format, --pack-method and --max-shard-size do not apply to --export-format {self.form}."
            )
        if self.form == ONNX:
            from quark.torch.writers.onnx.export import require_onnx_packages

            require_onnx_packages()
            return
        if self.form == GGUF:
            from quark.torch.writers.gguf.format import GgufFormat  # with the tables of architectures
            from quark.torch.writers.gguf.of_model import check_config

            for scheme in schemes:
                GgufFormat().check_scheme(scheme)
            if folder is not None:
                check_config(folder.of_transformers)
            return
        for scheme in schemes:
            FORMATS[self.form].check_scheme(scheme)
        self.target()

    def check_output(self, data: Path | None) -> None:
        """Raise for an output that cannot be written, may not be replaced, or is what is read."""
        if self.form in FILES:
            check_file(self.path, self.force)
            if self._is_named_onnx:
                check_file(self._beside(RECIPE), self.force)
        else:
            check_apart(self.path, self.source, whole=True)
        check_apart(self.path, data)
        if self.form not in FILES or not self.force:
            check_folder(self.output, self.force)

    @property
    def path(self) -> Path:
        """The path that a program opens: the file of a form that is one, else the folder."""
        if self.form == GGUF:
            return self.output if self.output.suffix == ".gguf" else self.output / f"{self.source.resolve().name}.gguf"
        return self.output / "quark_model.onnx" if self.form == ONNX and not self._is_named_onnx else self.output

    @property
    def _is_named_onnx(self) -> bool:
        """True where the output is an ONNX file by its own name, not a folder of one."""
        return self.form == ONNX and self.output.suffix == ".onnx" and not self.output.is_dir()

    def _beside(self, name: str) -> Path:
        """The place of an attachment of an ONNX file: in its folder, under the name of the file where that is named."""
        return self.output.with_name(f"{self.output.stem}.{name}") if self._is_named_onnx else self.output / name

    def size(self) -> int:
        """The bytes of the weights on disk, once they are written tensor by tensor."""
        from quark.jobs.folders.models import folder_bytes

        return self.path.stat().st_size if self.form == GGUF else folder_bytes(self.path)

    def write(self, model: Any, folder: OpenedFolder | None = None) -> int:
        """Write the model, which was loaded from a folder; return the bytes of its weights on disk."""
        from quark.torch.checkpoint.opened import opened_from
        from quark.torch.writers.safetensors import write_model

        if self.form == ONNX:
            size = self._write_onnx(model)
            for name, text in self.attachments.items():
                place = self._beside(name)
                with atomic_file(place) as temporary:
                    temporary.write_text(text.replace(name, place.name, 1), encoding="utf-8")
            return size
        write_model(model, self.path, self.target(), self.force, folder or opened_from(model))
        return self.size()

    def _write_onnx(self, model: Any) -> int:
        """`quark_model.onnx` in the folder, for any number of samples, and of tokens."""
        import torch

        from quark.torch import export_onnx
        from quark.torch.model.batches import named_outputs
        from quark.torch.model.outside_reads import OF_TOKENS, example, masked

        one = masked(model, example(model))
        if one is None:
            raise NotSupportedError(
                f"--export-format onnx: what {type(model).__name__} takes is not known. Possible: "
                "quark.torch.export_onnx with inputs of yours."
            )
        batch = {name: x.repeat(2, *([1] * (x.ndim - 1))) for name, x in one.items()}
        with torch.no_grad():
            outputs = [name.replace(".", "_") for name, _ in named_outputs(model(**batch))]
        of_tokens = {*batch} <= {*OF_TOKENS}  # of other inputs, one may bound the length of another
        axes = {name: {0: "batch", 1: "sequence"} if of_tokens else {0: "batch"} for name in batch}
        file = export_onnx(
            model,
            self.output,
            batch,
            input_names=list(batch),
            output_names=outputs,
            uint4_int4_flag=True,
            dynamo=True,
            dynamic_shapes=axes,
            overwrite=self.force,
        )
        return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
