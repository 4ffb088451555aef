"""The surroundings of a call change nothing: what a program has set in torch for its own arithmetic stays its own.

They are a default dtype and device, autocast, products of fewer digits, gradients that are off, deterministic
algorithms, and the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.torch import (
    LLMTemplate,
    ModelQuantizer,
    export_gguf,
    export_safetensors,
    gguf_config,
    import_model_from_gguf,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.algorithms import ALGORITHMS
from quark.torch.config.algo_configs import AlgoConfig, SmoothQuantConfig, SVDQuantConfig
from tests.contracts.test_torch_algorithms import (
    HELD_OUT,
    IN_OTHER_ORDER,
    SEEN,
    logits,
    model_with_outliers,
    quantized,
    row_of,
    solved,
)
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama


@contextmanager
def surroundings(device: str = "cpu") -> Iterator[None]:
    """Within: all of them at once. They are looked at afterwards, and set back."""
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(torch.no_grad())
            if device != "cpu":
                stack.enter_context(torch.device(device))
            yield
            assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
            assert torch.get_default_device().type == device
        assert torch.get_default_dtype() is torch.float64 and torch.get_float32_matmul_precision() == "medium"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


def algorithm_of(kind: type[AlgoConfig]) -> AlgoConfig:
    config = row_of(kind).config
    return config if isinstance(config, AlgoConfig) else config()


@pytest.mark.parametrize(
    "kind",
    [kind if kind is SmoothQuantConfig else pytest.param(kind, marks=pytest.mark.slow) for kind in ALGORITHMS],
    ids=lambda kind: kind.__name__.removesuffix("Config"),
)
def test_an_algorithm_solves_the_same(kind: type[AlgoConfig]) -> None:
    plan = replace(LLMTemplate.get("llama").get_config(row_of(kind).scheme), algo_config=[algorithm_of(kind)])
    model = model_with_outliers()
    with surroundings():
        ModelQuantizer(plan).quantize_model(model, SEEN)
    expected, found = solved(kind).state_dict(), model.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__.removesuffix("Config"))
def test_two_threads_solve_the_same(kind: type[AlgoConfig]) -> None:
    """To the bit, but where sums are in another order: there with the same loss."""
    row, expected, before = row_of(kind), solved(kind), torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        found = quantized(row.scheme, algorithm_of(kind))
    finally:
        torch.set_num_threads(before)
    if kind in IN_OTHER_ORDER:
        assert row.loss(found) == pytest.approx(row.loss(expected), rel=IN_OTHER_ORDER[kind])
    else:
        state = found.state_dict()
        assert all(torch.equal(x, state[name]) for name, x in expected.state_dict().items())


# What is loaded. ------------------------------------------------------------------------------------------------------


def float_model() -> Any:
    """A model whose rows are whole blocks of GGUF, with as many tokens as the tokenizer of the example model."""
    return tiny_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=2048)


def folder(folder: Path, form: str) -> Callable[[], Any]:
    """Write a folder with branches, or in the format of another program; how it is loaded."""
    algorithms = [SVDQuantConfig(svd_rank=8, min_layer_size=64)] if form == "quark" else None
    config = replace(LLMTemplate.get("llama").get_config("int4_wo_32"), algo_config=algorithms)
    model = ModelQuantizer(config).quantize_model(float_model(), SEEN)
    export_safetensors(model, folder / "model", form)
    return partial(import_model_from_safetensors, float_model() if form == "quark" else None, folder / "model")


def gguf_file(folder: Path, mix: str) -> Callable[[], Any]:
    """Write a GGUF file; how it is loaded."""
    model = float_model()
    ModelQuantizer(gguf_config(model, mix)).quantize_model(model)
    file = export_gguf(model, folder, "llama", LANGUAGE_MODEL)
    return partial(import_model_from_gguf, float_model(), file)


def params(folder: Path, scheme: str) -> Callable[[], Any]:
    """Write the files of `save_params`; how they are loaded."""
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme)).quantize_model(float_model())
    files = {"json_path": save_params(model, "x", export_dir=folder, compressed=True)}
    return partial(load_params, float_model(), safetensors_path=folder / "x.safetensors", **files)


LOADED = {
    "quark": partial(folder, form="quark"),
    "gptq": partial(folder, form="gptq"),
    "gguf": partial(gguf_file, mix="q4_k_m"),
    "params": partial(params, scheme="mxfp4"),
}


@pytest.mark.parametrize("case", LOADED)
def test_a_model_is_loaded_as_it_is(case: str, tmp_path: Path) -> None:
    expected, found = LOADED[case](tmp_path / "plain")(), LOADED[case](tmp_path / "within")
    with surroundings("meta"):
        found = found()
    values = [{**model.state_dict(), **dict(model.named_buffers())} for model in (expected, found)]
    assert all(x.dtype == values[1][name].dtype and torch.equal(x, values[1][name]) for name, x in values[0].items())
    assert torch.equal(logits(found, HELD_OUT), logits(expected, HELD_OUT))
