"""What is loaded has a life: it is moved, cast, copied, saved, adapted, compiled and trained, in every scheme.

Each act is done to a model that a package, or quark itself, has loaded from a folder, and compared with the model that
was quantized in memory, with the float model, or with another way to the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import accelerate
import peft
import pytest
import torch
from torch import nn

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.errors import ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, dequantize, export_safetensors, import_model_from_safetensors
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.layers import QuantLayer
from quark.torch.layers.replace import quantized_layers
from quark.torch.layers.stored_codes.layer import StoredLayer
from quark.torch.plan import divides
from tests.models.denoisers import denoiser, output, step
from tests.models.families import family

DTYPE = torch.bfloat16
TARGETS = {"transformers": ["q_proj", "down_proj"], "diffusers": ["to_q", "proj_out"]}


def float_model(package: str) -> Any:
    if package == "diffusers":
        return denoiser("flux", DTYPE)
    model = family("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    for value in model.parameters():  # not its table of positions, which from_pretrained leaves in float32
        value.data = value.data.to(DTYPE)
    model.config.dtype = DTYPE
    return model


def batch(package: str, seed: int = 3, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    return step("flux", seed, dtype) if package == "diffusers" else {"input_ids": (torch.arange(16)[None] * seed) % 50}


class Case:
    """A scheme, and a reader of its folder: a package, or quark's own import into a float model of that package."""

    def __init__(self, reader: str, folder: Path, frozen: Any, tmp_path: Path) -> None:
        self.package = "transformers" if reader == "import" else reader
        self.reader, self.folder, self.frozen, self.tmp_path = reader, folder, frozen, tmp_path

    def load(self, **options: Any) -> Any:
        model = float_model(self.package)
        if self.reader == "import":
            return import_model_from_safetensors(model, self.folder)
        return type(model).from_pretrained(self.folder, **{"torch_dtype": DTYPE, **options}).eval()

    def run(self, model: Any, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        if self.package == "diffusers":
            return output(model, batch(self.package, dtype=dtype))
        with torch.no_grad():
            return cast(torch.Tensor, model(**batch(self.package)).logits)

    @property
    def expected(self) -> torch.Tensor:
        return self.run(self.frozen)

    def adapted(self, model: Any) -> list[nn.Parameter]:
        """The adapters that PEFT puts on a model, with values."""
        torch.manual_seed(0)
        asked = peft.LoraConfig(r=2, target_modules=TARGETS[self.package], init_lora_weights=False)
        peft.inject_adapter_in_model(asked, model)
        return [value for name, value in model.named_parameters() if "lora_" in name]


def stored(model: nn.Module) -> dict[str, StoredLayer]:
    found = {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer, StoredLayer)}
    assert found
    return found


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """What quantized layers hold, without adapters: codes, scales, zero points."""
    return {
        f"{name.replace('.base_layer', '')}.{leaf}": x.clone()
        for name, layer in stored(model).items()
        for leaf, x in layer.state_dict().items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == other[name].dtype and torch.equal(x.double(), other[name].double()), name


# Acts -----------------------------------------------------------------------------------------------------------------


def weights_look_float(case: Case) -> None:
    model = case.load()
    for name, layer in stored(model).items():
        float_layer: Any = float_model(case.package).get_submodule(name)
        weight = layer.weight
        assert weight.shape == float_layer.weight.shape and weight.dtype == layer.compute_dtype == DTYPE
        assert isinstance(weight, nn.Parameter) and not weight.requires_grad_().requires_grad
        assert torch.equal(weight + 0, layer.quantized_weight())
        return


def a_dtype_that_it_has_is_nothing_to_do(case: Case) -> None:
    model = case.load()
    before = {name: x.dtype for name, x in model.state_dict().items()}
    assert torch.equal(case.run(model.to(DTYPE).to("cpu").bfloat16()), case.expected)
    assert {name: x.dtype for name, x in model.state_dict().items()} == before


def another_dtype_is_that_of_computing(case: Case) -> None:
    model = case.load()
    before = held(model)
    for cast_to in (model.float, partial(model.to, torch.float32)):
        made = cast_to()
    codes = {name: x for name, x in held(made).items() if not name.endswith(".bias")}
    assert_same(codes, {name: x for name, x in before.items() if name in codes})
    assert {layer.compute_dtype for layer in stored(made).values()} == {torch.float32}
    y = case.run(made, torch.float32)
    assert y.dtype == torch.float32
    if case.reader != "import":
        expected = case.load(torch_dtype=torch.float32)
        for name, layer in stored(expected).items():
            assert torch.equal(made.get_submodule(name).quantized_weight(), layer.quantized_weight())


def a_cast_to_fp8_leaves_its_layers_alone(case: Case) -> None:
    model = case.load()
    before = held(model)
    for layer in stored(model).values():
        layer.to(torch.float8_e4m3fn)
    assert_same(held(model), before)
    assert torch.equal(case.run(model), case.expected)


def a_copy_is_its_own(case: Case) -> None:
    model = case.load()
    copied = copy.deepcopy(model)
    for layer in stored(copied).values():
        layer.weight.data *= 2.0
    assert torch.equal(case.run(model), case.expected)
    assert not torch.equal(case.run(copied), case.expected)
    if hasattr(model, "num_parameters"):
        assert copied.save_pretrained.args == (copied,)


def it_is_pickled(case: Case) -> None:
    torch.save(case.load(), case.tmp_path / "model.pt")
    model = torch.load(case.tmp_path / "model.pt", weights_only=False)
    assert torch.equal(case.run(model), case.expected)
    assert model.save_pretrained.args == (model,)


def its_state_goes_there_and_back(case: Case) -> None:
    model, other = case.load(), case.load()
    for layer in stored(other).values():
        layer.weight.data *= 2.0
    other.load_state_dict(model.state_dict())
    assert torch.equal(case.run(other), case.expected)
    name, layer = next(iter(stored(model).items()))
    if layer.codes("weight").dtype != DTYPE:
        with pytest.raises(RuntimeError, match="quark.torch.dequantize"):
            other.load_state_dict({f"{name}.weight": layer.quantized_weight()}, strict=False)


def adapters_compute_as_on_the_model_in_memory(case: Case) -> None:
    model, frozen = case.load(), copy.deepcopy(case.frozen)
    adapters = case.adapted(model)
    case.adapted(frozen)
    assert {x.dtype for x in adapters} == {DTYPE}
    assert torch.equal(case.run(model), case.run(frozen))


def adapters_train_and_nothing_else(case: Case) -> None:
    model = case.load()
    before, adapters = held(model), case.adapted(model)
    for name, value in model.named_parameters():
        value.requires_grad_("lora_" in name)
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    y: Any = model(**batch(case.package))
    y = y.logits if case.package == "transformers" else y[0] if isinstance(y, tuple) else y.sample
    y.float().square().mean().backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in adapters)
    optimizer.step()
    assert_same(held(model), before)


def what_is_merged_is_quantized_again(case: Case) -> None:
    """Under scales that the spec finds for the sum, which is rounded to the dtype of the model."""
    model = case.load()
    case.adapted(model)
    merged = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    for module in cast(list[Any], merged):
        layer = module.get_base_layer()
        if not isinstance(layer, StoredLayer):
            continue
        quantizer = cast(StoredTensor, layer.weight_quantizer)
        wanted = layer.quantized_weight() + module.get_delta_weight("default").detach()
        params = None if quantizer.spec.is_cast else tensor_qparams(wanted, quantizer.spec)
        module.merge()
        values, steps = layer.quantized_weight(), fake_quantize(wanted.contiguous(), params, quantizer.spec)
        # Scales are stored in the dtype of the model, whose rounding moves a value by 2^-8 of it, and to a neighbour.
        near = (values - steps).float().abs() <= 2**-6 * wanted.float().abs().amax()
        assert near.float().mean() > 0.98
        assert (values - wanted).float().square().mean() <= 2 * (steps - wanted).float().square().mean() + 1e-12


def numbers_of_parameters_are_those_of_the_float_model(case: Case) -> None:
    model, plain = case.load(), float_model(case.package)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert set(model._ddp_params_and_buffers_to_ignore) >= set(held(model))


def layers_compile_to_one_graph(case: Case) -> None:
    layer: Any = next(iter(stored(case.load()).values()))
    x = torch.randn(3, layer.in_features, dtype=DTYPE)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def it_becomes_float(case: Case) -> None:
    model = case.load()
    weights = {name: layer.quantized_weight() for name, layer in stored(model).items()}
    made: Any = dequantize(model)
    assert not any(isinstance(module, QuantLayer) for module in made.modules())
    for name, value in weights.items():
        assert torch.equal(made.get_submodule(name).weight, value)
    assert copy.deepcopy(made).to(torch.float32).dtype == torch.float32
    made.save_pretrained(case.tmp_path / "float")
    again = type(made).from_pretrained(case.tmp_path / "float", torch_dtype=DTYPE).eval()
    assert not any(isinstance(module, QuantLayer) for module in again.modules())
    assert torch.equal(case.run(again), case.run(made))


def it_is_saved_again(case: Case) -> None:
    case.load().save_pretrained(case.tmp_path / "again")
    case.folder = case.tmp_path / "again"
    assert torch.equal(case.run(case.load()), case.expected)


def its_tensors_are_moved_one_by_one(case: Case) -> None:
    """accelerate moves codes to the meta device after each forward, and back before the next."""
    model = case.load()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(case.run(model), case.expected)
    there, after = case.load().state_dict(), model.state_dict()
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in there.items()}


def it_computes_under_autocast(case: Case) -> None:
    model = case.load()
    with torch.autocast("cpu", dtype=DTYPE):
        assert case.run(model).isfinite().all()


ACTS: tuple[Callable[[Case], None], ...] = (
    weights_look_float,
    a_dtype_that_it_has_is_nothing_to_do,
    another_dtype_is_that_of_computing,
    a_cast_to_fp8_leaves_its_layers_alone,
    a_copy_is_its_own,
    it_is_pickled,
    its_state_goes_there_and_back,
    adapters_compute_as_on_the_model_in_memory,
    adapters_train_and_nothing_else,
    what_is_merged_is_quantized_again,
    numbers_of_parameters_are_those_of_the_float_model,
    layers_compile_to_one_graph,
    it_becomes_float,
    it_is_saved_again,
    its_tensors_are_moved_one_by_one,
    it_computes_under_autocast,
)
EVERYDAY = {("transformers", "uint4_wo_32"), ("diffusers", "ptpc_fp8")}
EVERY = [
    pytest.param(
        reader, scheme, act, id=f"{reader} {scheme} {act.__name__}",
        marks=() if (reader, scheme) in EVERYDAY else pytest.mark.slow,
    )
    for reader in ("transformers", "diffusers", "import")
    for scheme in SCHEMES
    for act in ACTS
]  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Any] | None]:
    """Package and scheme -> the folder and the frozen model; None where the groups of the scheme do not divide it."""

    @cache
    def made(package: str, scheme: str) -> tuple[Path, Any] | None:
        model, config = float_model(package), LLMTemplate.get("auto").get_config(scheme)
        quantizer, batches = ModelQuantizer(config), [batch(package, seed) for seed in (1, 2)]
        if not divides(config, model):
            with pytest.raises(ShapeError, match="Possible"):
                quantizer.quantize_model(model, batches)
            return None
        frozen = quantizer.freeze(quantizer.quantize_model(model, batches))
        folder = tmp_path_factory.mktemp(f"{package}-{scheme}") / "quantized"
        export_safetensors(frozen, folder)
        return folder, frozen

    return made


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(("reader", "scheme", "act"), EVERY)
def test_a_loaded_model_lives(
    quantized: Callable[[str, str], tuple[Path, Any] | None],
    reader: str,
    scheme: str,
    act: Callable[[Case], None],
    tmp_path: Path,
) -> None:
    found = quantized("transformers" if reader == "import" else reader, scheme)
    if found is not None:
        act(Case(reader, *found, tmp_path))
