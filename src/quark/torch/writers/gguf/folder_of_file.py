"""A model folder of transformers made of a GGUF file: config.json, tokenizer, and the values of its tensors in float.

Values are those that the `gguf` package decodes, each rounded once to the type of the folder, one tensor at a time.
What files hold otherwise than models is undone: rows of queries and keys, norms that one was added to, matrices in
parts, experts of a block in one tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers
from quark.base.log import logger
from quark.base.progress import progress
from quark.errors import FormatError, NotSupportedError, QuarkError
from quark.gguf.architectures.architecture import first_of
from quark.gguf.architectures.table import architecture_of
from quark.gguf.configs import config_of, facts_of, kinds_of
from quark.gguf.hyperparameters import refuse_other_config
from quark.gguf.names import block_of
from quark.gguf.reader import open_gguf
from quark.gguf.tokenizer import ENDS
from quark.gguf.tokenizer_of_file import write_tokenizer_files
from quark.gguf.types import FLOAT_TYPES
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import (
    Entry,
    Naming,
    create_shards,
    entries,
    names_in_file,
    stored_shapes,
    write_entry,
)
from quark.torch.checkpoint.sources.origins import part_of
from quark.torch.model.model_folder import check_sizes
from quark.torch.model.names import OtherForm, other_forms
from quark.torch.model.passes import UnfusedExperts, undo
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.writers.gguf.import_file import TensorReader, named_tensors

NARROW = (torch.bfloat16, torch.float16, torch.float32)
"""Types of a folder, the first of which is taken that holds all that a file has in float."""
FLOATS = frozenset(FLOAT_TYPES.values())
"""Types of a file that hold values, and no blocks."""


@dataclass(frozen=True)
class FolderOfFile:
    """A model folder of a GGUF file.

    Attributes:
        file: The file.
        path: The folder, which has everything but values: its safetensors files have their sizes, and zeros in them.
        tensors: Those of the model.
        left: How many tensors of the file are of layers that predict further tokens, which the model does not build.
    """

    file: Path
    path: Path
    tensors: FloatTensors
    left: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of its tensors."""
        dtype: torch.dtype = self.tensors.model.dtype
        return dtype

    def fill(self) -> None:
        """Write the values of the tensors into the folder. Raises NonFiniteError."""
        self.tensors.fill()
        if self.left:
            logger.info("%d tensors of layers that predict further tokens are left out.", self.left)


def folder_of_gguf(file: Path, folder: Path, dtype: torch.dtype | None = None) -> FolderOfFile:
    """The model folder of a GGUF file, whose tensors have no values until it is filled.

    Args:
        file: The file.
        folder: To be filled: an empty one, or to be made.
        dtype: Of the tensors. Default: the first of bfloat16 and float16 that holds all that the file has in float, to
            the bit; float32 where neither does. Values of blocks are rounded to it.

    Raises:
        FormatError: No GGUF file, a damaged one, or one whose metadata and tensors are not of one model.
        NonFiniteError: A value that the file has in float is NaN or infinite, or beyond the type.
        NotSupportedError: An architecture, a vocabulary or a rotary scaling that is not known.
    """
    reader = open_gguf(file)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of_gguf(file, reader, folder, NARROW if dtype is None else (dtype,))
    model = tensors.model
    # With the tokens that end a text, a turn and a message.
    fields = (reader.get_field(f"tokenizer.ggml.{key}_token_id") for key in ("eos", *ENDS))
    ends = list(dict.fromkeys(int(field.contents()) for field in fields if field is not None))
    eos = ends if len(ends) > 1 else next(iter(ends), None)
    begin, pad = model.config.bos_token_id, model.config.pad_token_id
    generation = import_transformers().GenerationConfig(bos_token_id=begin, eos_token_id=eos, pad_token_id=pad)
    generation.to_json_file(folder / "generation_config.json")
    tensors.create(folder)
    left = sum((block_of(tensor.name) or 0) >= model.config.num_hidden_layers for tensor in reader.tensors)
    return FolderOfFile(file, folder, tensors, left)


def tensors_of_gguf(file: Path, reader: Any, folder: Path, types: Sequence[torch.dtype]) -> FloatTensors:
    """The tensors of the model that a file holds; its config and tokenizer are written into a folder.

    Args:
        file: For messages.
        reader: Of the file.
        folder: Where.
        types: For the model: the first that holds what the file has in float, to the bit, and else the last.

    Raises:
        FormatError, NonFiniteError, NotSupportedError: See `folder_of_gguf`.
    """
    try:
        tensors = _tensors(file, reader, folder, types)
        longest = first_of(tensors.model.config, "max_position_embeddings", "max_seq_len", "seq_length")
        write_tokenizer_files(reader, folder, tensors.model.config.vocab_size, longest)
        return tensors
    except (FormatError, NotSupportedError) as error:
        said = str(error).replace(str(folder / "config.json"), "its config")
        raise type(error)(said if str(file) in said else f"{file}: {said[0].lower()}{said[1:]}") from None


def _tensors(file: Path, reader: Any, folder: Path, types: Sequence[torch.dtype]) -> FloatTensors:
    """The tensors of the first model that a file may be of; see `tensors_of_gguf`.

    Raises the error of the first model where the file is of none.
    """
    refused: QuarkError | None = None
    facts = facts_of(reader)
    for kind in kinds_of(facts):
        try:
            with as_format_error(file, "has metadata that no model can be built of"):
                config = config_of(facts, kind, reader)
            refuse_other_config(
                file, reader, config, "that is made of it. Possible: import_model_from_gguf with the float model."
            )
            for dtype in types:
                tensors = _of_config(file, reader, folder, config, dtype)
                if dtype == types[-1] or tensors.holds_floats():
                    return tensors
        except (FormatError, NotSupportedError) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _of_config(file: Path, reader: Any, folder: Path, config: Any, dtype: torch.dtype) -> FloatTensors:
    """The tensors of the model of a config, which goes into the folder."""
    mapping = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise FormatError(f"{config.model_type} models have no class for language models in transformers.")
    config.architectures, config.dtype = [mapping[type(config)].__name__], dtype
    (folder / "config.json").write_text(f"{config.to_json_string()}\n", encoding="utf-8")
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    opened = OpenedFolder(folder)
    check_sizes(folder, opened.config, shapes)
    return FloatTensors(file, reader, opened.skeleton)


class FloatTensors:
    """The tensors of a model in the place of which a file has others, each made when it is asked for.

    Args:
        file: For messages.
        reader: Of the file.
        model: Without weights; as it was afterwards.

    Raises:
        FormatError: The file has no tensor for one of the model, has one that the model has no place for, or one of
            another shape.

    Attributes:
        model: The model.
    """

    def __init__(self, file: Path, reader: Any, model: Any) -> None:
        self.model = model
        architecture = architecture_of(model.config)
        named = named_tensors(file, reader, model, architecture)
        self._parts: dict[str, list[tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]]] = defaultdict(list)
        own = dict(model.state_dict())
        originals = unfuse_experts(model, lambda layer: True)
        try:
            self._readers = {name: TensorReader(model, architecture, name, tensor) for name, tensor in named.items()}
            for block, module in model.named_modules():
                if isinstance(module, UnfusedExperts):
                    for name in module.state_dict():
                        fused, index, take = part_of(module, name)
                        self._parts[f"{block}.{fused}"].append((f"{block}.{name}", index, take))
        finally:
            undo(model, originals)
        for name in own:
            parts = [part for part, _, _ in self._parts.get(name, [(name, 0, None)])]
            missing = next((part for part in parts if part not in self._readers), None)
            if missing is not None:
                raise FormatError(f"{file} has no tensor for {missing} of a {model.config.model_type} model.")
        self._like = own
        self._entries: list[Entry] = []
        self._named: Naming = lambda name, suffix: name
        self._places: dict[str, ByteRange] = {}

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the model, in its type there. Raises NonFiniteError."""
        if name not in self._parts:
            return self._readers[name].read()
        whole = torch.empty_like(self._like[name], device="cpu")
        for part, index, take in self._parts[name]:
            take(whole[index]).copy_(self._readers[part].read())
        return whole

    def holds_floats(self) -> bool:
        """True where the types of the model hold what the file has in float, to the bit."""
        return all(_holds(each) for each in self._readers.values() if each.tensor.tensor_type.name in FLOATS)

    def holds_all(self) -> bool:
        """True where they hold the values of all tensors; the values of blocks are not looked at one by one."""
        # The values of MXFP4 are powers of two times a few bits.
        whole = {torch.bfloat16: {"MXFP4"}, torch.float32: {t.tensor.tensor_type.name for t in self._readers.values()}}
        kinds = {each.tensor.tensor_type.name for each in self._readers.values()}
        return kinds <= FLOATS | whole.get(self.model.dtype, set()) and self.holds_floats()

    def create(self, folder: Path) -> None:
        """Make the safetensors files of a folder, under their names in published checkpoints, without values."""
        forms = other_forms(self.model)
        self._entries = [
            (
                form.members[0],
                partial(self._in_form, form),
                form.convert([self._like[x].to("meta") for x in form.members]),
            )
            for form in forms
        ]
        apart = {name for form in forms for name in form.members}
        plain = entries(
            self.model, "reorder", True, plain=lambda name, x: (name, lambda: {"": self.read(name)}, {"": x})
        )
        self._entries += [entry for entry in plain if entry[0] not in apart]
        self._named = names_in_file(self.model, forms=forms)
        self._places = create_shards(folder, stored_shapes(self._entries, self._named))

    def fill(self) -> None:
        """Write the values into the files that were made. Raises NonFiniteError."""
        for name, make, _ in progress(self._entries, "read", total=len(self._entries)):
            write_entry(name, make(), self._places, self._named)

    def _in_form(self, form: OtherForm) -> dict[str, torch.Tensor]:
        return form.convert([self.read(name) for name in form.members])


def _holds(reader: TensorReader) -> bool:
    """True where the type of a tensor of the model holds its values, to the bit."""
    dtype, stored = reader.dtype, reader.tensor.tensor_type.name
    # Where values of a model were rounded on the way into the file, they are again on the way back.
    if not reader.is_exact or dtype in (None, torch.float32) or (FLOAT_TYPES[dtype] == stored and not reader.adds_one):
        return True
    values = reader.read(torch.float32)
    return torch.equal(values.to(dtype).float(), values)
