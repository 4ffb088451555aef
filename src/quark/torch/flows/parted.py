"""Models that run part by part on the same batches, side by side: blocks whose weights come and go, then all the rest.

    for each block:   its weights in each model, decoded once;   all batches;   both can be looked at;   its weights go
    the rest:         embeddings and heads stay, and each batch gives the outputs of the model

Of a model that is in memory the rest is all of it. What a model gives is equal to the bit either way: a block computes
the same on the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.algorithms.block_loop import is_inside
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.calibration.work_device import Recorded, WorkDevice, bytes_of, settle
from quark.torch.checkpoint.float_model import check_folder, decoded_layers
from quark.torch.checkpoint.importer import fill_from_folder
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.checkpoint.sources.origins import Origins
from quark.torch.flows.checkpoint_job import refuse_unexpected, sources_of
from quark.torch.flows.weights_on_disk import OnDisk, WeightsOnDisk, in_folder
from quark.torch.model.batches import calibration_step, evaluating, input_device, to_device
from quark.torch.model.blocks import WHOLE, Call, find_blocks, record_calls
from quark.torch.model.blocks.after_blocks import blocks_aside, given_around
from quark.torch.model.meta_model import fill_buffers
from quark.torch.model.passes import prepare
from quark.torch.model.tied_weights import tied_names
from quark.torch.writers.gguf.import_file import import_lazily


@dataclass
class PartedModel:
    """A model, and where its weights come from.

    Attributes:
        model: In evaluation mode; without weights where these come from files.
        weights: Brings them.
        blocks: Names of those that run one by one, in running order; none: the model runs at once.
    """

    model: Any
    weights: BlockWeights = field(default_factory=BlockWeights)
    blocks: Sequence[str] = ()
    _calls: dict[str, list[Call]] = field(default_factory=dict)
    _around: list[Any] = field(default_factory=list)
    _hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_streamed(self) -> bool:
        """True where its weights come and go."""
        return not self.weights.whole

    def find_blocks(self, batch: Any, layers: Sequence[str]) -> Sequence[str]:
        """The blocks that a batch runs through, see `find_blocks`; none where they cannot run alone.

        Args:
            batch: As a user has it.
            layers: Names of the layers that are looked at.
        """
        names = find_blocks(self.model, None, batch, layers, self.weights.around) if self.is_streamed else []
        return [] if names == [WHOLE] else names

    @contextmanager
    def begun(self, blocks: Sequence[str], batches: Sequence[Any]) -> Iterator[None]:
        """Within: it is known what each block is called with, and what is outside of the blocks can run.

        Raises CalibrationError for a batch that the model does not take.
        """
        self.blocks = blocks
        if not blocks:
            yield
            return
        with self.weights.around(blocks):
            with torch.no_grad():
                self._calls = record_calls(self.model, blocks, batches, Recorded(self.weights.device))
                self._around = given_around(self.model, blocks, self._calls[blocks[0]])
            self._hidden = [call.hidden for call in self._calls[blocks[0]]]
            self.weights.take(blocks[0])  # it is brought when its turn comes
            yield

    @contextmanager
    def block(self, name: str) -> Iterator[_Running]:
        """Within: the weights of a block are there; afterwards its outputs are the inputs of the next one."""
        self.weights.bring(name)
        try:
            module, calls = self.model.get_submodule(name), self._calls.pop(name)
            place = WorkDevice.of(self.weights.where(module), bytes_of(calls))
            calls = place.calls(call.with_hidden(x) for call, x in zip(calls, self._hidden, strict=True))

            def run(index: int, batch: Any) -> None:
                self._hidden[index] = place.waiting(calls[index].run(module))

            with evaluating(module), ExitStack() as decoding:
                for each in module.modules():
                    if isinstance(each, StoredTensor):  # a block is there in float beside it in any case
                        decoding.enter_context(each.decoding_once())
                yield _Running(run)
            if place.on_host:
                settle(place.device)
        finally:
            self.weights.take(name)

    @contextmanager
    def rest(self) -> Iterator[_Running]:
        """Within: what is outside of the blocks is there, and the model gives its outputs."""
        with ExitStack() as there:
            if self.is_streamed and not self.blocks:
                self.weights.bring("")
                there.callback(self.weights.take, "")
            there.enter_context(evaluating(self.model))
            device = input_device(self.model)

            def run(index: int, batch: Any) -> Any:
                if not self.blocks:
                    return calibration_step(self.model, batch, device, index, "batch")
                hidden = to_device(self._hidden[index], device)
                with blocks_aside(self.model, self.blocks, self._around[index], hidden):
                    return calibration_step(self.model, batch, device, index, "batch")

            yield _Running(run)


@dataclass(frozen=True)
class _Running:
    """A part of a model whose weights are there: `run` it on the batch of a number; the last part gives outputs."""

    run: Any


@dataclass(frozen=True)
class ModelPart:
    """A part of all models.

    Attributes:
        block: Its name; None for what is outside of the blocks.
        blocks: Names of all blocks.
        running: Of each model, how it runs.
    """

    block: str | None
    blocks: Sequence[str]
    running: Sequence[_Running]

    def holds(self, name: str) -> bool:
        """Return True where a layer belongs to it."""
        if self.block is not None:
            return is_inside(name, self.block)
        return not any(is_inside(name, block) for block in self.blocks)

    def run(self, index: int, batch: Any) -> list[Any]:
        """Return the output of each model for the batch of a number; None of a block."""
        with torch.no_grad():
            return [each.run(index, batch) for each in self.running]


def parts_of(models: Sequence[PartedModel], batches: Sequence[Any], blocks: Sequence[str]) -> Iterator[ModelPart]:
    """The parts of models of one class in running order, each while the weights of all models are there for it.

    Each batch has to run through a part before the next one is asked for.

    Args:
        models: In memory, or all from files.
        batches: As a user has them.
        blocks: As `find_blocks` of the first one gives them.

    Raises:
        CalibrationError: A model does not take a batch.
    """
    with ExitStack() as begun:
        for each in models:
            begun.enter_context(each.begun(blocks, batches))
        for name in blocks:
            with ExitStack() as there:
                yield ModelPart(name, blocks, [there.enter_context(each.block(name)) for each in models])
        with ExitStack() as there:
            yield ModelPart(None, blocks, [there.enter_context(each.rest()) for each in models])


@dataclass(frozen=True)
class _Mapped:
    """A tensor that lies in mapped files, whose pages are given back together."""

    tensor: torch.Tensor
    files: Sequence[TensorFile]

    def read(self, like: torch.Tensor) -> torch.Tensor:
        return self.tensor

    def release(self) -> None:
        for file in self.files:
            file.release_all()


def float_in_parts(
    folder: OpenedFolder, wanted: Sequence[str], device: torch.device, keep_unexpected: bool = False
) -> PartedModel:
    """The float model of a folder, of which each part is read when its turn comes.

    Args:
        folder: Float, or one that is read as float.
        wanted: Names of the layers that are looked at: experts are taken apart for them.
        device: Where blocks run.
        keep_unexpected: Whether tensors are passed over that the class has no place for.

    Raises:
        FormatError: The folder is not the model that its config.json names.
    """
    folder.check()
    skeleton = folder.skeleton
    check_folder(folder)
    origins = Origins(skeleton, folder.float_names(skeleton))
    model = folder.copy()
    prepare(model, {*wanted}.__contains__)
    ties, there = tied_names(model), origins.of(model)
    if not keep_unexpected:
        refuse_unexpected(folder, there, ties, folder.dropped(skeleton))
    weights = WeightsOnDisk(model, in_folder(sources_of(ties, there, ties), ties, folder.source), device)
    fill_buffers(model)
    model.decoded_layers = decoded_layers(folder, model)
    return PartedModel(model, weights)


def quantized_in_parts(folder: OpenedFolder, device: torch.device) -> PartedModel:
    """The model of a quantized folder as it computes, of which each part is read when its turn comes.

    Args:
        folder: In the quark format, or that of another program.
        device: Where blocks run.

    Raises:
        FormatError: The folder is damaged; see `import_model_from_safetensors`.
    """
    model: nn.Module = folder.copy()
    ties = tied_names(model)
    fill_from_folder(model, folder)
    return _left_on_disk(model, ties, {}, folder.files, device)


def gguf_in_parts(folder: OpenedFolder, file: Path, device: torch.device) -> PartedModel:
    """The model of a GGUF file as it computes, of which each part is read when its turn comes.

    Args:
        folder: Of the float model.
        file: The file.
        device: Where blocks run.

    Raises:
        FormatError: The file is damaged, or of another model.
    """
    model: nn.Module = folder.copy()
    fill_buffers(model)
    ties = tied_names(model)
    return _left_on_disk(model, ties, import_lazily(model, file), (), device)


def _left_on_disk(
    model: nn.Module,
    ties: Mapping[str, list[str]],
    left: Mapping[str, OnDisk],
    files: Sequence[TensorFile],
    device: torch.device,
) -> PartedModel:
    """A model whose tensors come from files, and go to the meta device until then.

    Args:
        model: As it computes.
        ties: Name in it -> all names of the same parameter, as they were before layers were replaced.
        left: Tensors that are on the meta device already, by name.
        files: Where the others lie, if they are mapped.
        device: Where blocks run.
    """
    own = model.state_dict(keep_vars=True)
    sources: dict[str, OnDisk] = {name: _Mapped(x.detach(), files) for name, x in own.items() if not x.is_meta}
    sources |= left
    for name in own.keys() - sources.keys():  # one parameter, which the files hold under another name
        sources[name] = next(sources[other] for other in ties[name] if other in sources)
    for name, tensor in own.items():
        parent, _, leaf = name.rpartition(".")
        module, empty = model.get_submodule(parent), tensor.detach().to("meta")
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        else:
            module._buffers[leaf] = empty
    return PartedModel(model, WeightsOnDisk(model, sources, device))
