"""GGUF files of language models, which llama.cpp and the programs around it load: all in one file, tokenizer too."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from quark.base.log import logger
from quark.base.memory_and_disk import check_disk
from quark.core.spec import LayerSpec, TensorSpec
from quark.errors import NotSupportedError
from quark.gguf.writer import create_file, header_bytes
from quark.torch.checkpoint.quantization_config import folder_of
from quark.torch.checkpoint.safetensors_file import ByteRange
from quark.torch.checkpoint.shards import Entry
from quark.torch.formats.layout import Layout
from quark.torch.formats.readers import check_shapes
from quark.torch.model.meta_model import meta_copy
from quark.torch.writers.gguf.format import GgufFormat
from quark.torch.writers.gguf.tensors import FileTensors, header_of
from quark.torch.writers.writer import Move, OutputTarget, Quantized, Writer


@dataclass(frozen=True)
class GgufTarget(OutputTarget):
    """A GGUF file.

    Attributes:
        tokenizer: Folder that holds the tokenizer; None: that of the model.
    """

    is_file: ClassVar[bool] = True

    tokenizer: Path | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"custom_mode": GgufFormat.name}

    def writer(self, quantized: Quantized) -> GgufWriter:
        """The writer of a file of this model."""
        source = None if quantized.source is None else quantized.source.path
        return GgufWriter(quantized, self.tokenizer or source)


class GgufWriter(Writer):
    """Writes the file of one model.

    Args:
        quantized: The model.
        tokenizer: Folder that holds the tokenizer.

    Raises:
        NotSupportedError, ShapeError: Files of the architecture have no place for what is quantized, or for a tensor.
    """

    def __init__(self, quantized: Quantized, tokenizer: Path | None) -> None:
        model, plan = quantized.model, quantized.plan
        own = replace(plan, beside={})
        content = folder_of(model, quantized.config, own, solved=quantized.solved)
        GgufFormat().check(dict(model.named_modules()), content)
        self.tensors = tensors = FileTensors(model, plan, quantized.plain)
        if plan.beside and not tensors.further:
            raise NotSupportedError(
                f"{next(iter(plan.beside))} is not built by the model's class, and GGUF files of the architecture "
                f"{tensors.architecture.arch!r} have no names for such layers. Possible: a folder (--export-format "
                "quark, compressed-tensors)."
            )
        self.carried, self._tokenizer = tensors.beside, tokenizer

    @cached_property
    def _header(self) -> bytes:
        assert self._tokenizer is not None
        header = header_of(self.tensors.model, self.tensors.architecture, self._tokenizer)
        return header_bytes(header, self.tensors.listed())

    def check(self) -> str | None:
        """Raise, too, for a tokenizer that has no place in such files."""
        model = self.tensors.model
        check_shapes(model, meta_copy(model), "llama.cpp would not load this file")
        _ = self._header
        if left := self.tensors.left:
            logger.info("%d tensors that the model's class leaves out are not in the file: %s ...", len(left), left[0])
        return None

    def entries(self, only: Container[str] | None = None) -> Iterator[Entry]:
        return self.tensors.entries(only)

    def move(self, name: str, suffix: str) -> Move:
        return self.tensors.moves[name].move

    def layout(self, spec: TensorSpec, layer: LayerSpec, dtype: torch.dtype) -> Layout:
        return GgufFormat().make_layout(spec, layer, dtype, "reorder", True)

    def create(self, output: Path, begun: bool = False) -> dict[str, ByteRange]:
        listed, beginning = self.tensors.listed(), self._header
        if not begun:
            check_disk(output, len(beginning) + sum(tensor.size for tensor in listed))
        return self.tensors.places(output, create_file(output, beginning, listed, begun))

    def write_rest(self, output: Path) -> None:
        """Nothing: what a file says beside its tensors, it says before them."""
