"""The ONNX part of the demo: what it prints about the example classifier is so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import onnx
import pytest
from rich.console import Console

from tests.models.torch_zoo import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quark_demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_digits_keep_their_accuracy_in_every_scheme(demo: ModuleType, tmp_path: Path) -> None:
    costs = demo.digit_costs(tmp_path, runs=1)
    base = costs.pop("float32")
    assert base.accuracy > 0.975
    least = {"A8W8": 30, "A16W8": 35, "XINT8": 28, "BF16": 44, "int8 ort_x64": 35}
    assert costs.keys() == least.keys()
    for name, cost in costs.items():
        assert abs(base.accuracy - cost.accuracy) <= (0.02 if name == "XINT8" else 0.01), name
        assert cost.sqnr > least[name], name
        # Beside its weights, each file holds its graph: of this small model, 20 kB.
        assert cost.kilobytes - 20 < (0.51 if name == "BF16" else 0.33) * base.kilobytes, name
    for path in tmp_path.glob("*.onnx"):
        onnx.checker.check_model(str(path), full_check=True)
    kinds = {node.op_type for node in onnx.load(tmp_path / "digits_A8W8.onnx").graph.node}
    assert "BatchNormalization" not in kinds


def test_the_table_names_every_scheme(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, width=120)
    costs = {"float32": demo.Cost(0.99, 155, 1.0, float("inf")), "A8W8": demo.Cost(0.98, 60, 2.5, 34.2)}
    monkeypatch.setattr(demo, "digit_costs", lambda folder: costs)
    demo.digits(console, tmp_path)
    assert re.search(r"A8W8\s*│ 60\s*│ 98\.00%\s*│ 34\.2\s*│ 2\.50", console.export_text())


def test_the_page_of_the_classifier_is_true(demo: ModuleType) -> None:
    page = (EXAMPLES / "models" / "digits_cnn" / "README.md").read_text(encoding="utf-8")
    model = onnx.load(EXAMPLES / "models" / "digits_cnn" / "model.onnx")
    assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 8
    assert f"opset {model.opset_import[0].version}" in page
    assert len(demo.images("calibration")) == 128 and len(demo.images("heldout")) == 597
    assert "99.16 % (592 of 597)" in page
