"""Python's garbage collection is off where libraries load, and as it was behind that; names that wait are right."""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quark import cli
from quark.base import loading
from quark.base.loading import Later, without_collection


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def test_collection_is_off_inside() -> None:
    with pytest.raises(ImportError), without_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("triton", [False, True])
def test_the_program_leaves_no_garbage_to_be_looked_for_at_its_end(
    triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Except beside a module that would take what is left for leaks, and print so.
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", None)
    if not triton:
        del sys.modules["triton._C.libtriton"]
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    at_exit: list[Callable[..., Any]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr("sys.argv", ["quark", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    for function in at_exit:
        function()
    assert len(frozen) == (not triton)


@pytest.fixture
def seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The function that gives a name of a module which is not loaded, and nobody has."""
    text = "class Shard:\n    def __init__(self, dim=0): self.dim = dim\n\ndef nothing(): return 0\n"
    (tmp_path / "seldom_used.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "seldom_used", raising=False)
    return lambda name: Later("seldom_used", lambda: getattr(importlib.import_module("seldom_used"), name), name)


def test_a_name_waits_while_it_is_only_passed_on(seldom: Callable[[str], Any]) -> None:
    shard = seldom("Shard")
    placed = shard(1)
    annotation = shard | None, shard[int], None | shard
    assert shard and placed and annotation and shard != 3 and placed != "x"
    assert not isinstance(3, shard) and not issubclass(int, shard)
    assert "seldom_used" not in sys.modules


def test_a_name_is_what_it_stands_for_when_it_is_used(seldom: Callable[[str], Any]) -> None:
    shard, nothing = seldom("Shard"), seldom("nothing")
    placed = shard(1)
    assert placed.dim == 1 and placed is not shard(1)
    real = importlib.import_module("seldom_used").Shard
    assert shard == real and hash(shard) == hash(real) and isinstance(real(), shard) and type(shard(2)) is real
    assert nothing() == 0 and not nothing()

    class Wide(shard):  # type: ignore[misc, valid-type]
        pass

    assert issubclass(Wide, real) and issubclass(Wide, shard) and Wide(4).dim == 4


def test_what_a_function_gives_is_never_taken_for_true(seldom: Callable[[str], Any]) -> None:
    assert not seldom("nothing")()


def test_only_a_command_of_its_own_loads_lightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(loading, "_alone", False)
    with loading.lightly():
        assert "transformers" not in sys.modules and builtins.__import__.__module__ == "builtins"


@pytest.mark.slow
def test_sizes_that_are_numbers_are_answered_as_torch_does() -> None:
    real, sizes = importlib.import_module(loading.SYMBOLS), loading._Sizes(loading.SYMBOLS)
    for name in loading._ITSELF:
        values = [3] if name == "guard_int" else [True, False]
        assert [getattr(sizes, name)(value) for value in values] == [getattr(real, name)(value) for value in values]
    assert sizes.guard_scalar(3) == real.guard_scalar(3) and sizes.guarding_hint_or_throw(3) == 3
    assert sizes.has_guarding_hint(3) == real.has_guarding_hint(3) and sizes.is_nested_int(3) == real.is_nested_int(3)
    for values in ((True,), (False,), (True, False, True), (True, True), (False, False)):
        assert sizes.sym_and(*values) == real.sym_and(*values) and sizes.sym_or(*values) == real.sym_or(*values)
    for pair in ((3, 3), (3, 4), ((2, 3), (2, 3)), ((2, 3), [2, 4]), ((2, 3), (2, 3, 1)), ((2, (3,)), (2, (3,)))):
        assert sizes.sym_eq(*pair) == real.sym_eq(*pair)
    unknown = real.ShapeEnv().create_unbacked_symint()
    assert sizes.guard_or_true(unknown == 3) and not sizes.guard_or_false(unknown == 3)
    assert sizes.free_unbacked_symbols(unknown) == real.free_unbacked_symbols(unknown)


@pytest.mark.slow
def test_what_was_loaded_lightly_is_whole_when_it_is_used() -> None:
    code = """
import sys
from quark.base import loading
loading.own_process()
with loading.lightly():
    import transformers
    from transformers import AutoConfig
    assert loading.is_put_off(transformers)
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers import LlamaConfig
    import torch
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        assert LlamaForCausalLM(LlamaConfig(**sizes))(torch.arange(6)[None]).logits.shape == (1, 6, 32)
    seldom = {"torch._dynamo", "scipy.optimize", "torch.distributed.tensor", "accelerate", "sympy"}
    assert not seldom & {*sys.modules}
import torch, transformers
from transformers import AutoModelForCausalLM, GenerationConfig
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
tokens = torch.arange(6)[None]
out = model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
loading.complete()
assert not [name for name, value in vars(transformers.masking_utils).items() if type(value) is loading.Later]
compiled = torch.compile(model, backend="eager")(tokens).logits
torch.testing.assert_close(compiled, model(tokens).logits)
assert transformers.LlamaForCausalLM is LlamaForCausalLM and transformers.BertModel
assert "torch._dynamo" in sys.modules and torch._dynamo.disable.__module__.startswith("torch._dynamo")
from torch.distributed.tensor import DTensor
from transformers import core_model_loading
assert not isinstance(tokens, DTensor)
print(tuple(out.shape))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(1, 8)", done.stderr
