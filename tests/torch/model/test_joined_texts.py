"""Short texts in one row give what each gives alone; where a model reads on from one to the next, they stay apart."""

from __future__ import annotations

import pytest
import torch

from quark.jobs.folders.calibration import Calibration
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import algorithms_of
from quark.torch.algorithms.rounding.distillation import Distillation
from quark.torch.config.algo_configs import AutoRoundConfig, GPTQConfig
from quark.torch.model.calibration_data import joined_texts
from tests.models.families import family
from tests.models.padded import texts
from tests.models.torch_zoo import tiny_llama

TEXTS = [text[None] for text in texts()]


def test_scales_are_those_of_the_texts_one_by_one() -> None:
    joined = joined_texts(tiny_llama(num_hidden_layers=1), TEXTS, 28)
    assert joined is not None and [batch["input_ids"].shape[1] for batch in joined] == [28, 27, 16]
    config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8")
    found, expected = (
        ModelQuantizer(config).quantize_model(tiny_llama(num_hidden_layers=1), data).state_dict()
        for data in (joined, TEXTS)
    )
    scales = [name for name in expected if name.endswith("scale")]
    assert len(scales) > 7
    for name in scales:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["mamba", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_state_that_goes_from_token_to_token_keeps_texts_apart(kind: str) -> None:
    assert joined_texts(family(kind), TEXTS, 28) is None


def test_nothing_is_joined_where_nothing_fits() -> None:
    assert joined_texts(tiny_llama(num_hidden_layers=1), TEXTS, 12) is None


def test_what_draws_batches_gets_a_text_at_a_time() -> None:
    model, unpacked = tiny_llama(num_hidden_layers=1), Calibration(packing=False, length=28)

    def count(calibration: Calibration, *algorithms: object) -> int:
        return len(calibration.joined(model, TEXTS, algorithms_of(algorithms)) or ())  # type: ignore[arg-type]

    assert Distillation.learns
    assert count(unpacked) == count(unpacked, GPTQConfig(fisher=False)) == 3
    assert count(unpacked, AutoRoundConfig()) == count(Calibration(length=28)) == len(TEXTS)
