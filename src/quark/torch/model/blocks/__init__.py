"""The blocks of a model: found, called, and stood aside."""

from quark.torch.model.blocks.calls import (
    Call,
    JoinedCalls,
    joined_call,
    short_call,
    short_calls,
    short_runs,
    takes_joined,
)
from quark.torch.model.blocks.recording import WHOLE, BlockOutput, find_blocks, passing_through, record_calls
from quark.torch.model.blocks.unchanged import Unchanged

__all__ = [
    "WHOLE", "BlockOutput", "Call", "JoinedCalls", "Unchanged", "find_blocks", "joined_call", "passing_through",
    "record_calls", "short_call", "short_calls", "short_runs", "takes_joined",
]  # fmt: skip
