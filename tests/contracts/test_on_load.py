"""A model that is quantized while transformers loads it is that of the folder that `quark.quantize` makes, loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quark
from benchmarks.architectures.__main__ import build
from quark.errors import QuarkError, ShapeError
from quark.torch import QuantizeOnLoad
from tests.contracts.test_reader_classes import CLASSES
from tests.models.on_load import FAMILIES, WITHOUT_DATA, assert_same, assert_same_files, float_model, logits

DTYPES = {"llama": torch.bfloat16, "tied": torch.float16, "qwen3_moe": torch.bfloat16}
"""The others are in float32."""
EVERY = [pytest.param(name, scheme, id=f"{name} {scheme}") for name in FAMILIES for scheme in WITHOUT_DATA]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The function from the name of a family to its float folder."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "float"
        float_model(name).to(DTYPES.get(name, torch.float32)).save_pretrained(folder)
        return folder

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), EVERY)
def test_it_is_the_model_of_the_quantized_folder(
    folder_of: Callable[[str], Path], name: str, scheme: str, tmp_path: Path
) -> None:
    folder = folder_of(name)
    kind: Any = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    try:
        quark.quantize(folder, scheme, output=tmp_path / "quantized")
    except ShapeError as error:
        with pytest.raises(ShapeError) as said:
            kind.from_pretrained(folder, quantization_config=QuantizeOnLoad(scheme))
        assert str(said.value) == str(error)
        return
    model = kind.from_pretrained(folder, quantization_config=QuantizeOnLoad(scheme))
    expected = kind.from_pretrained(tmp_path / "quantized")
    assert_same(model, expected)
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "quantized")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_of_every_family_it_is_the_model_of_the_quantized_folder(name: str, tmp_path: Path) -> None:
    try:
        model = build(name, CLASSES[name])[0]
    except Exception as error:  # noqa: BLE001 - sizes that a family does not take
        pytest.skip(f"no tiny model: {error}")
    model.save_pretrained(tmp_path / "float")
    try:
        quark.quantize(tmp_path / "float", "int8_wo", output=tmp_path / "quantized")
    except QuarkError as error:
        pytest.skip(f"no folder to compare with: {error}")
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=QuantizeOnLoad("int8_wo"))
    assert_same(loaded, type(model).from_pretrained(tmp_path / "quantized"))
    loaded.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "quantized")
