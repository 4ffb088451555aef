"""The range of each loud tensor is the one whose noise weighs least, of the model that scales are decided on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

from quark.core.spec import LayerSpec, spec
from quark.errors import NothingQualifiesError
from quark.onnx import CLEConfig
from quark.onnx.algorithms.rescaling.cle import equalize
from quark.onnx.calibration.calibrate import repeatable
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.config.settings import CalibrationSettings, Settings, SpecSettings
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.noise.choices import TensorRanges, choose_ranges
from quark.onnx.search.noise.sensitivity import Probe
from quark.onnx.search.recovery.steps import Situation, tensor_ranges
from tests.models.onnx_zoo import cnn, images
from tests.onnx.algorithms.test_cle import CHAIN, badly_scaled, chain

CUT = Settings(
    SpecSettings(LayerSpec(weight=spec("int8"), input=spec("uint8", symmetric=False, observer="percentile"))),
    calibration=CalibrationSettings(percentile=60.0),
)
"""Ranges that cut off two fifths of all values."""
MIN_MAX = TensorRanges(candidates=(("min_max", 0.0),))
EQUALIZE = CLEConfig(cle_scale_use_threshold=False, cle_steps=2)


def extremes(
    model: onnx.ModelProto, names: list[str], feeds: list[dict[str, np.ndarray]]
) -> dict[str, tuple[float, float]]:
    """What ONNX Runtime gives of these tensors, smallest and largest."""
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = [
        {**feed, **dict(zip(kept, session.run(kept, feed), strict=True))}
        for feed in feeds
        for kept in [[value.name for value in session.get_outputs()]]
    ]
    return {n: (float(min(g[n].min() for g in given)), float(max(g[n].max() for g in given))) for n in names}


@pytest.mark.parametrize("algorithms", [(), (EQUALIZE,)], ids=["plain", "cle"])
def test_ranges_are_those_of_the_model_that_scales_are_decided_on(algorithms: tuple[CLEConfig, ...]) -> None:
    """Equalization changes what lies between layers by up to 100: the ranges before it would serve nothing."""
    proto, feeds = badly_scaled(chain(), CHAIN), images(4)
    model, settings = load(proto), replace(CUT, algorithms=algorithms)
    data = repeatable(feeds, model, settings)
    changed = tensor_ranges(MIN_MAX)(settings, Situation(settings, prepared=Prepared(model, data)))
    assert isinstance(changed, Settings)
    chosen = dict(changed.calibration.ranges)
    expected = load(proto)
    for one in algorithms:
        equalize(expected, one, settings)
    seen = extremes(to_proto(expected), list(chosen), feeds)
    assert len(chosen) >= 4
    for name, found in chosen.items():
        np.testing.assert_allclose(found, seen[name], rtol=1e-5, atol=1e-6, err_msg=name)
    before = extremes(to_proto(load(proto)), list(chosen), feeds)
    assert any(abs(before[name][1] / found[1] - 1) > 0.5 for name, found in chosen.items()) == bool(algorithms)
    assert to_proto(model) == to_proto(load(proto)), "the float model of the search is not changed"


def test_what_is_the_same_under_two_statistics_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that the tensors have already is none to try, nor is one that came before."""
    runs = []
    power = Probe.power_of_all
    monkeypatch.setattr(Probe, "power_of_all", lambda self, group: runs.append(group) or power(self, group))
    model = load(cnn())
    prepared = Prepared(model, repeatable(images(4), model, CUT), statistics={})
    both = replace(MIN_MAX, candidates=(("percentile", 60.0), ("min_max", 0.0), ("percentile", 100.0)))
    chosen = choose_ranges(prepared, both, CUT)
    # One as they are, and one of MinMax: Percentile 100 is the same, but for tensors whose last bin is wider.
    noisy = len({tuple(group) for group in runs})
    assert len(runs) == 2 * noisy and chosen.calibration.ranges
    with pytest.raises(NothingQualifiesError, match="none of the"):
        choose_ranges(prepared, replace(both, candidates=(("percentile", 60.0),)), CUT)


@pytest.mark.parametrize(("share", "changes"), [(0.91, False), (0.89, True)])
def test_a_range_is_changed_where_a_tenth_of_its_noise_goes(
    share: float, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is as noisy as 1 under the range that it has, and as noisy as `share` under another."""
    looked = list[object]()
    look = Probe.look
    monkeypatch.setattr(Probe, "look", lambda self, params: looked.append(params) or look(self, params))
    monkeypatch.setattr(Probe, "power_of_all", lambda self, group: share if looked else 1.0)
    model = load(cnn())
    prepared = Prepared(model, repeatable(images(1), model, CUT), statistics={})
    if changes:
        assert choose_ranges(prepared, MIN_MAX, CUT).calibration.ranges
    else:
        with pytest.raises(NothingQualifiesError):
            choose_ranges(prepared, MIN_MAX, CUT)
    assert looked
