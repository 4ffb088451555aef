"""A job from checkpoint folder to checkpoint folder, without a model that holds weights: what it reads and writes.

A skeleton on the meta device says which tensor belongs to which layer. From it come the plan, what the new folder will
hold, under which names, and where in the old one each tensor is found. file2file.py and from_disk.py do the work.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quark.base.libraries.transformers import is_conv1d
from quark.base.memory_and_disk import check_disk
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import FormatError, NotSupportedError
from quark.torch.calibration.distributed import first_then_all
from quark.torch.checkpoint.float_model import check_metas, shapes_of
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.checkpoint.quantization_config import folder_of, quantization_config
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import (
    Entry,
    Naming,
    create_shards,
    entries,
    names_in_file,
    stem_of,
    stored_shapes,
)
from quark.torch.checkpoint.sources.carried import CarriedLayers, carried_entries, carried_layers, plan_carried
from quark.torch.checkpoint.sources.claims import check_claim
from quark.torch.checkpoint.sources.methods import quantization_of
from quark.torch.checkpoint.sources.origins import Origin, Origins, names_of
from quark.torch.checkpoint.sources.source import Source
from quark.torch.checkpoint.stored_types import StoredTypes, forms_of_source
from quark.torch.config.config import QConfig
from quark.torch.formats import FORMATS
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.formats.layout import Layout
from quark.torch.formats.readers import check_readers
from quark.torch.layers.attention.cache_rules import check_cache_config
from quark.torch.model.folder_files import shard_files
from quark.torch.model.meta_model import build_skeleton
from quark.torch.model.model_folder import read_config
from quark.torch.model.names import dropped_names, source_names
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import prepare
from quark.torch.model.tied_weights import tied_names
from quark.torch.plan import chooser, make_plan
from quark.torch.writers.config_files import write_config
from quark.torch.writers.model_card import write_card
from quark.torch.writers.safetensors import check_options, write_companions


@dataclass(frozen=True)
class Contents:
    """What the new folder will hold.

    Attributes:
        entries: The tensors of the quantized model.
        dropped: Tensors of the old folder that the class of the model leaves out by design; stored as they are.
        names: Name in the new folder of a tensor and a suffix.
        sources: Name in the model -> where it lies in the old folder.
        ties: Name in the model -> all names of the same parameter, itself first.
        copied: Name of an entry that the new folder holds in other tensors, as the old one does -> name of each in the
            new folder -> in the old one.
    """

    entries: list[Entry]
    dropped: list[Entry]
    names: Naming
    sources: dict[str, Origin]
    ties: dict[str, list[str]]
    copied: Mapping[str, Mapping[str, str]]


class CheckpointJob:
    """A checkpoint folder that is to become a quantized one.

    Args:
        config: What to quantize, and how.
        folder: Of a checkpoint, float or one that is read as float.
        weight_format, pack_method, max_shard_size: As for `export_safetensors`.
        keep_unexpected: As for `load_float_model`.
        goal: As for `export_safetensors`.

    Attributes:
        files: The safetensors files of the folder.
        quantization: What its config.json says of how they are quantized, or None.
        checkpoint: Its tensors, as the float model has them.
        model: The skeleton, with fused experts taken apart.
        plan: How its layers are quantized.
        real: Whether codes are stored; else float values that were quantized.
        forms: What the files hold in other tensors than the model.

    Raises:
        ConfigError: An option that does not exist, or a config that does not fit the model.
        FormatError: The folder is incomplete or corrupt.
        NotSupportedError: A Conv1D is to be quantized, or a cache in a way that runtimes have no scale for.
    """

    def __init__(
        self,
        config: QConfig,
        folder: Path,
        *,
        weight_format: str,
        pack_method: str,
        max_shard_size: str,
        keep_unexpected: bool = False,
        goal: str | None = None,
    ) -> None:
        check_options("quark", weight_format, pack_method, max_shard_size, goal)
        check_cache_config(config)
        self.config, self.folder, self.goal = config, folder, goal
        self.weight_format, self.pack_method, self.max_shard_size = weight_format, pack_method, max_shard_size
        self.real = weight_format == REAL_QUANTIZED
        self.files = shard_files(folder)
        stored = read_config(folder)
        check_claim(folder, stored, Source(self.files).metas())
        self.quantization = quantization_of(stored, folder)
        self.checkpoint = Source(self.files, self.quantization)
        tensors = self.checkpoint.metas()
        self.model = build_skeleton(folder, self.checkpoint.dtype(), shapes_of(tensors))
        if self.quantization is None:
            check_metas(folder, self.model, tensors)
        self.origins = Origins(self.model, self.checkpoint.names())
        self._beside = dropped_names(self.model, self.checkpoint.names())
        if keep_unexpected:
            placed = names_of(self.origins.of(self.model), self.model.state_dict())
            self._beside = [name for name in self.checkpoint.names() if name in {*self._beside} or name not in placed]
        _take_apart(config, self.model)
        named = source_names(self.model, self.checkpoint.stored_names())
        self.types = StoredTypes(self.checkpoint, named, self.model.dtype, narrow=not config.algo_config)
        carried = carried_layers(self.model, self.checkpoint, self._beside)
        plan = make_plan(config, self.model, read_elsewhere=weights_read_elsewhere(self.model), beside=carried)
        self.plan = plan_carried(config, self.model, plan, carried)
        self.forms = forms_of_source(self.model, self.checkpoint, self.plan.layers)

    def contents(self) -> Contents:
        """What the new folder will hold; to be asked for while the layers of the plan are replaced.

        Raises:
            NotSupportedError: transformers would not find all of it; names what.
            FormatError: The folder lacks tensors, or holds some that the class of the model has no place for.
        """
        made = list(self.entries())
        held = folder_of(self.model, self.config, self.plan)
        check_readers(self.model, FORMATS["quark"], held, (name for name, _, _ in made), forms=self.forms)
        ties = tied_names(self.model)
        in_folder = self.origins.of(self.model)
        others = (name for form in self.forms for name in form.members[1:])
        sources = _sources([*(name for name, _, _ in made if name in ties), *others], in_folder, ties)
        self._check_ties(in_folder, ties)
        names = self.beside()
        groups = sibling_groups(self.model, self.config.shared_scale_groups) if self.plan.beside else ()
        layers = CarriedLayers(self.plan.beside, self._layout, groups)
        dropped = carried_entries(self.checkpoint, names, self.model.dtype, layers)
        unexpected = sorted({*self.checkpoint.names()} - names_of(in_folder, ties) - {*names})
        if unexpected:
            raise FormatError(
                f"{self.folder} holds {len(unexpected)} tensors that the class of its config.json has no place for: "
                f"{', '.join(unexpected[:5])}. Possible: keep_unexpected (--keep-unexpected), which copies them."
            )
        return Contents(
            made,
            dropped,
            names_in_file(
                self.model, specs={**self.plan.layers, **self.plan.beside}, as_they_are=names, forms=self.forms
            ),
            sources,
            ties,
            self._copied(),
        )

    def _copied(self) -> dict[str, dict[str, str]]:
        """See `Contents`."""
        there = source_names(self.model, self.checkpoint.names()) if self.forms else {}
        return {form.members[0]: {file: there[name] for file, name in form.files.items()} for form in self.forms}

    def entries(self, only: Container[str] | None = None) -> Iterator[Entry]:
        """The tensors of the quantized model, or those of these names; what is not quantized in its stored type."""
        return entries(self.model, self.pack_method, self.real, only=only, plain=self.types.entry, forms=self.forms)

    def _layout(self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype) -> Layout:
        return FORMATS["quark"].make_layout(spec, layer, dtype, self.pack_method, self.real)

    def beside(self) -> list[str]:
        """Names of the tensors of the old folder that are carried: the class of the model has no place for them."""
        return self._beside

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
                    f"{self.folder} holds different tensors under names that its model ties: {', '.join(stored)}. "
                    "Possible: tie_word_embeddings false in config.json, or quantize_model, with the model in memory."
                )

    def create_shards(self, output: Path, contents: Contents, begun: bool = False) -> dict[str, ByteRange]:
        """Make the files of the new folder; return where each tensor is to be written, by its name there.

        With `begun` the files are there already, partly filled. Raises OutputError where the disk is too small.
        """
        shapes = stored_shapes([*contents.entries, *contents.dropped], contents.names)
        if not begun:
            check_disk(output, sum(tensor.nbytes for tensor in shapes.values()))
        return first_then_all(
            lambda first: create_shards(output, shapes, self.max_shard_size, begun or not first, stem_of(self.model))
        )

    def write_rest(self, output: Path) -> None:
        """Write what a checkpoint has beside its tensors: config.json, tokenizer, generation config."""
        quantization = quantization_config(
            self.model, self.config, self.plan, self.weight_format, self.pack_method, self.beside()
        )
        write_config(self.model, quantization, self.folder, output)
        write_companions(self.model, self.folder, None, output)
        write_card(self.model, self.plan.layers, self.config, self.folder, output, self.goal)


def _take_apart(config: QConfig, model: nn.Module) -> None:
    """Take fused experts of a skeleton apart: checkpoints hold one tensor for each projection of each expert.

    Raises NotSupportedError for Conv1D, whose weights a checkpoint holds transposed.
    """
    for name, module in prepare(model, chooser(config, model).wanted).items():
        if is_conv1d(module):
            raise NotSupportedError(
                f"{name} (Conv1D) holds its weight transposed, which needs the model in memory. "
                "Possible: quantize_model, or exclude it."
            )


def _sources(names: Iterable[str], in_folder: Mapping[str, Origin], ties: Mapping[str, list[str]]) -> dict[str, Origin]:
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
