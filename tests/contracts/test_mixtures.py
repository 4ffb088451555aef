"""Mixtures of every family in every scheme: transformers computes what quark computed, or the folder is refused.

Versions of transformers differ in how they merge experts while they load, so this runs in each environment of
`make stacks`. A tensor that no loader fills is made up, or is NaN, and transformers says so in its log alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.metrics import sqnr
from quark.core.schemes import SCHEMES
from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from tests.models.families import MOE, family

IDS = torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(0))
WITHOUT_DATA = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.weight is not None and (scheme.input is None or scheme.input.dynamic) and not scheme.weight.is_cast
]
FORMATS = ("quark", "compressed-tensors")
NEAR, WITH_INPUTS = 15.0, 10.0
"""Least SQNR in dB where the other reader computes in bfloat16 by itself: of the same weights in other orders of sums,
which a router amplifies (20 to 45 here), and where it leaves the inputs of experts unrounded, which costs about what
quantizing them does. Weights without their scales are at 7 and below."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scheme", WITHOUT_DATA)
@pytest.mark.parametrize("name", MOE)
def test_transformers_computes_the_same_or_the_folder_is_refused(
    name: str, scheme: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = torch.float32 if form == "quark" else torch.bfloat16
    try:
        quantizer = ModelQuantizer(LLMTemplate.get(name).get_config(scheme))
        frozen = quantizer.freeze(quantizer.quantize_model(family(name).to(dtype)))
        with caplog.at_level(logging.WARNING, "quark"):
            folder = export_safetensors(frozen, tmp_path / "out", form)
    except QuarkError:
        return  # which other contracts look at: what is refused is said there
    told = "transformers" in caplog.text
    try:
        loaded: Any = type(frozen).from_pretrained(folder).eval()
    except QuarkError:
        return
    except (RuntimeError, ValueError):
        assert told, "it is not loaded, and nothing said so"
        return
    if told:
        return
    with torch.no_grad():
        expected, got = frozen(IDS).logits.float(), loaded(IDS).logits.float()
    if form == "quark":
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    else:
        assert sqnr(expected, got) >= (NEAR if SCHEMES[scheme].input is None else WITH_INPUTS)
