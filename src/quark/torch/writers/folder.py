"""Checkpoint folders in any of `FORMATS`: safetensors files with config.json, tokenizer and model card beside them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from quark.base.memory_and_disk import check_disk
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import ConfigError, did_you_mean
from quark.goals import GOALS
from quark.torch.checkpoint.loading import REAL_QUANTIZED, WEIGHT_FORMATS
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.quantization_config import folder_of
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import Entry, create_shards, entries, names_in_file, stem_of, stored_shapes
from quark.torch.checkpoint.stored_types import forms_of, stored_plain
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS, Folder, FolderFormat
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.formats.quark.layout import PACK_METHODS
from quark.torch.formats.readers import READERS, TRANSFORMERS, check_readers, read_forms
from quark.torch.model.folder_files import lists_modules, side_files
from quark.torch.plan import Plan
from quark.torch.writers.carried import carried_beside_model
from quark.torch.writers.config_files import CONFIG, write_config, write_generation_config
from quark.torch.writers.model_card import CARD, write_card
from quark.torch.writers.writer import Move, OutputTarget, Quantized, Writer


def _check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{option}={value!r} is unknown. {did_you_mean(value, choices)}")


@dataclass(frozen=True)
class FolderTarget(OutputTarget):
    """A checkpoint folder. Attributes: as for `export_safetensors`.

    Raises:
        ConfigError: For an option that does not exist, or not in this format.
    """

    custom_mode: str = "quark"
    weight_format: str = REAL_QUANTIZED
    pack_method: str = "reorder"
    max_shard_size: str = "5GB"
    reader: str = TRANSFORMERS
    goal: str | None = None
    attachments: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.goal is not None:
            _check_choice("goal", self.goal, GOALS)
        _check_choice("weight_format", self.weight_format, WEIGHT_FORMATS)
        _check_choice("custom_mode", self.custom_mode, FORMATS)
        _check_choice("pack_method", self.pack_method, tuple(PACK_METHODS))
        _check_choice("reader", self.reader, READERS)
        if not self.form.options and (self.weight_format, self.pack_method) != (REAL_QUANTIZED, "reorder"):
            raise ConfigError(
                f"weight_format={self.weight_format!r}, pack_method={self.pack_method!r}: the {self.custom_mode} "
                "format has one form only. Possible: 'real_quantized' and 'reorder', or the quark format."
            )
        if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", self.max_shard_size):
            raise ConfigError(f"max_shard_size={self.max_shard_size!r} is no size; for one: '5GB', '500MB'.")

    @property
    def form(self) -> FolderFormat:
        """The format."""
        return FORMATS[self.custom_mode]

    @property
    def settings(self) -> dict[str, str]:
        names = ("custom_mode", "weight_format", "pack_method", "max_shard_size", "reader")
        return {name: getattr(self, name) for name in names}

    def writer(self, quantized: Quantized) -> FolderWriter:
        """The writer of a folder of this model."""
        return FolderWriter(quantized, self)


QUARK = FolderTarget()
"""A folder of the quark format, as it is by default."""


def of_model(model: Any, config: QConfig, plan: Plan, folder: OpenedFolder | None, solved: bool = True) -> Quantized:
    """A model of this process, in memory or on the meta device, with what the folder says that it was loaded from.

    Args:
        model: Its layers are replaced.
        config, plan: Under which it is quantized.
        folder: That it was loaded from; None: it is not known.
        solved: See `Quantized`.
    """
    return Quantized(
        model,
        config,
        plan,
        folder,
        stored_plain(model, folder, narrow=not config.algo_config),
        partial(forms_of, model, folder),
        partial(carried_beside_model, model, config, plan, folder),
        solved,
    )


class FolderWriter(Writer):
    """Writes the folder of one model.

    Args:
        quantized: The model.
        target: The format and its options.
    """

    def __init__(self, quantized: Quantized, target: FolderTarget) -> None:
        model = quantized.model
        self.quantized, self.target, self.form = quantized, target, target.form
        self.real = target.weight_format == REAL_QUANTIZED
        carried = quantized.carried(self.form, target.pack_method, self.real)
        self.plan, self.carried, self.carried_modules = carried.plan, carried.entries, carried.modules
        self.content = content = self._content(quantized.solved)
        self.published = quantized.published(content.specs)
        self.forms = read_forms(self.published, self.form, target.reader)
        beside = {name for name, _, _ in self.carried}
        self.names = names_in_file(model, self.form, content.specs, as_they_are=beside, forms=self.forms)

    def _content(self, solved: bool) -> Folder:
        """Return the folder that the `quantization_config` describes."""
        given, target, beside = self.quantized, self.target, [name for name, _, _ in self.carried]
        everywhere = not self.form.own_loader
        return folder_of(
            given.model, given.config, self.plan, target.weight_format, target.pack_method, beside, everywhere, solved
        )

    def check(self) -> str | None:
        model = self.quantized.model
        self.form.check({**dict(model.named_modules()), **self.carried_modules}, self.content)
        _ = self._shapes  # names that scales cannot follow are refused
        stored = (name for name, _, _ in self.entries())
        undecoded = check_readers(model, self.form, self.content, stored, self.target.reader, self.published)
        return " ".join(filter(None, (undecoded, self._unrun()))) or None

    def _unrun(self) -> str | None:
        """Return a sentence about modules of an encoder that sentence-transformers would not run; None: it runs all."""
        source = self.quantized.source
        places = () if source is None else (source.path, source.path.parent)
        if not lists_modules(*places) or self.form.name != "compressed-tensors" or self.target.reader != TRANSFORMERS:
            return None
        return (
            "SentenceTransformer (6.2.0) loads such a folder, and its encode fails: it calls forward past the hook by "
            "which compressed-tensors decodes weights. Possible: --export-format quark; or this one, for servers."
        )

    @cached_property
    def _shapes(self) -> Tensors:
        """Key -> what is stored there, on the meta device."""
        return stored_shapes([*self.entries(), *self.carried], self.names)

    def entries(self, only: Container[str] | None = None) -> Iterator[Entry]:
        given = self.quantized
        return entries(
            given.model, self.target.pack_method, self.real, self.form, only, plain=given.plain, forms=self.forms
        )

    def move(self, name: str, suffix: str) -> Move:
        return Move((self.names(name, suffix),))

    def layout(self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype) -> Layout:
        return self.form.make_layout(spec, layer, dtype, self.target.pack_method, self.real)

    def create(self, output: Path, begun: bool = False) -> dict[str, ByteRange]:
        if not begun:
            check_disk(output, sum(tensor.nbytes for tensor in self._shapes.values()))
        return create_shards(output, self._shapes, self.target.max_shard_size, begun, stem_of(self.quantized.model))

    def write_rest(self, output: Path) -> None:
        given, target = self.quantized, self.target
        # Branches and rotations are there when the algorithms have run.
        content = self._content(True) if given.config.algo_config else self.content
        write_config(given.model, self.form.describe(content), given.source, output)
        path = None if given.source is None else given.source.path
        _write_companions(given.model, path, target.tokenizer, output)
        write_card(given.model, self.plan.layers, given.config, path, output, target.goal)
        for name, text in target.attachments.items():
            (output / name).write_text(text, encoding="utf-8")
        (output / CONFIG).touch()  # the youngest: see writers/written_into.py


def _write_companions(model: Any, source: Path | None, tokenizer: Any, folder: Path) -> None:
    """Write what a checkpoint has beside tensors and config: generation config, tokenizer, processors, code."""
    write_generation_config(model, source, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    for file in side_files(source) if source else []:
        if source and file.name != CARD and not (folder / file).exists():
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / file, folder / file)
