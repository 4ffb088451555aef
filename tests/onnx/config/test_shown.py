"""`repr` of configs: a short table of what is said, and nothing of what is not."""

from __future__ import annotations

from quark.onnx import CLEConfig, Config, QConfig, QLayerConfig, QTensorConfig, get_default_config
from quark.onnx.config.tensor_specs import Int16


def test_a_config_is_a_table_of_what_it_says() -> None:
    int16 = QLayerConfig(weight=QTensorConfig(data_type=Int16, symmetric=False))
    shown = repr(
        QConfig(
            QLayerConfig(weight=QTensorConfig(), input_tensors=QTensorConfig()),
            specific_layer_config={int16: ["conv1"]},
            layer_type_config={None: ["Gemm"]},
            exclude=["^/head/.*"],
            algo_config=[CLEConfig()],
            UseRandomData=True,
        )
    ).splitlines()
    assert shown[0] == "QConfig"
    assert [line.split()[0] for line in shown[1:]] == ["all", "conv1", "Gemm", "exclude", "algorithms", "UseRandomData"]
    assert "weight: Int8, per tensor" in shown[1] and "Int16, per tensor, asymmetric" in shown[2]
    assert shown[3].split() == ["Gemm", "float"] and "CLEConfig" in shown[5]


def test_the_older_configs_show_what_differs_from_the_defaults() -> None:
    """One line had 25 fields, of which four said something."""
    flat = get_default_config("XINT8")
    shown = repr(flat)
    assert shown.startswith("QuantizationConfig\n") and len(shown.splitlines()) < 10
    assert "MinMSE" in shown and "enable_npu_cnn" in shown and "nodes_to_exclude" not in shown
    assert repr(Config(flat)) == shown.replace("QuantizationConfig", "Config", 1)
    assert all(len(line) <= 120 for line in shown.splitlines())
