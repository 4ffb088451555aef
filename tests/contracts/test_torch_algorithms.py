"""Every algorithm of the PyTorch flow does its work: what holds for all of them, on a model with outliers.

A new algorithm needs a row in `ROWS`: how it is configured, and by what measure it is better than rounding to nearest.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.gguf import save_imatrix
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.algorithms import ALGORITHMS
from quark.torch.config import algo_configs
from quark.torch.config.algo_configs import (
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    DistillationConfig,
    EqualizeConfig,
    GPTAQConfig,
    GPTQConfig,
    ImatrixConfig,
    ImportanceScaleConfig,
    QronosConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.config.named_algorithms import ALGO_CONFIGS
from quark.torch.layers.modes import quantizers_off
from quark.torch.layers.replace import quantized_layers
from tests.models.torch_zoo import tiny_llama, token_batches

BATCHES = token_batches(8)
SEEN, HELD_OUT = BATCHES[:6], BATCHES[6:]


def model_with_outliers() -> Any:
    """A Llama with biases; some channels that its layers read are large, and none has mean 0."""
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.01 * torch.randn(128, generator=draw))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.2 + 3 * torch.rand(128, generator=draw) ** 3)
                parameter[::32] *= 8
    return model


@cache
def reference() -> Any:
    return model_with_outliers()


def logits(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch).logits for batch in batches])


# By what an algorithm is better than rounding to nearest. ------------------------------------------------------------


def output_error(model: Any) -> float:
    """Mean square error of the logits on data that no algorithm has seen."""
    return float((logits(model, HELD_OUT) - logits(reference(), HELD_OUT)).square().mean())


def mean_output_error(model: Any) -> float:
    """The error of the logits that is the same for all tokens: what a bias can take back."""
    return float((logits(model, SEEN) - logits(reference(), SEEN)).mean((0, 1)).square().mean())


def weighted_weight_error(model: Any) -> float:
    """Square error of the weights of the first block, each times the second moment of its channel."""
    inputs = input_moments()
    block = model.model.layers[0]
    total = 0.0
    for name, moments in inputs.items():
        layer = block.get_submodule(name)
        with torch.no_grad():
            error = layer.quantized_weight() - reference().model.layers[0].get_submodule(name).weight
        total += float((error.square() * moments).sum())
    return total


@cache
def input_moments() -> dict[str, torch.Tensor]:
    """Name of a linear layer of the first block -> mean square of each channel that it reads in the float model."""
    block = reference().model.layers[0]
    inputs: dict[str, list[torch.Tensor]] = {n: [] for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        for name, seen in inputs.items()
    ]
    logits(reference(), SEEN)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(seen).square().mean((0, 1)) for name, seen in inputs.items()}


@dataclass(frozen=True)
class Row:
    """How an algorithm is run here.

    Attributes:
        config: Its settings, or what makes them: a file, too.
        share: At most so much of the loss of rounding to nearest is left: what was measured, and half as much again.
        scheme: One under which it has something to do.
        loss: What it makes smaller.
        keeps_float: Whether the model computes as before while its quantizers are off.
    """

    config: AlgoConfig | Callable[[], AlgoConfig]
    share: float
    scheme: str = "int3_wo_128"
    loss: Callable[[Any], float] = output_error
    keeps_float: bool = False


def imatrix_config() -> ImatrixConfig:
    """Of a file with the moments of the first block's inputs."""
    sums = {name: (moments[None].numpy(), np.ones(1, np.float32)) for name, moments in input_moments().items()}
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = save_imatrix(sums, folder / "moments.gguf")
    return ImatrixConfig(file=str(file), tensors={f"model.layers.0.{name}": name for name in sums})


ROWS: dict[type[AlgoConfig], Row] = {
    SmoothQuantConfig: Row(SmoothQuantConfig(alpha=0.5), 0.65, "int8", keeps_float=True),
    AutoSmoothQuantConfig: Row(AutoSmoothQuantConfig(), 0.65, "int8", keeps_float=True),
    EqualizeConfig: Row(EqualizeConfig(), 0.9, "mxfp4", keeps_float=True),
    AWQConfig: Row(AWQConfig(), 0.5, keeps_float=True),
    GPTQConfig: Row(GPTQConfig(), 0.09),
    GPTAQConfig: Row(GPTAQConfig(), 0.1),
    QronosConfig: Row(QronosConfig(), 0.09),
    ImportanceScaleConfig: Row(ImportanceScaleConfig(), 0.6, loss=weighted_weight_error, keeps_float=True),
    ImatrixConfig: Row(imatrix_config, 0.6, loss=weighted_weight_error, keeps_float=True),
    AutoRoundConfig: Row(AutoRoundConfig(iters=12, lr=0.04, minmax_lr=0.02, batch_size=2), 0.75),
    RotationConfig: Row(QuaRotConfig(), 0.25, "int8", keeps_float=True),
    DistillationConfig: Row(DistillationConfig(epochs=20, lr=0.01, scale_lr=0.001), 0.58),
    SVDQuantConfig: Row(SVDQuantConfig(svd_rank=8, min_layer_size=64), 0.5, keeps_float=True),
}


IN_OTHER_ORDER: dict[type[AlgoConfig], float] = {
    GPTQConfig: 0.01,
    GPTAQConfig: 0.01,
    QronosConfig: 0.03,
    AWQConfig: 0.01,
    EqualizeConfig: 0.01,
    SVDQuantConfig: 0.25,
}
"""Algorithms that read second moments, whose sums are in another order where layers are taken in parts, or by
several threads -> share by which what is lost may differ.

A sum of n products in another order is off by n / 2^24 of itself at most. A value that lies so near to the middle of
two codes gets the other one, and what comes after makes up for it. A branch of SVDQuant is chosen of 27, of which some
lose the same within that.
"""


def row_of(kind: type[AlgoConfig]) -> Row:
    assert kind in ROWS, f"{kind.__name__} needs a row in {Path(__file__).name}: how it is configured, what it is for"
    return ROWS[kind]


def quantized(scheme: str, *algorithms: AlgoConfig) -> Any:
    config = replace(LLMTemplate.get("llama").get_config(scheme), algo_config=list(algorithms) or None)
    return ModelQuantizer(config).quantize_model(model_with_outliers(), SEEN)


@cache
def rounded(scheme: str) -> Any:
    return quantized(scheme)


@cache
def solved(kind: type[AlgoConfig]) -> Any:
    config = row_of(kind).config
    return quantized(row_of(kind).scheme, config if isinstance(config, AlgoConfig) else config())


EVERY_ALGORITHM = pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__.removesuffix("Config"))


@EVERY_ALGORITHM
def test_it_can_be_named_and_imported(kind: type[AlgoConfig]) -> None:
    assert any(issubclass(named, kind) for named in ALGO_CONFIGS.values()), "a row of ALGO_CONFIGS"
    assert kind.__name__ in algo_configs.__all__


@EVERY_ALGORITHM
def test_it_changes_the_model(kind: type[AlgoConfig]) -> None:
    plain, state = rounded(row_of(kind).scheme).state_dict(), solved(kind).state_dict()
    changed = [name for name, tensor in state.items() if name in plain and not torch.equal(tensor, plain[name])]
    assert changed, "every weight and scale is that of rounding to nearest"
    assert not torch.equal(logits(solved(kind), HELD_OUT), logits(rounded(row_of(kind).scheme), HELD_OUT))


@EVERY_ALGORITHM
def test_it_is_better_than_rounding_to_nearest(kind: type[AlgoConfig]) -> None:
    row = row_of(kind)
    left = row.loss(solved(kind)) / row.loss(rounded(row.scheme))
    assert left < row.share


@EVERY_ALGORITHM
def test_what_keeps_the_float_model_keeps_what_it_computes(kind: type[AlgoConfig]) -> None:
    model, expected = solved(kind), logits(reference(), HELD_OUT)
    with quantizers_off(quantized_layers(model).values()):
        error = float((logits(model, HELD_OUT) - expected).square().mean() / expected.square().mean())
    # float32 in another order changes 1e-7 of a value; codes in the place of weights change more than 1e-2.
    assert (error < 1e-10) == row_of(kind).keeps_float, error


@EVERY_ALGORITHM
def test_its_result_survives_freeze_export_and_reload(kind: type[AlgoConfig], tmp_path: Path) -> None:
    model = copy.deepcopy(solved(kind))
    expected = logits(model, HELD_OUT)
    ModelQuantizer.freeze(model)
    assert torch.equal(logits(model, HELD_OUT), expected)
    export_safetensors(model, tmp_path / "model")
    loaded = import_model_from_safetensors(model_with_outliers(), tmp_path / "model")
    assert torch.equal(logits(loaded, HELD_OUT), expected)
