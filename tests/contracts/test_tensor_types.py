"""Every reader of codes x every tensor that it reads x other types and values: refused, or the same numbers.

The oracle is the library of each format, whose values the undamaged file gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quark.errors import FormatError, NotSupportedError
from quark.torch.checkpoint.sources.claims import check_claim
from quark.torch.checkpoint.sources.source import Source
from tests.models.sources import COMPRESSED, KINDS, OTHERS, Stored, _said_of, compressed

TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
ROWS, COLUMNS = 32, 128


def said_of(kind: str) -> dict[str, object]:
    if kind not in OTHERS:
        return _said_of(*COMPRESSED[kind])
    said = dict(OTHERS[kind][1])
    return {"quant_method": "modelopt", **said["quantization"]} if "quantization" in said else said


def stored_of(kind: str) -> tuple[Stored, torch.Tensor]:
    """What a file of a reader holds of one weight, by name, and what it stands for."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    parts, values = OTHERS[kind][0](x) if kind in OTHERS else compressed(kind, x)
    return {f"up.{part}": tensor.contiguous() for part, tensor in parts.items()}, values


def read(kind: str, stored: Stored, folder: Path) -> torch.Tensor | None:
    """The weight; None where it is refused."""
    file = folder / "model.safetensors"
    save_file({**stored, "up.bias": torch.zeros(ROWS)}, file)
    try:
        said = said_of(kind)
        source = Source([file], said)
        check_claim(folder, {"quantization_config": said}, source.metas())
        return source.read("up.weight", torch.float32, (ROWS, COLUMNS))
    except (FormatError, NotSupportedError) as error:
        assert "up" in str(error) or str(folder) in str(error), error
        return None


def of_other_types(stored: Stored) -> Iterator[tuple[str, Stored]]:
    for name, x in stored.items():
        for dtype in TYPES:
            if dtype == x.dtype or name.endswith("weight_shape"):
                continue
            other = x.float().to(dtype)
            if not x.is_floating_point() or torch.allclose(other.float(), x.float(), rtol=0.01):  # else other numbers
                yield f"{name} as {dtype}", {**stored, name: other}
            if dtype.itemsize == x.dtype.itemsize:
                yield f"{name} labelled {dtype}", {**stored, name: x.view(dtype)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_type_is_refused_or_is_the_same_numbers(kind: str, tmp_path: Path) -> None:
    stored, values = stored_of(kind)
    sound = read(kind, stored, tmp_path)
    assert sound is not None
    torch.testing.assert_close(sound, values.float(), rtol=2**-7, atol=0)
    damaged = list(of_other_types(stored))
    for what, changed in random.Random(kind).sample(damaged, min(len(damaged), 40)):
        found = read(kind, changed, tmp_path)
        assert found is None or torch.allclose(found, values.float(), rtol=0.02, atol=1e-3), what


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_no_number_is_refused(kind: str, tmp_path: Path) -> None:
    stored, _ = stored_of(kind)
    for name, x in stored.items():
        wrong = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF, torch.uint8: 0xFF}.get(x.dtype)
        if wrong is not None and (x.dtype != torch.uint8 or name.endswith("scale")):
            changed = x.view(torch.uint8).clone()
            changed.view(-1)[0] = wrong
            assert read(kind, {**stored, name: changed.view(x.dtype)}, tmp_path) is None, name
        for value in (torch.nan, torch.inf, -torch.inf, 3e38) if x.dtype.itemsize > 1 and x.is_floating_point() else ():
            changed = x.clone()
            changed.view(-1)[0] = value
            found = read(kind, {**stored, name: changed}, tmp_path)
            # Of what scales inputs a large number is one; what divides scales by it makes weights of nothing.
            kept = value == 3e38 and ("input" in name or "global" in name)
            assert found is None or kept, (name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_without_one_of_its_tensors_a_weight_is_refused_or_is_the_same_numbers(kind: str, tmp_path: Path) -> None:
    stored, values = stored_of(kind)
    for name in stored:
        try:
            found = read(kind, {other: x for other, x in stored.items() if other != name}, tmp_path)
        except KeyError:  # of the weight itself, which is then nowhere
            continue
        assert found is None or torch.equal(found, values.float()), name


CONTRADICTIONS = {
    "a shape that is not that of the codes": ("int4", {"up.weight_shape": torch.tensor([ROWS, 2 * COLUMNS])}, {}),
    "other bits than those of the words": ("int4", {}, {"num_bits": 8}),
    "a text for symmetric": ("int4", {}, {"symmetric": "4"}),
    "a text for bits": ("int4", {}, {"num_bits": "4"}),
    "groups without a size": ("int4", {}, {"group_size": None}),
    "truth for a size": ("int4", {}, {"group_size": True}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, tensors, said = CONTRADICTIONS[case]
    stored, _ = stored_of(kind)
    form, arguments = COMPRESSED[kind]
    monkeypatch.setitem(COMPRESSED, kind, (form, {**arguments, **said}))
    assert read(kind, {**stored, **tensors}, tmp_path) is None


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": "x"},
        {"quant_method": "awq", "bits": "4", "group_size": 32, "zero_point": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": "yes"},
        {"quant_method": "fp8", "weight_block_size": "128x128"},
        {"quant_method": "modelopt", "quant_algo": 8},
    ],
)
def test_fields_of_another_type_are_refused(section: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"in its config\.json is"):
        check_claim(tmp_path, {"quantization_config": section}, {})
