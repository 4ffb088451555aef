"""Tensors of halted batches in a file: the same values, the memory free, and the same weights solved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quark.core.granularity import PerGroup
from quark.torch import ModelQuantizer
from quark.torch.calibration import spill, work_device
from quark.torch.calibration.spill import SpillFile
from quark.torch.calibration.work_device import WorkDevice
from quark.torch.config.algo_configs import AlgoConfig, AWQConfig, GPTQConfig, QronosConfig, SmoothQuantConfig
from quark.torch.model.blocks import Call
from tests.models.families import family
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.torch.algorithms.test_algorithms import config, spec

INT4 = spec("int4", PerGroup(-1, 32), symmetric=False)
MATRIX = (600, 500)


def bytes_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_a_spilled_tensor_has_its_values_in_the_file_and_then_in_memory() -> None:
    lot, x = SpillFile(), torch.randn(MATRIX, dtype=torch.bfloat16)
    before, place = x.clone(), bytes_of(x)
    (spilled,) = lot.spill([x])
    assert bytes_of(x) != place and torch.equal(x, before)
    loaded = lot.load(x)
    assert loaded is not x and torch.equal(loaded, before)
    lot.bring_back(spilled)
    assert torch.equal(x, before) and lot.load(x) is x
    x += 1
    assert not torch.equal(x, before)


def test_views_move_with_what_they_are_views_of() -> None:
    lot, base = SpillFile(), torch.randn(MATRIX)
    turned, part = base.T, base[100:]
    before = [x.clone() for x in (base, turned, part)]
    (spilled,) = lot.spill([turned, part])
    assert len(spilled.tensors) == 3
    lot.bring_back(spilled)
    assert all(map(torch.equal, (base, turned, part), before))
    part += 1
    assert torch.equal(base[100:], before[2] + 1)


def test_places_are_taken_again() -> None:
    lot = SpillFile()
    for index in range(5):
        tensors = [torch.full(MATRIX, float(index + number)) for number in range(3)]
        spilled = lot.spill(tensors)
        assert len(spilled) == 3
        for one in reversed(spilled):
            lot.bring_back(one)
        assert [x.mean().item() for x in tensors] == [index, index + 1, index + 2]
    assert lot._end <= 4 * 600 * 500 * 4


def test_a_tensor_stays_where_moving_it_would_not_be_safe_or_gain_nothing() -> None:
    own, shared = torch.randn(MATRIX), torch.randn(MATRIX)
    hidden = [shared[1:]]  # a holder that the lot is not told of
    lot = SpillFile([own])
    small, parameter = torch.randn(8), torch.nn.Parameter(torch.randn(MATRIX))
    assert lot.spill([own, shared, small, parameter]) == [] and len(hidden) == 1
    assert bytes_of(hidden[0]) == bytes_of(shared)


def test_a_full_disk_leaves_tensors_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def seek(self, _: int) -> None: ...

        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    lot, first, second = SpillFile(), torch.randn(MATRIX), torch.randn(MATRIX)
    (spilled,) = lot.spill([first])
    lot.bring_back(spilled)  # so that there is a place
    monkeypatch.setattr(lot, "_file", Full())
    before, place = second.clone(), bytes_of(second)
    assert lot.spill([second]) == [] and bytes_of(second) == place and torch.equal(second, before)
    assert lot.spill([first]) == []


@pytest.mark.parametrize(("samples", "spills"), [(5, False), (7, True)])
def test_batches_of_few_samples_are_spilled(samples: int, spills: bool) -> None:
    """Seven of 512 tokens, 768 channels wide, held 80 MB while the last layer of an MLP of 5632 channels was solved."""
    calls = [Call((torch.empty(1, 512, 768, dtype=torch.bfloat16),), {}) for _ in range(samples)]
    assert isinstance(WorkDevice.of(torch.device("cpu"), 0).halted([], calls), SpillFile) is spills


ALGORITHMS: dict[str, AlgoConfig] = {
    "gptq": GPTQConfig(),
    "qronos": QronosConfig(inside_layer_modules=[], model_decoder_layers=""),
    "awq": AWQConfig(scaling_layers=[]),
    "smooth": SmoothQuantConfig(scaling_layers=[]),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_solved_weights_are_the_same_to_the_bit(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve() -> dict[str, torch.Tensor]:
        fresh = tiny_llama() if model == "llama" else family(model)
        data = [batch % 64 for batch in token_batches(3)]
        done = ModelQuantizer(config(INT4, ALGORITHMS[name])).quantize_model(fresh, data)
        return {key: value.clone() for key, value in done.state_dict().items()}

    expected, moved = solve(), []
    inner = SpillFile.spill

    def noting(self: SpillFile, tensors: Any) -> Any:
        found = inner(self, tensors)
        moved.extend(found)
        return found

    monkeypatch.setattr(SpillFile, "spill", noting)
    monkeypatch.setattr(work_device, "MUCH", 0)
    monkeypatch.setattr(spill, "LEAST", 1)
    found = solve()
    assert len(moved) > 20
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
