"""Folding: what SmoothQuant, AutoSmoothQuant, equalizing and AWQ have in common.

They choose a scale for the input channels of layers that read one tensor, and fold it into what makes that tensor. All
batches wait before those layers, so the scale is known, the weights are changed and the waiting inputs divided in the
same forward. Where a fold reaches beyond one group of layers (all experts after a norm, a router that stays in float)
a forward before that one collects the statistics.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from quark.base.log import logger
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup, flat
from quark.torch.algorithms.layer_inputs import lockstep
from quark.torch.algorithms.scaling.find_folds import Discovery
from quark.torch.algorithms.scaling.fold import Fold, Refusal
from quark.torch.calibration.distributed import in_order
from quark.torch.layers import QuantLayer
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.blocks import short_call
from quark.torch.model.tied_weights import overlapping

SAMPLE = 512
"""Tokens of `InputStatistics.sample` that one input group gives, about."""


@dataclass
class InputStatistics:
    """Statistics of the input of layers that share a fold. What an algorithm does not need is None.

    Attributes:
        count: Tokens.
        gram: Second moments, (in, in).
        mean_abs, max_abs, mean_square: Mean and largest |x| and mean x^2 of each channel, (in,).
        sample: Some tokens, evenly taken, (tokens, in); float32.
    """

    count: int
    gram: torch.Tensor | None = None
    mean_abs: torch.Tensor | None = None
    max_abs: torch.Tensor | None = None
    mean_square: torch.Tensor | None = None
    sample: torch.Tensor | None = None

    @classmethod
    def of(cls, group: InputGroup, needs: Sequence[str]) -> InputStatistics:
        """The statistics of one input group."""
        statistics = {name: getattr(group, name) for name in needs if name != "sample"}
        if "sample" in needs:
            step = max(1, group.count // SAMPLE)
            some = (flat(x)[::step] for x in map(group.waiting.load, group.inputs))
            statistics["sample"] = torch.cat(list(in_order(some, numbers=group.numbers))).float()
        return cls(group.count, **statistics)

    def merged(self, other: InputStatistics) -> InputStatistics:
        """The statistics of both inputs together."""

        def mean(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
            return None if a is None or b is None else torch.lerp(a, b, other.count / (self.count + other.count))

        return InputStatistics(
            self.count + other.count,
            mean(self.gram, other.gram),
            mean(self.mean_abs, other.mean_abs),
            None if self.max_abs is None or other.max_abs is None else torch.maximum(self.max_abs, other.max_abs),
            mean(self.mean_square, other.mean_square),
            None if self.sample is None or other.sample is None else torch.cat([self.sample, other.sample]),
        )


class Folding(Algorithm):
    """Base of the algorithms that fold scales.

    Attributes:
        needs: Fields of InputStatistics that `scale` reads.
        folds: Layer of the present block, by its relative name -> the fold of its input, if that is still to be done.
        left: How many blocks are still to come.
        found, folded: How many folds there were, and how many were done.
    """

    folds_scales = True
    needs: ClassVar[tuple[str, ...]]
    discovery: Discovery
    tied: set[str]
    folds: dict[str, Fold]
    left: int
    found: int = 0
    folded: int = 0

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        self.discovery, self.left = Discovery(), len(blocks)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        shared = overlapping(parameters.values())
        # By name: a model that is loaded block by block has other objects by then.
        self.tied = {name for name, parameter in parameters.items() if id(parameter) in shared}

    def enter(self, block: Block) -> None:
        """Find the folds; do those that reach beyond one input group."""
        # No quantizer may observe the inputs of these forwards, which are not the final ones.
        with quantizers_off(quantized_layers(block.module).values()):
            folds = self._find_folds(block)
            self.left, self.found = self.left - 1, self.found + len(folds)
            groups = {frozenset(group) for group in block.groups}
            wide = [fold for fold in folds if fold.others or frozenset(fold.layers) not in groups]
            self.folds = {layer: fold for fold in folds if fold not in wide for layer in fold.layers}
            if wide:
                self._fold_ahead(block, wide)

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        self.fold_at(group, block)

    def fold_at(self, group: InputGroup, block: Block) -> torch.Tensor | None:
        """Fold the input of some layers, and divide what waits there; the scale, or None if it was left."""
        fold = self.folds.get(relative(next(iter(group.layers)), block))
        if fold is None:
            return None
        s = self._apply(fold, block, InputStatistics.of(group, self.needs))
        self.folds = {layer: other for layer, other in self.folds.items() if other is not fold}
        if s is not None:
            group.rescale(s)
        return s

    @abstractmethod
    def scale(self, fold: Fold, layers: dict[str, QuantLayer], statistics: InputStatistics) -> torch.Tensor | None:
        """The scale of the input of the quantized layers of a fold, feasible for it; None to leave it."""

    def _find_folds(self, block: Block) -> list[Fold]:
        args, kwargs = short_call(block.module, block.calls[0]).arguments()
        items = self.config.scaling_layers
        if items:
            candidates = self.discovery.explicit(block.module, args, kwargs, items)
        else:
            candidates = self.discovery.folds(block.module, args, kwargs)
        folds = []
        for item in candidates:
            names = () if isinstance(item, Refusal) else (item.producer, *item.layers, *item.others)
            modules = {name: block.module.get_submodule(name) for name in names}
            reason = item.reason if isinstance(item, Refusal) else ""
            for name, module in modules.items():
                if any(full in self.tied for full, _ in module.named_parameters(block.full(name), recurse=False)):
                    reason = f"{name!r} shares a parameter with another module"
                    break
            if reason:
                logger.info(f"{block.full(item.layers[0])}: its input keeps its scale: {reason}.")
            elif isinstance(item, Fold) and _quantized_layers(item, block):
                folds.append(item)
        return folds

    def _apply(self, fold: Fold, block: Block, statistics: InputStatistics) -> torch.Tensor | None:
        s = self.scale(fold, _quantized_layers(fold, block), statistics)
        if s is not None:
            fold.apply(block.module, s)
            self.folded += 1
        return s

    def say(self) -> None:
        if self.folded or self.left:  # a run that goes on has not seen all blocks
            return
        why = (
            "no scale was better than none"
            if self.found
            else ("no input of a quantized layer comes from a norm with weights or a layer that could take its scale")
        )
        logger.warning("%s folded nothing: %s.", self.name, why)

    def _fold_ahead(self, block: Block, folds: Sequence[Fold]) -> None:
        """Collect in a forward of its own, then fold: the forward that follows is that of the changed block."""
        seen: dict[int, InputStatistics] = {}

        def collect(group: InputGroup) -> None:
            leaf = relative(next(iter(group.layers)), block)
            for index, fold in enumerate(folds):
                if leaf in fold.layers and group.count:
                    statistics = InputStatistics.of(group, self.needs)
                    seen[index] = seen[index].merged(statistics) if index in seen else statistics

        lockstep(
            block.name,
            block.module,
            block.calls,
            block.groups,
            collect,
            place=block.place,
            reading_extra=block.reading_extra,
            batches=block.batches,
        )
        for index, statistics in seen.items():
            self._apply(folds[index], block, statistics)


def relative(name: str, block: Block) -> str:
    """The name of a layer within its block."""
    return name.removeprefix(f"{block.name}.") if block.name else name


def _quantized_layers(fold: Fold, block: Block) -> dict[str, QuantLayer]:
    layers = {leaf: block.layer(leaf) for group in block.groups for leaf in group}
    return {leaf: layers[leaf] for leaf in fold.layers if leaf in layers}
