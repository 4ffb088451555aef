"""What is loaded has a life: it is moved, cast, copied, saved, adapted, compiled and trained, in every scheme.

Each act is done to a model that a package, or quark itself, has loaded from a folder, and compared with the model that
was quantized in memory, with the float model, or with another way to the same values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import accelerate
import peft
import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.errors import NotSupportedError
from quark.torch import dequantize
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.loading import StoredTensor
from quark.torch.layers import QuantLayer
from quark.torch.layers.stored_codes.layer import StoredLayer
from tests.models.loaded import DTYPE, READERS, Case, assert_same, batch, held, quantized, stored

__all__ = ["quantized"]


def weights_look_float(case: Case) -> None:
    model = case.network(case.load())
    for name, layer in stored(model).items():
        float_layer: Any = case.float_model().get_submodule(name)
        weight = layer.weight
        assert weight.shape == float_layer.weight.shape and weight.dtype == layer.compute_dtype == DTYPE
        assert isinstance(weight, torch.nn.Parameter) and not weight.requires_grad_().requires_grad
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
        expected = case.load(torch.float32)
        for name, layer in stored(expected).items():
            assert torch.equal(made.get_submodule(name).quantized_weight(), layer.quantized_weight())


def a_cast_to_fp8_leaves_its_layers_alone(case: Case) -> None:
    model = case.load()
    before = held(model)
    for layer in stored(model).values():
        layer.to(torch.float8_e4m3fn)
    assert_same(held(model), before)
    assert torch.equal(case.run(model), case.expected)
    if case.kind == "denoiser":
        model.enable_layerwise_casting(torch.float8_e4m3fn, DTYPE)
        y, expected = case.run(model).float(), case.expected.float()
        assert (y - expected).norm() < 0.1 * expected.norm()
        quantizers = {name: x for name, x in before.items() if "quantizer" in name}
        assert_same({name: x for name, x in held(model).items() if name in quantizers}, quantizers)


def a_cast_of_all_floats_lets_it_compute(case: Case) -> None:
    """As `peft.prepare_model_for_kbit_training` does it, parameter by parameter; FP8 codes are floats, too."""
    model = case.load()
    weights = {name: layer.quantized_weight() for name, layer in stored(model).items()}
    for value in model.parameters():
        if value.is_floating_point():
            value.data = value.data.to(torch.float32)
    for name, layer in stored(model).items():
        assert torch.equal(layer.quantized_weight(), weights[name])
    y, expected = case.run(model, torch.float32), case.expected.float()
    assert y.dtype == torch.float32
    assert (y - expected).norm() < 0.2 * expected.norm()  # norms and inputs are not rounded: codes of inputs move


def a_copy_is_its_own(case: Case) -> None:
    model = case.load()
    copied = copy.deepcopy(model)
    for layer in stored(copied).values():
        layer.weight.data *= 2.0
    assert torch.equal(case.run(model), case.expected)
    assert not torch.equal(case.run(copied), case.expected)
    network = case.network(copied)
    if hasattr(network, "num_parameters"):
        assert network.save_pretrained.args == (network,)


def it_is_pickled(case: Case) -> None:
    torch.save(case.load(), case.tmp_path / "model.pt")
    model = torch.load(case.tmp_path / "model.pt", weights_only=False)
    assert torch.equal(case.run(model), case.expected)
    network = case.network(model)
    assert network.save_pretrained.args == (network,)


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


def a_float_network_takes_its_values_alone(case: Case) -> None:
    """As diffusers makes a ControlNet of the parts of a network, under all names or those that are there."""
    network, plain = case.network(case.load()), case.float_model()
    for state in (network.state_dict(), copy.deepcopy(network.state_dict())):
        for strict in (True, False):
            with pytest.raises(NotSupportedError, match="quark.torch.dequantize"):
                plain.load_state_dict(state, strict=strict)
    weights = {name: layer.quantized_weight() for name, layer in stored(network).items()}
    made: Any = dequantize(copy.deepcopy(network))
    plain = copy.deepcopy(made)
    for value in plain.parameters():
        value.data.zero_()
    plain.load_state_dict(made.state_dict())
    assert all(torch.equal(plain.get_submodule(name).weight, weight) for name, weight in weights.items())


def floats_in_the_place_of_codes_are_its_weights(case: Case) -> None:
    """For one call, with their gradients."""
    layer: Any = next(iter(stored(case.load()).values()))
    x, given = torch.randn(3, layer.in_features, dtype=DTYPE), layer.quantized_weight().detach().clone()
    y = torch.func.functional_call(layer, {"weight": given.requires_grad_()}, (x,))
    assert torch.equal(y, layer(x))
    y.float().sum().backward()
    assert given.grad is not None and given.grad.any()
    with pytest.raises(NotSupportedError, match="quark.torch.dequantize"):
        layer.requires_grad_()


def a_trace_computes_or_names_the_way(case: Case) -> None:
    layer: Any = next(iter(stored(case.load()).values()))
    x, other = torch.randn(2, 3, layer.in_features, dtype=DTYPE)
    with torch.no_grad():
        try:
            with warnings.catch_warnings():
                for kind in (DeprecationWarning, torch.jit.TracerWarning):  # of torch.jit; sizes become constants
                    warnings.simplefilter("ignore", kind)
                traced = torch.jit.trace(layer, x, check_trace=False)
        except NotSupportedError as error:
            assert "torch.export" in str(error)
        else:
            assert torch.equal(traced(other), layer(other))


def adapters_compute_as_on_the_model_in_memory(case: Case) -> None:
    network, frozen = case.network(case.load()), copy.deepcopy(case.frozen)
    adapters = case.adapted(network)
    case.adapted(frozen)
    assert {x.dtype for x in adapters} == {DTYPE}
    with torch.no_grad():
        assert torch.equal(case.call(network), case.call(frozen))


def adapters_train_and_nothing_else(case: Case) -> None:
    network = case.network(case.load())
    before, adapters = held(network), case.adapted(network)
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for x, gradient in zip(adapters, case.gradients(network, adapters), strict=True):
        x.grad = gradient
    optimizer.step()
    assert_same(held(network), before)


def its_activations_are_computed_again(case: Case) -> None:
    """Under gradient checkpointing."""
    network = case.network(case.load()).train()
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    adapters = case.adapted(network)
    wanted = case.gradients(network, adapters)
    on = "enable_gradient_checkpointing" if case.kind == "denoiser" else "gradient_checkpointing_enable"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # another name is to come
        getattr(network, on)()
        assert network.is_gradient_checkpointing
    for found, expected in zip(case.gradients(network, adapters), wanted, strict=True):
        assert torch.equal(found, expected)


def it_trains_on_several_processes(case: Case) -> None:
    """Of which there is one here: DDP sends all that it holds around."""
    network = case.network(case.load())
    adapters = case.adapted(network)
    wanted = case.gradients(network, adapters)
    distributed.init_process_group("gloo", init_method=f"file://{case.tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for found, expected in zip(case.gradients(DistributedDataParallel(network), adapters), wanted, strict=True):
            assert torch.equal(found, expected)
    finally:
        distributed.destroy_process_group()


def the_trainer_trains_its_adapters(case: Case) -> None:
    if case.reader not in ("transformers", "mixture"):
        return
    from transformers import Trainer, TrainingArguments

    network = case.load()
    before, adapters = held(network), case.adapted(network)
    values = [x.detach().clone() for x in adapters]
    network._hf_peft_config_loaded = True  # as `add_adapter` notes it
    ids = batch(case.kind)["input_ids"][0]
    asked = TrainingArguments(str(case.tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no",
                              disable_tqdm=True, learning_rate=0.1, optim="sgd")  # fmt: skip
    Trainer(network, asked, train_dataset=[{"input_ids": ids, "labels": ids}]).train()
    assert any(not torch.equal(x, value) for x, value in zip(adapters, values, strict=True))
    assert_same(held(network), before)


def what_is_merged_is_quantized_again(case: Case) -> None:
    """Under scales that the spec finds for the sum, which is rounded to the dtype of the model."""
    model = case.network(case.load())
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
    model, plain = case.network(case.load()), case.float_model()
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert set(model._ddp_params_and_buffers_to_ignore) >= set(held(model))


def layers_compile_to_one_graph(case: Case) -> None:
    layer: Any = next(iter(stored(case.load()).values()))
    x = torch.randn(3, layer.in_features, dtype=DTYPE)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def the_whole_compiles_to_one_graph(case: Case) -> None:
    network = case.network(case.load())
    layer: Any = next(iter(stored(network).values()))
    x = torch.randn(3, layer.in_features, dtype=DTYPE)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))
        if case.kind == "mixture":
            return  # which expert a token reads is asked of the values
        expected = case.call(network)
        assert torch.equal(case.call(torch.compile(network, fullgraph=True, backend="eager")), expected)
        given = batch(case.kind) | {"return_dict": False} | ({"use_cache": False} if case.kind == "dense" else {})
        assert torch.equal(torch.export.export(network, (), given).module()(**given)[0], expected)


def it_becomes_float(case: Case) -> None:
    model = case.load()
    weights = {name: layer.quantized_weight() for name, layer in stored(model).items()}
    made: Any = dequantize(model)
    assert not any(isinstance(module, QuantLayer) for module in made.modules())
    for name, value in weights.items():
        assert torch.equal(made.get_submodule(name).weight, value)
    assert next(copy.deepcopy(made).to(torch.float32).parameters()).dtype == torch.float32
    made.save_pretrained(str(case.tmp_path / "float"))
    again = case.read(case.tmp_path / "float")
    assert not any(isinstance(module, QuantLayer) for module in again.modules())
    assert torch.equal(case.run(again), case.run(made))


def it_is_saved_again(case: Case) -> None:
    case.load().save_pretrained(str(case.tmp_path / "again"))
    expected, case.folder = case.expected, case.tmp_path / "again"
    assert torch.equal(case.run(case.load()), expected)


def its_tensors_are_moved_one_by_one(case: Case) -> None:
    """accelerate moves codes to the meta device after each forward, and back before the next; or to a disk."""
    for offload in (accelerate.cpu_offload, partial(accelerate.disk_offload, offload_dir=case.tmp_path / "disk")):
        network = case.network(case.load())
        offload(network, execution_device=torch.device("cpu"))
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(case.call(network), case.call(case.frozen))
        there, after = case.network(case.load()).state_dict(), network.state_dict()
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
    a_cast_of_all_floats_lets_it_compute,
    a_copy_is_its_own,
    it_is_pickled,
    its_state_goes_there_and_back,
    a_float_network_takes_its_values_alone,
    floats_in_the_place_of_codes_are_its_weights,
    a_trace_computes_or_names_the_way,
    adapters_compute_as_on_the_model_in_memory,
    adapters_train_and_nothing_else,
    its_activations_are_computed_again,
    it_trains_on_several_processes,
    the_trainer_trains_its_adapters,
    what_is_merged_is_quantized_again,
    numbers_of_parameters_are_those_of_the_float_model,
    layers_compile_to_one_graph,
    the_whole_compiles_to_one_graph,
    it_becomes_float,
    it_is_saved_again,
    its_tensors_are_moved_one_by_one,
    it_computes_under_autocast,
)
EVERYDAY = {
    ("transformers", "uint4_wo_32"),
    ("diffusers", "ptpc_fp8"),
    ("mixture", "int8_wo"),
    ("sentence_transformers", "fp8_wo"),
}
SECONDS = {the_whole_compiles_to_one_graph, the_trainer_trains_its_adapters}
"""Acts that take seconds each."""
EVERY = [
    pytest.param(
        reader, scheme, act, id=f"{reader} {scheme} {act.__name__}",
        marks=() if (reader, scheme) in EVERYDAY and act not in SECONDS else pytest.mark.slow,
    )
    for reader in READERS
    for scheme in SCHEMES
    for act in ACTS
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(("reader", "scheme", "act"), EVERY)
def test_a_loaded_model_lives(
    quantized: Callable[[str, str], tuple[Path, Any] | None],
    reader: str,
    scheme: str,
    act: Callable[[Case], None],
    tmp_path: Path,
) -> None:
    if reader == "sentence_transformers":
        pytest.importorskip("sentence_transformers")
    found = quantized(READERS[reader], scheme)
    if found is not None:
        act(Case(reader, *found, tmp_path))
