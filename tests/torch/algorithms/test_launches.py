"""What the column solvers launch on a device, and how often they wait for it, on a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quark.core.granularity import PerGroup
from quark.core.solvers import gptq
from quark.core.spec import spec
from quark.torch import GPTQConfig, ModelQuantizer, QronosConfig
from quark.torch.algorithms.rounding import gptq as of_torch
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.pretended_gpu import PretendedGpu
from tests.torch.algorithms.test_algorithms import config

COLUMNS, BLOCKS, GROUPS = 1280, 2, 4
"""Of the model: what layers read, its blocks, and in each the layers that read one tensor."""
JUDGED = 3
"""Reads of a block beside: its error before and behind, and whether its samples may be cut short."""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GPTQConfig(), QronosConfig()], ids=lambda a: str(a.name))
def test_a_column_takes_few_launches_and_a_block_few_waits(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of torch, which run where there is no kernel: 5 a column in the order of importance, where columns have
    scales of their own, and 3 when they are visited again; what is more is what blocks begin and end with.
    """
    solving = 0
    weight = spec("uint4", PerGroup(-1, 128), symmetric=False)
    quantizer = ModelQuantizer(config(weight, algorithm))
    model, data = tiny_llama(), token_batches()
    with PretendedGpu() as gpu:

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                nonlocal solving
                before = gpu.meter.launches.total()
                result = function(*args, **options)
                solving += gpu.meter.launches.total() - before
                return result

            return run

        monkeypatch.setattr(gptq, "solve", counted(gptq.solve))
        monkeypatch.setattr(of_torch, "refine", counted(of_torch.refine))
        model.to("cuda")
        gpu.meter.reset()
        quantizer.quantize_model(model, data)
    assert solving <= 7.5 * COLUMNS
    # A read before each group is solved, which says whether its factor is one; what layers lose comes with the judge's.
    # Those in the forward of the whole model are of transformers, which looks at each mask.
    waits = {line: n for line, n in gpu.meter.waited_at.items() if not line.startswith("torch/model/batches.py")}
    assert sum(waits.values()) <= (GROUPS + JUDGED) * BLOCKS + 1, waits
