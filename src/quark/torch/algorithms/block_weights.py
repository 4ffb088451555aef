"""Where the weights of a block come from, and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from quark.torch.model.batches import input_device
from quark.torch.model.blocks.offloading import Offloaded


class BlockWeights:
    """Brings the weights of blocks and takes them away. Here: they are in memory, where they stay.

    Attributes:
        device: Where blocks run; None: where they are.
        whole: Whether all weights are there all the time, so that an algorithm may see the whole model.
        tables_in_file: Whether embeddings stay in their file, of which rows are looked up, and are quantized later.
    """

    device: torch.device | None = None
    whole = True
    tables_in_file = False

    def where(self, block: nn.Module) -> torch.device:
        """Where a block runs, whose weights are there."""
        return self.device or input_device(block)

    def bring(self, name: str) -> None:
        """Make the weights of a block usable, on `device`."""

    def take(self, name: str) -> None:
        """The block is finished."""

    def around(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Within: what is not in a block, and the first block, can run where the batches are."""
        return nullcontext()

    def holding(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Within: layers outside of blocks are where they run, and what they become is kept."""
        return nullcontext()


def blocks_of(offloaded: Offloaded) -> BlockWeights:
    """Return the loader of blocks of a model in memory, of which a part may be elsewhere by its `device_map`."""
    return OffloadedBlocks(offloaded) if offloaded.parts else BlockWeights()


class OffloadedBlocks(BlockWeights):
    """Brings the blocks of a model that its `device_map` keeps elsewhere; those on a device are there already."""

    def __init__(self, offloaded: Offloaded) -> None:
        self.offloaded = offloaded
        self.whole = not offloaded.on_disk

    def bring(self, name: str) -> None:
        """Let the block be where it runs."""
        self.offloaded.bring(name)

    def take(self, name: str) -> None:
        """Keep what it became where it lies."""
        self.offloaded.take(name)

    def holding(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Within: layers outside of blocks are where they run, and what they become is kept."""
        return self.offloaded.holding(names)
