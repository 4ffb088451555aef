"""Algorithm: what every accuracy algorithm has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.calibration.expert_tokens import Choose, ExtraTokens, all_tokens_to_all_experts, reading_extra
from quark.torch.calibration.work_device import WHERE_IT_IS, WorkDevice
from quark.torch.config.algo_configs import AlgoConfig
from quark.torch.layers import QuantLayer
from quark.torch.model.blocks import Call


@dataclass
class Block:
    """One block of a model during the sweep.

    Attributes:
        name: Full name of the module; "" for a whole model.
        module: The module; its layers that the plan quantizes are QuantLayers whose quantizers are off.
        calls: Its arguments, one for each batch, with the hidden states that the quantized blocks before it give.
        float_calls: The same with the float model's hidden states; empty unless an algorithm needs them.
        observed_calls: The same with those of the model in which ranges are observed: weights that were solved, all
            else in float. Empty where they come from no loop that observes.
        shared_scale_groups: Leaf names of layers with one second-level weight scale (NVFP4).
        place: Where it computes and its batches wait.
        groups: Names, relative to the module, of the quantized linear layers that read one tensor, in running order.
        extra_tokens: Those of others that experts read while inputs of layers are collected.
        all_experts: Whether each expert reads all tokens then.
        left: Experts that no token reached, which are rounded to nearest.
        numbers: Which of the batches of this process the calls are of; None: all.
    """

    name: str
    module: nn.Module
    calls: list[Call]
    float_calls: list[Call] = field(default_factory=list)
    observed_calls: list[Call] = field(default_factory=list)
    shared_scale_groups: Sequence[Sequence[str]] = ()
    place: WorkDevice = WHERE_IT_IS
    groups: list[tuple[str, ...]] = field(default_factory=list)
    extra_tokens: ExtraTokens = field(default_factory=dict)
    all_experts: bool = False
    left: set[str] = field(default_factory=set)
    numbers: Sequence[int] | None = None

    @property
    def batches(self) -> Sequence[int]:
        """The number of the batch of each call."""
        return range(len(self.calls)) if self.numbers is None else self.numbers

    def of(self, numbers: Sequence[int]) -> Block:
        """This block with some of its batches."""
        calls, float_calls = ([of[n] for n in numbers] if of else [] for of in (self.calls, self.float_calls))
        return replace(self, calls=calls, float_calls=float_calls, numbers=numbers)

    def reading_extra(self, module: nn.Module, choose: Choose | None = None) -> AbstractContextManager[None]:
        """Within: the experts of this block, or of a copy, read tokens of others, too; see `reading_extra`."""
        return (
            all_tokens_to_all_experts(module) if self.all_experts else reading_extra(module, self.extra_tokens, choose)
        )

    def run(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Return the outputs of the block for some calls, as it waits."""
        return [self.place.waiting(call.run(self.module)) for call in calls]

    def full(self, leaf: str) -> str:
        """Full name of a layer of the block."""
        return f"{self.name}.{leaf}" if self.name else leaf

    def layer(self, leaf: str) -> QuantLayer:
        """The quantized layer of that relative name."""
        return self.module.get_submodule(leaf)  # type: ignore[return-value]


OUTPUT_ERROR, DIVERGENCE = "output error", "divergence"
"""Measures of `BlockErrors`: |Q(x) - x| / |x| of a block's output; mean KL divergence of a token, in nats."""


@dataclass(frozen=True)
class BlockErrors:
    """The errors of a block's output before and after an algorithm; see `keep_better`.

    Attributes:
        block: Full name; "" for a whole model.
        algorithm: Its name.
        earlier: The algorithms before it that stayed.
        before, after: Errors without and with it; NaN where the block returns no tensor.
        kept: Whether what it did stays.
        seconds: That it took.
        measure: What the errors are.
    """

    block: str
    algorithm: str
    earlier: tuple[str, ...]
    before: float
    after: float
    kept: bool
    seconds: float
    measure: str = OUTPUT_ERROR

    def __str__(self) -> str:
        without = f"with {', '.join(self.earlier)}" if self.earlier else "to nearest"
        without = without if self.measure == OUTPUT_ERROR else "before"
        return (
            f"{self.block or 'The model'}: {self.measure} {self.before:.4g} {without}, {self.after:.4g} with "
            f"{self.algorithm}: {'kept' if self.kept else 'left as it was'}."
        )


class Algorithm:
    """One accuracy algorithm with its settings: for each block, `enter`, then `on_inputs` for each group of layers that
    read one tensor, then `leave`.

    Subclasses override what they need; registered in `quark.torch.algorithms` under their config class.

    Attributes:
        config: The settings.
        errors: What it did to each block, in running order.
        left_out: Whether the model does not allow it, so that nothing was done.
        reads_inputs: Whether it reads inputs of layers; else no forward is run for it.
        needs_whole: Whether the whole model must be in memory: `prepare` reads or changes its weights, or it adds
            tensors to layers, for which a folder that is filled block by block has no place.
        needs_float: Whether input groups and blocks carry the float model's inputs too.
        batches_experts: Whether it overrides `on_expert_inputs`, so that several experts are reached at once.
        rounds: Whether it rounds weights, so that the blocks after it read what rounded ones give.
        sums: Whether it reads inputs as sums alone, which add up over processes.
        measured_whole: Whether `prepare` changes what the whole model loses, so that the model's output is measured.
        solves_after_blocks: Whether it solves linear layers after the blocks, too, each by what it reads.
        validated_apart: Whether what it chooses fits the chance of few samples, too, so that others measure it.
        folds_scales: Whether it moves scale between channels and weights, which a rotation after it mixes.
        learns: Whether `learn` runs the model on the calibration data before the first block.
    """

    reads_inputs: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = False
    needs_float: ClassVar[bool] = False
    batches_experts: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    sums: ClassVar[bool] = True
    measured_whole: ClassVar[bool] = False
    solves_after_blocks: ClassVar[bool] = False
    validated_apart: ClassVar[bool] = False
    folds_scales: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.errors: list[BlockErrors] = []
        self.left_out = False

    @property
    def name(self) -> str:
        """Its name in `algo_config`."""
        return str(getattr(self.config, "name", type(self).__name__))

    @property
    def by_inputs(self) -> bool:
        """True where it is shown the inputs of layers; else it learns from outputs of whole blocks or of the model."""
        return type(self).on_inputs is not Algorithm.on_inputs

    @property
    def keeps_better(self) -> bool:
        """True where a block that it makes worse is left as it was."""
        return bool(getattr(self.config, "keep_better", False))

    @property
    def reads_some(self) -> bool:
        """True where it is not shown the batches that measure it, where some can be spared."""
        return self.keeps_better and self.validated_apart

    def blocks_path(self, model: nn.Module) -> str | None:
        """Name of the list of blocks that the config gives; None: it is found."""
        return getattr(self.config, "model_decoder_layers", None) or None

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        """Once, before the first block, on the whole float model."""

    def on_weights(self, layers: Mapping[str, QuantLayer]) -> None:
        """When the weights of layers are there: of all after `prepare`, or of a block, and of what lies outside.

        Args:
            layers: Full name -> quantized layer.
        """

    def learned_bytes(self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> int:
        """Bytes of what `learn` will keep of all blocks, in memory or in its folder; of data of unknown size 0.

        Args:
            model: With or without weights.
            blocks: Names of its blocks.
            data: Calibration batches.
        """
        return 0

    def learn(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantLayer],
        data: Sequence[Any],
        weights: BlockWeights,
        work: Path | None,
    ) -> None:
        """Once, after `prepare`, where `learns` says so: see what the data say of the whole float model.

        Args:
            model: Changed, where `needs_whole` says so.
            layers: Full name -> quantized layer.
            data: Calibration batches of all processes.
            weights: Brings and takes the weights of blocks.
            work: Folder for what it learns, where a killed run finds it; None: in memory.
        """

    def finish(self, model: nn.Module, layers: Mapping[str, QuantLayer]) -> None:
        """Once, when every weight and activation of the whole model has its scales.

        Args:
            model: Quantized; changed in place.
            layers: Full name -> quantized layer.
        """

    def say(self) -> None:
        """Once, after the last block: log what the user would not expect of what was done."""

    def recorded(self, config: AlgoConfig) -> AlgoConfig | None:
        """The config that says what was done, given the one that asked for it; None: nothing was done."""
        return config

    def enter(self, block: Block) -> None:
        """Before the block runs."""

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        """When linear layers are about to read one tensor: gets them, and that tensor for all batches."""

    def on_expert_inputs(self, groups: list[InputGroup], block: Block) -> None:
        """When linear layers of several experts are about to run: gets groups of them that read one tensor each."""

    def leave(self, block: Block) -> None:
        """After the block has run."""
