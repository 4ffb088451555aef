"""What schemes keep of a denoiser that was trained, on steps of prompts and noise that calibration did not see."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from examples.models.train_digits_denoiser import FOLDER, WORDS, DigitsPipeline
from quark.one_call import quantize
from quark.torch import compare_denoisers, record_steps
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder

Data = tuple[Any, Sequence[Any], Sequence[Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """The pipeline, steps to calibrate with, and held-out ones."""
    pipeline, folder = DigitsPipeline(load_float_model(OpenedFolder(FOLDER)).float()), tmp_path_factory.mktemp("steps")
    data = record_steps(pipeline, WORDS, folder / "data", num_inference_steps=10)
    return pipeline, list(data), list(record_steps(pipeline, WORDS[:5], folder / "held_out", seed=500))


def kept(trained: Data, scheme: str, *algorithms: str) -> float:
    """SQNR in dB of the output on held-out steps."""
    pipeline, data, held_out = trained
    model = quantize(copy.deepcopy(pipeline.transformer), scheme, data=data, algorithm=algorithms)
    return compare_denoisers(pipeline, model, held_out).sqnr


@pytest.mark.parametrize("scheme", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_8_bits_with_static_scales_keep_25_db(trained: Data, scheme: str) -> None:
    assert kept(trained, scheme) > 25


@pytest.mark.slow
def test_svdquant_and_gptq_gain_on_rounding_to_nearest(trained: Data) -> None:
    branches = "svdquant:svd_rank=32,min_layer_size=32"
    assert kept(trained, "int4_wa_64", branches, "gptq") > kept(trained, "int4_wa_64") + 6
    assert kept(trained, "uint4_wo_64", "gptq") > kept(trained, "uint4_wo_64") + 3
