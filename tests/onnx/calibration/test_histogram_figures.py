"""SaveTensorHistFig: a figure of each tensor that calibration counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.core.observers import OBSERVERS
from quark.core.spec import spec
from quark.errors import ConfigError, MissingDependencyError, OutputError
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.calibration.histogram_figures import COLUMNS, FOLDER, columns
from tests.models.onnx_zoo import Reader, cnn, images


def quantize(method: CalibMethod, **options: Any) -> Any:
    config = QConfig(QLayerConfig(Int8Spec(calibration_method=method), weight=Int8Spec()), SaveTensorHistFig=True)
    config.extra_options.update(options)
    return ModelQuantizer(config).quantize_model(cnn(), None, Reader(images(1)))


@pytest.mark.slow
def test_a_figure_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    model = quantize(CalibMethod.Percentile)
    scaled = {tensor.name.removesuffix("_scale") for tensor in model.graph.initializer}
    names = sorted(file.name for file in (tmp_path / FOLDER).iterdir())
    assert names and {name.split("_", 1)[1] for name in names} <= {f"{tensor}.png" for tensor in scaled}
    assert any(name.endswith("_x.png") for name in names)
    assert all((tmp_path / FOLDER / name).read_bytes().startswith(b"\x89PNG") for name in names)


@pytest.mark.parametrize("x", [np.linspace(-3, 5, 10_000), np.full(7, 2.5), np.array([-1.0, 0, 0, 4])], ids=len)
def test_columns_hold_every_value(x: Any) -> None:
    """Against numpy's histogram: a bin, 2^-7 of its value wide, may lie over the edge of a column."""
    observer = OBSERVERS["percentile"](spec("int8"))
    observer.update(x.astype(np.float32))
    low, high = float(x.min()), float(x.max())
    edges, counts = columns(observer.histogram.bins(0, low, high), low, high)  # type: ignore[attr-defined]
    assert len(counts) == COLUMNS and counts.sum() == pytest.approx(len(x)) and counts.min() >= 0
    expected, _ = np.histogram(x, bins=edges)
    moved = np.abs(np.cumsum(counts) - np.cumsum(expected)).max()
    assert moved <= np.histogram(np.abs(x), bins=128)[0].max()


def test_what_stops_the_figures_is_found_before_the_data_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quark.errors._is_installed", lambda package: package != "matplotlib")
    with pytest.raises(MissingDependencyError, match=r"matplotlib.*openquark\[plot\]"):
        quantize(CalibMethod.Percentile)
    monkeypatch.setattr("quark.errors._is_installed", lambda package: True)
    with pytest.raises(ConfigError, match="MinMax keeps no histogram"):
        quantize(CalibMethod.MinMax)
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(OutputError, match="which is a file here"):
        quantize(CalibMethod.Entropy)
