"""Where the weights of a block come from, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class BlockWeights:
    """Brings the weights of blocks and takes them away. Here: they are in memory, where they stay.

    Attributes:
        device: Where blocks run; None: where they are.
        whole: Whether all weights are there all the time, so that an algorithm may see the whole model.
    """

    device: torch.device | None = None
    whole = True

    def bring(self, name: str) -> None:
        """Make the weights of a block usable, on `device`."""

    def take(self, name: str) -> None:
        """The block is finished."""

    def around(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Within: what is not in a block, and the first block, can run where the batches are."""
        return nullcontext()
