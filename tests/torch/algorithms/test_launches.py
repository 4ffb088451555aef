"""What the column solvers launch on a device, and how often they wait for it, on a small Llama."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from quark.core.granularity import PerGroup
from quark.core.solvers import gptq
from quark.core.spec import spec
from quark.torch import GPTQConfig, LLMTemplate, ModelQuantizer, QronosConfig
from quark.torch.algorithms.rounding import gptq as of_torch
from quark.torch.config.named_algorithms import algo_config_by_name
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.pretended_gpu import Meter, PretendedGpu
from tests.torch.algorithms.test_algorithms import config

COLUMNS, BLOCKS, GROUPS = 1280, 2, 4
"""Of the model: what layers read, its blocks, and in each the layers that read one tensor."""
JUDGED = 3
"""Reads of a block beside: its error before and behind, and whether its samples may be cut short."""


@contextmanager
def counted_solving(meter: Meter) -> Iterator[Counter[str]]:
    """Within: launches and columns of `gptq.solve`, and launches of `refine`."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before = meter.launches.total()
            result = function(*args, **options)
            found[name] += meter.launches.total() - before
            found["columns"] += args[0].shape[-2] if name == "solve" else 0
            return result

        return run

    with (
        mock.patch.object(gptq, "solve", counted("solve", gptq.solve)),
        mock.patch.object(of_torch, "refine", counted("refine", of_torch.refine)),
    ):
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GPTQConfig(), QronosConfig()], ids=lambda a: str(a.name))
def test_a_column_takes_few_launches_and_a_block_few_waits(algorithm: Any) -> None:
    """The steps of torch, which run where there is no kernel: 5 a column in the order of importance, where columns have
    scales of their own, and 3 when they are visited again; what is more is what blocks begin and end with.
    """
    weight = spec("uint4", PerGroup(-1, 128), symmetric=False)
    quantizer = ModelQuantizer(config(weight, algorithm))
    model, data = tiny_llama(), token_batches()
    with PretendedGpu() as gpu, counted_solving(gpu.meter) as found:
        model.to("cuda")
        gpu.meter.reset()
        quantizer.quantize_model(model, data)
    assert found["columns"] == COLUMNS and found["solve"] + found["refine"] <= 7.5 * COLUMNS
    # A read before each group is solved, which says whether its factor is one; what layers lose comes with the judge's.
    # Those in the forward of the whole model are of transformers, which looks at each mask.
    waits = {line: n for line, n in gpu.meter.waited_at.items() if not line.startswith("torch/model/batches.py")}
    assert sum(waits.values()) <= (GROUPS + JUDGED) * BLOCKS + 1, waits


MOST = 10
"""Launches a column, both passes, in plain steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "algorithm"), [("uint4_wo_32", "gptq"), ("uint4_wo_32", "gptaq"), ("mx6", "qronos")]
)
def test_a_column_of_a_model_takes_few_launches(scheme: str, algorithm: str) -> None:
    layers = replace(LLMTemplate.get("llama").get_config(scheme), algo_config=[algo_config_by_name(algorithm)])
    model, data = tiny_llama(num_hidden_layers=1), token_batches(2)
    with PretendedGpu(where=False) as gpu, counted_solving(gpu.meter) as found:
        ModelQuantizer(layers).quantize_model(model.to("cuda"), data)
    assert found["columns"] == COLUMNS / BLOCKS and found["solve"] + found["refine"] <= MOST * found["columns"]
