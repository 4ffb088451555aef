"""What rotation gives back on the trained language model with outliers that do not change its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerToken
from quark.core.spec import LayerSpec, TensorSpec
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.algo_configs import RotationConfig
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.llm.text import perplexity, token_windows
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT

pytestmark = pytest.mark.slow

W4A4 = config_of_layer(
    LayerSpec(
        weight=TensorSpec(DTYPES["int4"], PerChannel(0)), input=TensorSpec(DTYPES["int4"], PerToken(), dynamic=True)
    )
)


def with_outliers() -> Any:
    """The language model with the gains of three channels of each norm times 30, and the layers behind divided."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()
    channels = [3, 77, 200]
    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[channels] *= 30
                for reader in readers:
                    reader.weight[:, channels] /= 30
    return model


@pytest.fixture(scope="module")
def texts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    calibration = token_windows(tokenizer, TEXT / "calibration.txt", 256, 4)
    return calibration, [torch.cat(token_windows(tokenizer, TEXT / "heldout.txt", 256, 8))]


@pytest.fixture(scope="module")
def lost(texts: tuple[list[torch.Tensor], list[torch.Tensor]]) -> Callable[[QLayerConfig, Any], float]:
    """Log of the perplexity of the quantized model over that of the float model."""
    calibration, heldout = texts
    goal = perplexity(with_outliers(), heldout)

    def measure(scheme: QLayerConfig, rotation: RotationConfig | None) -> float:
        config = QConfig(
            scheme, exclude=["lm_head"], algo_config=[rotation] if rotation else None, log_severity_level=3
        )
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(with_outliers(), calibration))
        return perplexity(model, heldout) / goal - 1

    return measure


@pytest.mark.parametrize(
    ("scheme", "share"),
    [(LLMTemplate.get("llama").get_config("int8").global_quant_config, 0.9), (W4A4, 0.99)],
    ids=["static w8a8", "w4a4"],
)
def test_rotation_gives_back_what_outliers_cost(scheme: QLayerConfig, share: float, lost: Any) -> None:
    without, rotated = lost(scheme, None), lost(scheme, RotationConfig(r2=True, r4=True))
    assert without > 0.03, "the outliers must hurt, else there is nothing to show"
    assert 1 - rotated / without >= share
