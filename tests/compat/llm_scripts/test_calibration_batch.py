"""How many samples fit into a batch of blocks that visit the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.compat.llm_scripts.calibration_batch import get_per_block_calib_batch_size
from quark.errors import ConfigError


class Block(nn.Module):
    """1000 float32 weights; a token reads 10 + 50 and writes 50 + 10 floats: 480 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 50, bias=False), nn.Linear(50, 10, bias=False)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.head = nn.Linear(10, 100, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


def test_without_a_gpu_a_batch_has_the_documented_number_of_tokens() -> None:
    assert get_per_block_calib_batch_size(128, 2048) == 128
    assert get_per_block_calib_batch_size(1000, 2048) == 192
    assert get_per_block_calib_batch_size(128, 1_000_000) == 1
    assert get_per_block_calib_batch_size(1000, 2048, "cpu", Model(3)) == 192
    with pytest.raises(ConfigError, match="seq_len=0"):
        get_per_block_calib_batch_size(1, 0)


def test_the_free_memory_of_a_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # The head and one block, 4000 bytes each; then 480 bytes for each of 10 tokens of 7 samples.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8000 + 7 * 4800, 1 << 40))
    assert get_per_block_calib_batch_size(100, 10, "cuda", Model(3)) == 7
    assert get_per_block_calib_batch_size(5, 10, "cuda", Model(3)) == 5
    assert get_per_block_calib_batch_size(100, 10, "cuda", Model(3), n_gpu_resident_blocks=1) == (33600 - 4000) // 4800
    assert (
        get_per_block_calib_batch_size(100, 10, "cuda", Model(3), n_gpu_resident_blocks=99)
        == (33600 - 3 * 4000) // 4800
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1 << 40))
    assert get_per_block_calib_batch_size(100, 10, "cuda", Model(3)) == 1, "one sample must be tried"
