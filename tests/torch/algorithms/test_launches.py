"""What the column solvers launch on a device, and how often they wait for it, on a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quark.core.granularity import PerGroup
from quark.core.solvers import columns, gptq
from quark.core.spec import spec
from quark.torch import GPTQConfig, ModelQuantizer, QronosConfig
from quark.torch.algorithms.rounding import gptq as of_torch
from tests.models.operations import Operations
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.torch.algorithms.test_algorithms import config

COLUMNS, BLOCKS, GROUPS = 1280, 2, 4
"""Of the model: what layers read, its blocks, and in each the layers that read one tensor."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GPTQConfig(), QronosConfig()], ids=lambda a: str(a.name))
def test_a_column_takes_few_launches_and_a_block_few_waits(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of torch, which run where there is no kernel: 5 a column in the order of importance, where columns have
    scales of their own, and 3 when they are visited again; what is more is what blocks begin and end with.
    """
    monkeypatch.setattr(columns, "_library", lambda: None)
    seen = {"solving": 0, "all": 0, "waits": 0}

    tolist = torch.Tensor.tolist

    def read(x: torch.Tensor) -> Any:
        seen["waits"] += 1
        return tolist(x)

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with Operations() as found, monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", read)
                result = function(*args, **options)
            seen[kind] += found.launches
            seen["waits"] += found.waits if kind == "all" else 0
            return result

        return run

    monkeypatch.setattr(gptq, "solve", counted("solving", gptq.solve))
    monkeypatch.setattr(of_torch, "refine", counted("solving", of_torch.refine))
    work = counted("all", of_torch.GPTQ.on_expert_inputs)

    def on_expert_inputs(self: Any, groups: Any, block: Any) -> None:
        for group in groups:
            assert group.count  # is read here: it is a tensor of the host
        work(self, groups, block)

    monkeypatch.setattr(of_torch.GPTQ, "on_expert_inputs", on_expert_inputs)
    monkeypatch.setattr(of_torch.GPTQ, "leave", counted("all", of_torch.GPTQ.leave))
    weight = spec("uint4", PerGroup(-1, 128), symmetric=False)
    quantizer = ModelQuantizer(config(weight, algorithm))
    quantizer.quantize_model(tiny_llama(), token_batches())
    assert seen["solving"] <= 7.5 * COLUMNS
    # A read before each group is solved, which says whether its factor is one; one for what all layers lose.
    assert seen["waits"] <= (GROUPS + 1) * BLOCKS
