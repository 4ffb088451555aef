"""Products of 16-bit floats that are computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from quark.torch.model import half_products
from quark.torch.model.batches import evaluating

ROWS = half_products.ROWS


@pytest.fixture(autouse=True)
def lacks_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without float16, whichever runs the tests."""
    monkeypatch.setattr(half_products, "lacking_types", lambda: frozenset([torch.float16]))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def causal(*operands: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(*operands, is_causal=True)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype).index_fill_(1, torch.tensor([1]), -torch.inf)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


HEADS = [random(1, 2, 16, 8), random(2, 1, 16, 8).transpose(0, 1), random(1, 2, 16, 8) + 1]


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "mm": (torch.mm, [random(16, 24), random(24, 8)]),
    "linear": (functional.linear, [random(3, 16, 24), random(8, 24)]),
    "linear with a bias": (functional.linear, [random(16, 24), random(8, 24), random(8)]),
    "bmm": (torch.bmm, [random(3, 16, 24), random(3, 24, 8)]),
    "baddbmm": (torch.baddbmm, [random(3, 16, 8), random(3, 16, 24), random(3, 24, 8)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [random(2, 16, 24), random(2, 24, 8)]),
    "convolution": (functional.conv2d, [random(2, 3, 10, 10), random(4, 3, 3, 3), random(4)]),
    "attention": (causal, HEADS),
    "attention under a mask": (masked, HEADS),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_float32_rounded_once(case: str) -> None:
    """Of one product each: the gradient of every operand is another one."""
    function, operands = CASES[case]
    with half_products.half_products(nn.Linear(1, 1).half()):
        found = with_gradients(function, operands)
    expected = with_gradients(function, [x.float() for x in operands])
    assert torch.equal(found[0], expected[0].half())
    for x, y in zip(found, expected, strict=True):
        assert x.dtype is torch.float16
        if function in (causal, masked):  # their gradients read the result, which was rounded
            assert (x - y).abs().max() <= 2 * torch.finfo(torch.float16).eps * y.abs().max()
        else:
            assert torch.equal(x, y.half())


def with_gradients(function: Callable[..., torch.Tensor], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in operands]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_matrix_is_widened_in_pieces(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "PIECE", 50)
    x, weight, offset = random(16, 24), random(7, 24), random(7) if bias else None
    with half_products.half_products(nn.Linear(1, 1).half()):
        found = functional.linear(x, weight, offset)
    wide = functional.linear(x.float(), weight.float(), None if offset is None else offset.float())
    assert torch.equal(found, wide.half())


class Watched(nn.Module):
    """Notes the type that its product is computed in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def seen_types(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    seen: list[torch.dtype] = []

    def product(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        seen.append(dtype)
        return operator(*args, **kwargs)

    monkeypatch.setitem(half_products.PRODUCTS, torch.ops.aten.mm.default, product)
    with evaluating(model), evaluating(model):
        model(x)
    return seen


def test_models_in_float16_are_run_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(ROWS, 8)
    assert seen_types(Watched(torch.float16), x, monkeypatch) == [torch.float16]
    assert seen_types(Watched(torch.float16), x[:-1], monkeypatch) == []  # a token is multiplied sooner as it is
    assert seen_types(Watched(torch.bfloat16), x.bfloat16(), monkeypatch) == []
    assert seen_types(Watched(torch.float32), x.float(), monkeypatch) == []


def test_an_error_within_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Watched(torch.float16)
    with pytest.raises(RuntimeError), evaluating(model):
        model(random(ROWS, 9))
    assert seen_types(model, random(ROWS, 8), monkeypatch) == [torch.float16]
    assert model(random(ROWS, 8)).dtype is torch.float16


@pytest.mark.slow
def test_a_compiled_model_stays_compiled() -> None:
    """With `fullgraph` PyTorch ends in an error where it cannot."""
    model = nn.Linear(8, 8).half()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with evaluating(compiled), torch.no_grad():
        found = compiled(random(ROWS, 8))
        assert torch.allclose(found, model(random(ROWS, 8)), rtol=1e-3, atol=1e-3)
