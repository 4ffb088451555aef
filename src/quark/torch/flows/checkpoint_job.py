"""A job from checkpoint folder to checkpoint folder, without a model that holds weights: what it reads and writes.

A skeleton on the meta device says which tensor belongs to which layer. From it come the plan, what the new folder will
hold, under which names, and where in the old one each tensor is found. file2file.py and from_disk.py do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.base.log import logger
from quark.errors import FormatError, NotSupportedError
from quark.torch.calibration.distributed import first_then_all
from quark.torch.checkpoint.carried import (
    CarriedLayers,
    as_modules,
    carried_entries,
    carried_layers,
    refuse_carried,
)
from quark.torch.checkpoint.float_model import check_folder
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import Entry
from quark.torch.checkpoint.sources.methods import quantization_of
from quark.torch.checkpoint.sources.origins import Origin, Origins, names_of
from quark.torch.checkpoint.stored_types import StoredTypes, forms_of
from quark.torch.config.config import QConfig
from quark.torch.flows.predicted_size import FolderPlan, plan_layers
from quark.torch.formats import Format
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.layers.attention.cache_rules import check_cache_config
from quark.torch.model.tied_weights import tied_names
from quark.torch.writers.carried import Carried
from quark.torch.writers.writer import OutputTarget, Quantized, Writer


@dataclass(frozen=True)
class Contents:
    """The contents of the new model.

    Attributes:
        writer: Writes it.
        entries: The tensors of the quantized model.
        sources: Name in the model -> where it lies in the old folder.
        ties: Name in the model -> all names of the same parameter, itself first.
        copied: Name of an entry that the new folder holds in other tensors, as the old one does -> name of each in the
            new folder -> in the old one.
    """

    writer: Writer
    entries: list[Entry]
    sources: dict[str, Origin]
    ties: dict[str, list[str]]
    copied: Mapping[str, Mapping[str, str]]


class CheckpointJob:
    """A checkpoint folder that is to become a quantized one.

    Args:
        config: What to quantize, and how.
        folder: Of a checkpoint, float or one that is read as float.
        target: What it becomes.
        keep_unexpected: As for `load_float_model`.
        data: Calibration batches, where there are some.
        plan: What its layers get, where that is known; None: it is made.

    Attributes:
        files: The safetensors files of the folder.
        quantization: What its config.json says of how they are quantized, or None.
        checkpoint: Its tensors, as the float model has them.
        model: The skeleton, with Conv1D and fused experts as linear layers.
        plan: How its layers are quantized.

    Raises:
        ConfigError: An option that does not exist, or a config that does not fit the model.
        FormatError: The folder is incomplete or corrupt.
        NotSupportedError: A cache is to be quantized in a way that runtimes have no scale for.
    """

    def __init__(
        self,
        config: QConfig,
        folder: OpenedFolder,
        target: OutputTarget,
        keep_unexpected: bool = False,
        data: Iterable[Any] | None = None,
        plan: FolderPlan | None = None,
    ) -> None:
        check_cache_config(config)
        self.config, self.folder, self.target = config, folder, target
        self.files = [file.path for file in folder.files]
        folder.check()
        self.quantization = quantization_of(folder.config, folder.path)
        self.checkpoint = folder.source
        skeleton = folder.skeleton
        check_folder(folder)
        self.origins = Origins(skeleton, folder.float_names(skeleton))
        self._beside = [*folder.dropped(skeleton)]
        if keep_unexpected:
            placed = names_of(self.origins.of(skeleton), skeleton.state_dict())
            self._beside = [name for name in self.checkpoint.names() if name in {*self._beside} or name not in placed]
        if plan is None or keep_unexpected:
            self.model = folder.copy()
            self.plan = plan_layers(self.model, config, folder, self._beside, data)
        else:
            self.model, self.plan = plan.meta, plan.layers
        self._carried = carried_layers(self.model, self.checkpoint, self._beside)

    def contents(self) -> Contents:
        """Return the contents of the new model; to be asked for while the layers of the plan are replaced.

        Raises:
            NotSupportedError, ShapeError: The format has no place for it, or its readers would not find all of it.
            FormatError: The folder lacks tensors, or holds some that the class of the model has no place for.
        """
        types = StoredTypes(self.folder, self.model, narrow=not self.config.algo_config)
        published, model = partial(forms_of, self.model, self.folder), self.model
        quantized = Quantized(
            model, self.config, self.plan, self.folder, types.entry, published, self._carried_as, solved=False
        )
        writer = self.target.writer(quantized)
        if (undecoded := writer.check()) is not None:
            logger.warning("%s", undecoded)
        made, ties, in_folder = list(writer.entries()), tied_names(self.model), self.origins.of(self.model)
        others = (name for form in writer.forms for name in form.members[1:])
        sources = sources_of([*(name for name, _, _ in made if name in ties), *others], in_folder, ties)
        self._check_ties(in_folder, ties)
        refuse_unexpected(self.folder, in_folder, ties, self._beside)
        there = self.folder.names(self.model) if writer.forms else {}
        copied = {form.members[0]: {file: there[n] for file, n in form.files.items()} for form in writer.forms}
        return Contents(writer, made, sources, ties, copied)

    def _carried_as(self, form: Format, pack_method: str, real: bool) -> Carried:
        """Return the tensors of the old folder that have no place in the class of the model, as a format has them."""
        specs = self.plan.beside
        modules = as_modules({name: self._carried[name] for name in specs}, self.model.dtype)
        refuse_carried(form, modules, specs)
        groups = sibling_groups(self.model, self.config.shared_scale_groups) if specs else ()
        layers = CarriedLayers(specs, partial(form.make_layout, pack_method=pack_method, real=real), groups)
        made = carried_entries(self.checkpoint, self._beside, self.model.dtype, layers)
        return Carried(made, self.plan, modules)

    def _check_ties(self, in_folder: Mapping[str, Origin], ties: Mapping[str, list[str]]) -> None:
        """Raise NotSupportedError where the model shares one tensor, and the folder has different ones under its names.

        transformers keeps both then, which a skeleton cannot know.
        """
        for name, aliases in ties.items():
            stored = [in_folder[alias].names[0] for alias in aliases if alias in in_folder]
            if name != aliases[0] or len(set(stored)) < 2:
                continue
            first, *others = (self.checkpoint.stored(source) for source in dict.fromkeys(stored))
            if any(not torch.equal(first, other) for other in others):
                raise NotSupportedError(
                    f"{self.folder.path} holds different tensors under names that its model ties: {', '.join(stored)}. "
                    "Possible: tie_word_embeddings false in config.json, or quantize_model, with the model in memory."
                )


def create_files(writer: Writer, output: Path, begun: bool = False) -> dict[str, ByteRange]:
    """Return the places that `Writer.create` gives; of several processes the first one makes the files."""
    return first_then_all(lambda first: writer.create(output, begun or not first))


def refuse_unexpected(
    folder: OpenedFolder, in_folder: Mapping[str, Origin], ties: Mapping[str, list[str]], beside: Iterable[str]
) -> None:
    """Raise FormatError for tensors that the class of a model has no place for.

    Args:
        folder: Holds them.
        in_folder: Name in the model -> where it lies in the folder.
        ties: Name in the model -> all names of the same parameter.
        beside: Tensors that are taken over as they are.
    """
    unexpected = sorted({*folder.source.names()} - names_of(in_folder, ties) - {*beside})
    if unexpected:
        raise FormatError(
            f"{folder.path} holds {len(unexpected)} tensors that the class of its config.json has no place "
            f"for: {', '.join(unexpected[:5])}. Possible: keep_unexpected (--keep-unexpected), which copies them."
        )


def sources_of(
    names: Iterable[str], in_folder: Mapping[str, Origin], ties: Mapping[str, list[str]]
) -> dict[str, Origin]:
    """Name in the model -> where it lies in the folder. Raises FormatError for tensors that the folder lacks."""
    sources, missing = {}, []
    for name in names:
        alias = next((alias for alias in ties[name] if alias in in_folder), None)
        if alias is None:
            missing.append(name)
        else:
            sources[name] = in_folder[alias]
    if missing:
        raise FormatError(
            f"The checkpoint lacks {len(missing)} of the {len(missing) + len(sources)} tensors that its config.json "
            f"calls for: {', '.join(missing[:5])}."
        )
    return sources
