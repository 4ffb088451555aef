"""Learned rotations: steps stay orthogonal, what is learned is what is folded, the float model stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.algorithms.rotation import spinquant
from quark.torch.algorithms.rotation.cayley import MatrixRotation, cayley_step, in_blocks, keeping_mean
from quark.torch.algorithms.rotation.frame import FRAME
from quark.torch.algorithms.rotation.quarot import ModelRotation
from quark.torch.checkpoint.importer import import_model_from_safetensors
from quark.torch.config.algo_configs import GPTQConfig, RotationConfig
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import tiny_llama, token_batches

DATA = token_batches(4)
SPIN = RotationConfig(r2=True, trainable=True, train_steps=4, train_batch_size=2, train_lr=0.5)


def random_orthogonal(size: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]


def quantized(*algorithms: Any, scheme: str = "int4_wa_64", model: Any = None, data: Any = DATA) -> Any:
    config = replace(LLMTemplate.get("llama").get_config(scheme), algo_config=list(algorithms))
    return ModelQuantizer(config).quantize_model(model or tiny_llama(), data)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(DATA[0]).logits
    return out


# Steps ---------------------------------------------------------------------------------------------------------------


def test_a_step_is_the_cayley_transform_of_the_paper_and_stays_orthogonal() -> None:
    matrix, gradient = random_orthogonal(16), torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator())
    # SpinQuant, eq. 4: G' = G R^T - 1/2 R R^T G R^T, Y = G' - G'^T; here with the sign of a descent.
    part = gradient @ matrix.T - 0.5 * matrix @ matrix.T @ gradient @ matrix.T
    skew = part - part.T
    length = 0.5 / float(skew.abs().sum(0).max())
    identity = torch.eye(16, dtype=torch.float64)
    expected = torch.linalg.inv(identity + length / 2 * skew) @ (identity - length / 2 * skew) @ matrix
    torch.testing.assert_close(cayley_step(matrix, gradient, 0.5), expected)
    for _ in range(200):
        matrix = cayley_step(matrix, gradient @ matrix, 1.0)
    assert float((matrix @ matrix.T - identity).abs().max()) < 1e-6


def test_steps_find_the_nearest_rotation() -> None:
    """argmin ||R - B||^2 over orthogonal R is the polar factor of B (Procrustes), of the same determinant."""
    target = random_orthogonal(8)
    matrix = random_orthogonal(8, 1)
    if torch.linalg.det(target) * torch.linalg.det(matrix) < 0:
        matrix = matrix * torch.tensor([-1.0] + [1.0] * 7, dtype=torch.float64)
    for step in range(400):
        matrix = cayley_step(matrix, matrix - target, 0.97**step)
    torch.testing.assert_close(matrix, target, rtol=0, atol=1e-4)


def test_the_form_that_keeps_the_mean_keeps_it() -> None:
    matrix = keeping_mean(random_orthogonal(11))
    identity = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, identity)
    x = torch.randn(3, 24, dtype=torch.float64)
    torch.testing.assert_close(MatrixRotation(matrix).apply(x).sum(-1), x.sum(-1))
    torch.testing.assert_close(in_blocks(x, matrix)[:, 12:], x[:, 12:] @ matrix)


# The model that learns -----------------------------------------------------------------------------------------------


def opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=64, word_embed_proj_dim=64)).eval()


def biased_llama() -> Any:
    return tiny_llama(attention_bias=True, mlp_bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_llama, biased_llama, opt], ids=["llama", "biases", "means"])
@pytest.mark.parametrize("size", [None, 16])
def test_what_learns_computes_what_the_folded_model_computes(build: Callable[[], Any], size: int | None) -> None:
    model = build()
    before = logits(model)
    rotation = ModelRotation(model, RotationConfig(r2=True, rotation_size=size))
    plans = rotation.rotate()
    parts = {FRAME: rotation.residual, **{name: plan.residual for name, plan in plans.items()}}
    assert rotation.folded is not None
    stream = (rotation.folded.size, rotation.folded.keep_mean)
    turned = spinquant._Turned(model, {}, parts, plans, stream)
    turned.matrices = {name: random_orthogonal(len(matrix)) for name, matrix in turned.matrices.items()}
    parameters = turned.parameters(turned.matrices)
    with torch.no_grad():
        free = torch.func.functional_call(model, parameters, (DATA[0],), tie_weights=False).logits
    torch.testing.assert_close(free, before, rtol=1e-3, atol=1e-4)
    learned = spinquant.Learned(turned.applied(), 1.0, 0.0)
    rotation.rotate_further(learned.stream(), {name: learned.plan(name, plan) for name, plan in plans.items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_learned_model_is_the_float_model_and_survives_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinquant, "_is_better", lambda after, before: True)
    model = quantized(SPIN, GPTQConfig())
    assert not torch.equal(logits(model), logits(quantized(replace(SPIN, trainable=False), GPTQConfig())))
    export_safetensors(model, tmp_path / "spin")
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(), tmp_path / "spin")), logits(model))
    model = quantized(SPIN)
    with quantizers_off(quantized_layers(model).values()):
        torch.testing.assert_close(logits(model), logits(tiny_llama()), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_what_is_no_better_on_unseen_batches_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinquant, "_is_better", lambda after, before: False)
    hadamard = quantized(replace(SPIN, trainable=False))
    assert torch.equal(logits(quantized(SPIN)), logits(hadamard))


def test_what_cannot_be_learned_is_said() -> None:
    with pytest.raises(ConfigError, match="needs two calibration batches or more, one for validation; 1 given"):
        quantized(SPIN, data=DATA[:1])
    with pytest.raises(ConfigError, match="RotationConfig needs calibration data"):
        quantized(SPIN, data=None)
    with pytest.raises(ConfigError, match="r1=True or r2=True, without online_r1_rotation"):
        quantized(replace(SPIN, online_r1_rotation=True))
    with pytest.raises(ConfigError, match="train_steps: 0 is below 1"):
        RotationConfig(train_steps=0)
    with pytest.raises(ConfigError, match="train_lr: 2.0 is not above 0 and at most 1"):
        RotationConfig(train_lr=2.0)
    model = tiny_llama()
    real = type(model).forward
    type(model).forward = lambda self, *args, **kwargs: (real(self, *args, **kwargs).logits,)
    try:
        with pytest.raises(NotSupportedError, match="gives no logits"):
            quantized(SPIN, model=model)
    finally:
        type(model).forward = real


@pytest.mark.slow
def test_steps_make_the_divergence_smaller(caplog: pytest.LogCaptureFixture) -> None:
    """By what is logged, on a batch that is both learned from and judged by: there each step counts."""
    quantized(replace(SPIN, train_steps=20, train_batch_size=1, train_lr=1.0), data=[DATA[0], DATA[0]])
    figures = next(r.args for r in caplog.records if "Learned rotations" in r.msg)
    assert isinstance(figures, tuple)
    before, after, _ = figures
    assert isinstance(before, float) and isinstance(after, float)
    assert after < 0.9 * before
