"""Every registered observer: what it sees in parts is what it sees at once, on numpy and on torch."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from quark.core.array import Array
from quark.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from quark.core.observers import OBSERVERS, Observer
from quark.core.observers.base import bring_to_host
from quark.core.spec import ScaleType, TensorSpec, spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError
from quark.onnx.calibration.statistics import EverythingObserver, Statistics
from tests.pretended_gpu import PretendedGpu, on_host

SHAPE = (6, 64)
MX = {"scale_type": ScaleType.float8_e8m0fnu}
SPECS = {
    "int8": spec("int8"),
    "uint8-asymmetric": spec("uint8", symmetric=False),
    "int4-channel": spec("int4", PerChannel(0), symmetric=False),
    "int4-group": spec("int4", PerGroup(-1, 16)),
    "fp8": spec("fp8_e4m3"),
    "fp8-token": spec("fp8_e4m3", PerToken()),
    "mxfp4": spec("fp4_e2m1", PerGroup(-1, 32), **MX),
    "mx6": spec("mx6", PerGroup(-1, 16)),
    "nvfp4": spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=spec("fp8_e4m3")),
}
PAIRS = {
    f"{name}-{kind}": (name, tensor)
    for (name, entry), (kind, tensor) in itertools.product(OBSERVERS.items(), SPECS.items())
    if not (entry.per_tensor_only and not isinstance(tensor.split, PerTensor))
    and not (name.startswith(("pof2_m", "pof2_most")) and name != "pof2_min_max" and tensor.dtype.is_block)
}
EVERY_PAIR = pytest.mark.parametrize(("name", "tensor"), PAIRS.values(), ids=PAIRS)
EVERY = pytest.mark.parametrize("name", OBSERVERS)
LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def batches(count: int = 5) -> list[np.ndarray]:
    """Heavy-tailed batches of different size of values."""
    rng = np.random.default_rng(0)
    return [(rng.standard_t(3, SHAPE) * (1 + i)).astype(np.float32) for i in range(count)]


def observe(name: str, tensor: TensorSpec, data: list[Array]) -> Observer:
    observer = OBSERVERS[name](tensor)
    for x in data:
        observer.update(x)
    return observer


def assert_same(a: Observer, b: Observer) -> None:
    """Same extremes, scale and zero point, to the bit."""
    for one, other in zip(a.extremes(), b.extremes(), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    ours, theirs = a.qparams(), b.qparams()
    assert np.array_equal(np.asarray(ours.scale), np.asarray(theirs.scale))
    assert (ours.zero_point is None) == (theirs.zero_point is None)
    if ours.zero_point is not None:
        assert np.array_equal(np.asarray(ours.zero_point), np.asarray(theirs.zero_point))
    assert (ours.second is None) == (theirs.second is None)
    if ours.second is not None:
        assert np.array_equal(np.asarray(ours.second.scale), np.asarray(theirs.second.scale))


@EVERY_PAIR
def test_numpy_and_torch_agree(name: str, tensor: TensorSpec) -> None:
    data = batches()
    assert_same(observe(name, tensor, data), observe(name, tensor, [torch.from_numpy(x) for x in data]))


@pytest.mark.slow
@EVERY_PAIR
@LIBRARIES
def test_merging_is_seeing_everything(name: str, tensor: TensorSpec, library: object) -> None:
    data = [library(x) for x in batches()]  # type: ignore[operator]
    whole = observe(name, tensor, data)
    assert_same(whole, observe(name, tensor, [data[i] for i in (4, 2, 0, 1, 3)]))
    for cut in (0, 3, 5):
        left, right = observe(name, tensor, data[:cut]), observe(name, tensor, data[cut:])
        assert left.count + right.count == 5
        left.merge(right)
        assert_same(whole, left)
        assert left.count == whole.count == 5
    late = observe(name, tensor, data[3:])
    late.merge(observe(name, tensor, data[:3]))
    assert_same(whole, late)


@EVERY_PAIR
def test_merging_leaves_the_other_as_it_was(name: str, tensor: TensorSpec) -> None:
    data = batches()
    first, second = observe(name, tensor, data[:2]), observe(name, tensor, data[2:])
    first.merge(second)
    first.update(data[0] * 100)
    assert_same(second, observe(name, tensor, data[2:]))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        pytest.param(
            *pair, id=key, marks=[] if key in ("pof2_most_common-int4-channel", "mse-int8") else pytest.mark.slow
        )
        for key, pair in PAIRS.items()
    ],
)
def test_a_device_is_not_waited_for_in_each_batch(name: str, tensor: TensorSpec) -> None:
    """What is observed there is what is observed here, and more batches cost no more waits and no more uploads."""
    seen: dict[int, tuple[int, ...]] = {}
    for count in (1, 5):
        data = [torch.from_numpy(x) for x in batches(count)]
        with PretendedGpu() as gpu:
            observer = OBSERVERS[name](tensor)
            on_device = [x.to("cuda") for x in data]
            observer.update(on_device[0])  # constants are brought once
            gpu.meter.reset()
            for x in on_device[1:]:
                observer.update(x)
            assert not gpu.meter.waits and not gpu.meter.uploads, (gpu.meter.waited_at, gpu.meter.uploaded_at)
            bring_to_host([observer])
            params = observer.qparams()
            seen[count] = (gpu.meter.waits.total(), gpu.meter.uploads.total())
            found = on_host([x for x in (params.scale, params.zero_point) if x is not None])
        expected = observe(name, tensor, data).qparams()
        for ours, theirs in zip(found, (expected.scale, expected.zero_point), strict=False):
            assert torch.equal(ours, theirs)
    assert all(many <= one for one, many in zip(seen[1], seen[5], strict=True)), seen


ABOUT_BATCHES = ("moving_average", "pof2_most_common")


@pytest.mark.parametrize("name", [name for name in OBSERVERS if name not in ABOUT_BATCHES])
@pytest.mark.parametrize("tensor", [SPECS["int8"], SPECS["uint8-asymmetric"]], ids=str)
def test_batch_size_changes_nothing(name: str, tensor: TensorSpec) -> None:
    data = np.concatenate(batches())
    whole = observe(name, tensor, [data])
    for parts in (2, 7, 30):
        assert_same(whole, observe(name, tensor, np.array_split(data, parts)))


@EVERY_PAIR
def test_parameters_have_the_stored_shape(name: str, tensor: TensorSpec) -> None:
    observer = observe(name, tensor, batches())
    params = observer.qparams()
    low, high = observer.range()
    shape = tensor.split.scale_shape(SHAPE)
    assert tuple(params.scale.shape) == shape == tuple(low.shape) == tuple(high.shape)
    assert np.all(np.asarray(params.scale) > 0) and np.all(np.asarray(low) <= np.asarray(high))
    assert np.asarray(params.scale).dtype == np.float32


@EVERY_PAIR
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_observed_exactly(name: str, tensor: TensorSpec, dtype: str) -> None:
    data = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in batches()]
    assert_same(observe(name, tensor, data), observe(name, tensor, [x.float() for x in data]))


@EVERY
@LIBRARIES
def test_empty_tensors_count_for_nothing(name: str, library: object) -> None:
    data = [library(x) for x in batches()]  # type: ignore[operator]
    empty = library(np.zeros((0, SHAPE[1]), np.float32))  # type: ignore[operator]
    for tensor in (SPECS["int8"], SPECS["mxfp4"]):
        if OBSERVERS[name].per_tensor_only and tensor is SPECS["mxfp4"]:
            continue
        with_empty = observe(name, tensor, [empty, *data[:2], empty, *data[2:], empty])
        assert with_empty.count == 5
        assert_same(with_empty, observe(name, tensor, data))


@EVERY
@LIBRARIES
def test_nothing_observed(name: str, library: object) -> None:
    observer = OBSERVERS[name](SPECS["int8"])
    observer.update(library(np.zeros((0, 4), np.float32)))  # type: ignore[operator]
    observer.merge(OBSERVERS[name](SPECS["int8"]))
    for ask in (observer.range, observer.qparams):
        with pytest.raises(CalibrationError, match="never reached"):
            ask()


@EVERY
@LIBRARIES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(name: str, bad: float, library: object) -> None:
    data = batches()
    data[1][3, 5] = bad
    observer = observe(name, SPECS["int8"], [library(x) for x in data])  # type: ignore[operator]
    for ask in (observer.range, observer.qparams):
        with pytest.raises(NonFiniteError, match="NaN or Inf after 5"):
            ask()


ABOUT_BATCHES = ("moving_average", "pof2_most_common")


@pytest.mark.parametrize("name", [name for name, entry in OBSERVERS.items() if entry.per_tensor_only])
def test_one_range_is_not_for_channels(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        OBSERVERS[name](SPECS["int4-channel"])
    assert str(SPECS["int4-channel"].granularity) in str(error.value) and "min_max" in str(error.value)


ABOUT_BATCHES = ("moving_average", "pof2_most_common")


@pytest.mark.parametrize("name", [name for name, entry in OBSERVERS.items() if not entry.per_tensor_only])
@pytest.mark.parametrize("kind", ["int4-group", "fp8-token"])
def test_a_shape_that_changes(name: str, kind: str) -> None:
    data = batches(1)[0]
    observer = observe(name, SPECS[kind], [data])
    with pytest.raises(CalibrationError) as error:
        observer.update(data[:4])
    assert "from (6" in str(error.value) and "to (4" in str(error.value)


@EVERY
def test_constant_and_zero_tensors(name: str) -> None:
    for value, tensor in itertools.product((0.0, 3.0, -2.5), (SPECS["int8"], SPECS["uint8-asymmetric"], SPECS["fp8"])):
        params = observe(name, tensor, [np.full((4, 4), value, np.float32)]).qparams()
        assert np.isfinite(params.scale).all() and np.all(params.scale > 0)


@EVERY
def test_unknown_names_name_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean.*{name}"):
        OBSERVERS[name + "x"]


def test_shared_exponents_need_no_power_of_two_search() -> None:
    with pytest.raises(ConfigError, match="mx6.*'block'"):
        OBSERVERS["pof2_min_mse"](SPECS["mx6"])


def sent(name: str, tensor: TensorSpec, data: list[Array]) -> Observer:
    """What another process gets to know of an observer that saw the data."""
    state = pickle.loads(pickle.dumps(observe(name, tensor, data).state()))
    received = OBSERVERS[name](tensor)
    received.restore(state)
    return received


@pytest.mark.slow
@EVERY_PAIR
@LIBRARIES
def test_states_are_merged_in_any_order(name: str, tensor: TensorSpec, library: object) -> None:
    """Whichever process saw the widest batch: what is restored decides the same, is merged, and goes on."""
    data = [library(x) for x in batches()]  # type: ignore[operator]
    if name == "mx_diffs":
        with pytest.raises(CalibrationError, match="no state"):
            observe(name, tensor, data).state()
        return
    whole = observe(name, tensor, data)
    for order in ((4, 3, 2, 1, 0), (0, 4, 1, 3, 2)):
        ordered = [data[i] for i in order]
        alone = sent(name, tensor, ordered)
        assert alone.count == 5
        assert_same(alone, whole)
        together = sent(name, tensor, ordered[:1])
        together.merge(sent(name, tensor, ordered[1:3]))
        for x in ordered[3:]:
            together.update(x)
        assert_same(together, whole)


FROM_A_FILE = {
    "mean_magnitude": "needs 'total'",
    "mx_diffs": "keeps the values themselves",
    "pof2_most_common": "needs 'votes'",
}
"""Observers that need more than a statistics file holds -> what they say."""


@EVERY
def test_a_statistics_file_serves_every_observer(name: str, tmp_path: Path) -> None:
    """One pass of calibration is enough for all observers that decide from extremes, their sums, and counts."""
    seen = EverythingObserver()
    for x in batches():
        seen.update(x)
    statistics = Statistics("a model")
    statistics.add({"x": seen})
    statistics.save(tmp_path / "statistics.npz")
    restored = OBSERVERS[name](SPECS["int8"])
    state = Statistics.load(tmp_path / "statistics.npz", "a model").states["x"]
    if name in FROM_A_FILE:
        with pytest.raises(CalibrationError, match=FROM_A_FILE[name]):
            restored.restore(state)
        return
    restored.restore(state)
    assert_same(restored, observe(name, SPECS["int8"], batches()))


def test_a_state_that_lacks_what_is_needed_is_refused() -> None:
    with pytest.raises(CalibrationError, match="needs 'counts'"):
        OBSERVERS["mse"](SPECS["int8"]).restore(observe("min_max", SPECS["int8"], batches()).state())


class Forgetful(Observer):
    """Keeps the second largest magnitude, which its state does not have."""

    per_tensor_only = True
    ends: Array = np.zeros(2, np.float32)

    def update(self, x: Array) -> None:
        super().update(x)
        self._keep(abs(np.asarray(x)).reshape(-1))

    def merge(self, other: Observer) -> None:
        super().merge(other)
        assert isinstance(other, Forgetful)
        self._keep(other.ends)

    def range(self) -> tuple[Array, Array]:
        return self._as_range(-self.ends[0], self.ends[0])

    def _keep(self, values: Array) -> None:
        self.ends = np.sort(np.concatenate([self.ends, values]))[-2:]


def test_the_contract_finds_a_state_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVERS._entries, "forgetful", Forgetful)
    test_merging_is_seeing_everything("forgetful", SPECS["int8"], np.asarray)
    with pytest.raises(AssertionError):
        test_states_are_merged_in_any_order("forgetful", SPECS["int8"], np.asarray)
