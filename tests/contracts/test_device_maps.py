"""Models that a `device_map` has spread over devices, the CPU and the disk are quantized to the bits of the CPU.

Where they lie stays as it is: what accelerate keeps elsewhere is on the meta device between forwards, before and after,
and files that it reads are never written.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.schemes import SCHEMES
from quark.core.solvers.columns import columns
from quark.errors import CalibrationError, ConfigError, FormatError, NotSupportedError
from quark.torch import (
    ModelQuantizer,
    QuaRotConfig,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.checkpoint.dequantize import dequantize
from quark.torch.config.tensor.enums import QuantFlow
from quark.torch.model.blocks.offloading import offloading_hooks, onloaded
from tests.contracts.test_gpu import (
    BY_NAME,
    Result,
    batches,
    config_of,
    quantized,
    require_same,
)
from tests.models.architectures import build, token_ids
from tests.models.torch_zoo import tiny_llama
from tests.pretended_gpu import PretendedGpu, on_host

accelerate = pytest.importorskip("accelerate")
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


@pytest.fixture(autouse=True)
def no_compiled_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_library", lambda: None)


def placed(*devices: str) -> Callable[[Any, Path], Any]:
    """The parts of a Llama, each on its device."""

    def place(model: Any, folder: Path) -> Any:
        main = next((device for device in devices if device.startswith("cuda")), "cpu")
        options = {"offload_dir": folder / "offload"} if "disk" in devices else {}
        places = dict(zip(PARTS, devices, strict=True))
        return accelerate.dispatch_model(model, places, main_device=main, **options)

    return place


def whole_on_cpu(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, "cuda:0" if torch.cuda.is_available() else "cpu")


def whole_on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, folder / "offload", "cuda:0" if torch.cuda.is_available() else "cpu")


PLACES = {
    "two devices": placed("cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:1"),
    "two devices and the CPU": placed("cuda:0", "cuda:0", "cuda:0", "cpu", "cuda:1", "cuda:1"),
    "its ends on the CPU": placed("cpu", "cuda:0", "cuda:1", "cpu", "cpu", "cpu"),
    "all on the CPU": whole_on_cpu,
}
ON_DISK = {
    "a device and the disk": placed("cuda:0", "cuda:0", "disk", "cuda:0", "cpu", "disk"),
    "the CPU and the disk": placed("cpu", "cpu", "disk", "cpu", "cpu", "disk"),
    "all on disk": whole_on_disk,
}
WHOLE = ("imatrix", "rotation", "quarot", "svdquant", "distillation")
"""Algorithms that need the whole model in memory."""


def result_of(model: Any) -> Result:
    """Its state, wherever that lies, and its logits for ids on the CPU."""
    where = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    with torch.no_grad():
        logits = model(token_ids(seed=9).to(where)).logits
    with onloaded(model):
        return on_host(model.state_dict()), on_host(logits)


def elsewhere(model: nn.Module) -> set[str]:
    """Parameters on the meta device: those that accelerate keeps."""
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def in_place(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Result, Result]]]:
    """Run on the CPU and where a device map says; the model there, and both results."""

    def run(
        place: Callable[[Any, Path], Any], work: Callable[[Any], Any], architecture: str = "llama", wide: bool = False
    ) -> Any:
        make = tiny_llama if wide else partial(build, architecture)
        expected = result_of(work(make()))
        with PretendedGpu(count=2):
            model = place(make(), tmp_path)
            before, files = elsewhere(model), files_in(tmp_path)
            model = work(model)
            # Branches of low rank, and experts of their own, are there as well; codes have the names of the weights.
            assert elsewhere(model) >= {name for name in before if name in dict(model.named_parameters())}
            assert files_in(tmp_path) == files
            result = result_of(model)
        require_same(expected, result)
        return model

    yield run


def run_of(scheme: str, *algorithms: str, data: list[Any] | None = None, **options: Any) -> Callable[[Any], Any]:
    def work(model: Any) -> Any:
        config = config_of(scheme, *algorithms)
        for name, value in options.items():
            setattr(config, name, value)
        return quantized(model, config, data or batches())

    return work


def scheme_of(algorithm: str | None) -> str:
    """A scheme with static inputs, but for what learns codes of few bits."""
    return "int4_wo_32" if algorithm == "distillation" else "int8"


OFTEN = {(None, "two devices and the CPU"), ("quarot", "two devices"), ("gptq", "all on the CPU")}
FEW = (None, "gptq", "awq", "quarot", "distillation")
EVERY = [(n, place) for place in PLACES for n in ((None, *BY_NAME) if "two devices" in place else FEW)]


@pytest.mark.parametrize(
    "name, place", [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_every_algorithm_where_the_model_lies(name: str | None, place: str, in_place: Any) -> None:
    in_place(PLACES[place], run_of(scheme_of(name), *([name] if name else [])))


AT_FILES = [
    (n, p) for p in ON_DISK for n in (None, *BY_NAME) if n in FEW[:2] or (p == "all on disk" and n not in WHOLE)
]


@pytest.mark.parametrize(
    "name, place",
    [
        case if case == ("gptq", "the CPU and the disk") else pytest.param(*case, marks=pytest.mark.slow)
        for case in AT_FILES
    ],
)
def test_every_algorithm_that_works_block_by_block_from_disk(name: str | None, place: str, in_place: Any) -> None:
    in_place(ON_DISK[place], run_of("int8", *([name] if name else [])))


@pytest.mark.parametrize(
    "name", [name if name == "quarot" else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE[1:]]
)
def test_what_needs_all_weights_at_once_is_refused_for_a_model_on_disk(name: str, tmp_path: Path) -> None:
    model = whole_on_disk(build("llama"), tmp_path)
    model.forward = None  # it is known before any forward
    with pytest.raises(NotSupportedError, match=r"needs the whole model in memory.*Possible: a device_map"):
        ModelQuantizer(config_of(scheme_of(name), name)).quantize_model(model, batches())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, in_place: Any) -> None:
    in_place(PLACES["two devices and the CPU"], run_of(scheme), wide=True)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt2", "bert", "phi3", "falcon", "gemma2", "opt"])
@pytest.mark.parametrize("scheme, name, place", [("int8", None, whole_on_cpu), ("uint4_wo_32", "gptq", whole_on_disk)])
def test_architectures(architecture: str, scheme: str, name: str | None, place: Any, in_place: Any) -> None:
    in_place(place, run_of(scheme, *([name] if name else [])), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_block_by_block(place: str, in_place: Any) -> None:
    in_place(PLACES[place], run_of("int8", "gptq", quant_flow=QuantFlow.per_block))


LEARNED = {"trainable": True, "train_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, options",
    [
        ("its ends on the CPU", {"r3": True}),
        ("all on the CPU", {"r4": True}),
        ("two devices and the CPU", LEARNED | {"r1": False}),
        ("two devices", LEARNED),
    ],
)
def test_rotations_of_all_kinds(place: str, options: dict[str, Any], in_place: Any) -> None:
    def work(model: Any) -> Any:
        config = config_of("int8")
        config.algo_config = [QuaRotConfig(**options)]
        return quantized(model, config, batches())

    in_place(PLACES[place], work)


@pytest.mark.slow
def test_quantized_embeddings_heads_caches_and_attention(in_place: Any) -> None:
    def work(model: Any) -> Any:
        config = config_of("fp8", "gptq", kv_cache_scheme="fp8", attention_scheme="fp8")
        config.exclude = []
        config.layer_quant_config["*embed_tokens"] = config_of("int8_wo").global_quant_config
        return quantized(model, config, batches())

    for place in PLACES.values():
        in_place(place, work)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_data_may_be_on_any_device(device: str, in_place: Any) -> None:
    def work(model: Any) -> Any:
        there = [x.to(device if torch.cuda.is_available() else "cpu") for x in batches()]
        return quantized(model, config_of("int8", "awq"), there)

    for place in PLACES.values():
        in_place(place, work)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_sensitivity_is_measured(place: str, tmp_path: Path) -> None:
    def losses(model: Any) -> Any:
        return measure_sensitivity(model, batches(), ["int8_wo", "int4_wo_32"])

    expected = losses(build("llama"))
    with PretendedGpu(count=2):
        found = losses(PLACES[place](build("llama"), tmp_path))
    assert [group.losses for group in found.groups] == [group.losses for group in expected.groups]


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=() if p == "two devices and the CPU" else pytest.mark.slow) for p in (*PLACES, *ON_DISK)],
)
def test_folders_and_files_are_written_and_loaded(place: str, tmp_path: Path) -> None:
    put, config = {**PLACES, **ON_DISK}[place], config_of("uint4_wo_32")

    def written(model: Any, folder: Path) -> Any:
        export_safetensors(model, folder / "folder")
        (folder / "params").mkdir()
        save_params(model, "m", export_dir=folder / "params")
        return model

    def loaded(new: Callable[[], Any], folder: Path) -> list[Result]:
        files = {"json_path": folder / "params" / "m.json", "safetensors_path": folder / "params" / "m.safetensors"}
        models = import_model_from_safetensors(new(), folder / "folder"), load_params(new(), **files)
        return [result_of(model) for model in models]

    written(quantized(build("llama"), config, batches()), tmp_path / "cpu")
    with PretendedGpu(count=2):
        model = quantized(put(build("llama"), tmp_path / "offloaded"), config, batches())
        before = elsewhere(model)
        written(model, tmp_path / "there")
        assert files_in(tmp_path / "there") == files_in(tmp_path / "cpu") and elsewhere(model) == before
        there = iter(range(9))
        results = loaded(lambda: put(build("llama"), tmp_path / str(next(there))), tmp_path / "cpu")
    for expected, result in zip(loaded(lambda: build("llama"), tmp_path / "cpu"), results, strict=True):
        require_same(expected, result)


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    model = accelerate.cpu_offload(build("llama"), "cpu")
    model = quantized(model, config_of("int8"), batches())
    with pytest.raises(NotSupportedError, match=r"export_onnx: model\.embed_tokens lies on the CPU or on disk"):
        export_onnx(model, tmp_path / "onnx", token_ids())
    config = config_of("int8")
    config.quant_flow, config.gpu_resident_blocks = QuantFlow.per_block, 1
    with pytest.raises(ConfigError, match="gpu_resident_blocks does not apply"):
        ModelQuantizer(config).quantize_model(accelerate.cpu_offload(build("llama"), "cpu"), batches())
    model = whole_on_disk(build("llama"), tmp_path)
    for hook in [hook for module in model.modules() for hook in offloading_hooks(module)]:
        hook.weights_map.dataset.save_folder = None
    with pytest.raises(NotSupportedError, match="no folder to which .* Possible: .* offload_folder"):
        ModelQuantizer(config_of("int8")).quantize_model(model, batches())


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, *ON_DISK])
def test_a_quantized_model_becomes_a_float_one(place: str, in_place: Any) -> None:
    def work(model: Any) -> Any:
        return dequantize(quantized(model, config_of("int8"), batches()))

    in_place({**PLACES, **ON_DISK}[place], work)


def test_one_weight_in_two_places_is_refused() -> None:
    model = build("gpt2")
    places = {f"transformer.{name}": "cuda:0" for name, _ in model.transformer.named_children()}
    with PretendedGpu(), pytest.raises(NotSupportedError, match=r"lm_head\.weight and .*wte\.weight share one weight"):
        quantized(accelerate.dispatch_model(model, places | {"lm_head": "cpu"}), config_of("int8"), batches())


@pytest.mark.parametrize("place", ["all on the CPU", "all on disk"])
def test_a_model_is_what_it_was_after_an_error(place: str, tmp_path: Path) -> None:
    model = {**PLACES, **ON_DISK}[place](build("mixtral"), tmp_path)
    expected, kinds = copy.deepcopy(result_of(model)), [type(module) for module in model.modules()]
    broken = [*batches(2), torch.full((1, 4), 1 << 20)]
    for algorithms in ((), ("gptq",)):
        with pytest.raises(CalibrationError):
            ModelQuantizer(config_of("int8", *algorithms)).quantize_model(model, broken)
        assert [type(module) for module in model.modules()] == kinds
        assert all(parameter.is_meta for parameter in model.parameters())
        require_same(expected, result_of(model))
    twin = copy.deepcopy(model)
    quantized(model, config_of("int8"), batches())
    require_same(expected, result_of(twin))
    removed = accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert not elsewhere(removed)
    require_same(result_of(quantized(build("mixtral"), config_of("int8"), batches())), result_of(removed))


def test_weights_on_disk_stay_there(tmp_path: Path) -> None:
    """What they become is mapped from a file as well, and that has no name."""
    model = quantized(whole_on_disk(build("llama"), tmp_path), config_of("int8", "gptq"), batches())
    held = [value for m in model.modules() for hook in offloading_hooks(m) for value in hook.weights_map.values()]
    assert len(held) == len([*model.parameters()])
    spans = [span for span in map(_mapped_span, Path("/proc/self/maps").read_text().splitlines()) if span]
    assert all(any(value.data_ptr() in span for span in spans) for value in held)
    kept = {file.stem for file in (tmp_path / "offload").iterdir()}
    assert kept == {"index", *(name for name, _ in build("llama").named_parameters())}


def _mapped_span(line: str) -> range | None:
    """The addresses at which a file of the offload folder is mapped."""
    first, _, second = line.split()[0].partition("-")
    return range(int(first, 16), int(second, 16)) if "/offload/" in line else None


@pytest.mark.slow
def test_a_device_holds_what_it_holds_block_by_block() -> None:
    def peak(scheme: str, *algorithms: str, offloaded: bool) -> int:
        model = tiny_llama(num_hidden_layers=4, hidden_size=128, intermediate_size=512, vocab_size=64)
        config = config_of(scheme, *algorithms)
        config.quant_flow = QuantFlow.standard if offloaded else QuantFlow.per_block
        gc.collect()
        with PretendedGpu() as gpu:
            before = gpu.meter.alive()
            gpu.meter.reset()
            quantized(accelerate.cpu_offload(model, "cuda:0") if offloaded else model, config, batches(1))
            return gpu.meter.peak() - before

    for case in (("int8",), ("int8", "gptq"), ("uint4_wo_32", "awq")):
        assert peak(*case, offloaded=True) < 1.1 * peak(*case, offloaded=False)


def test_a_damaged_offload_folder_is_named(tmp_path: Path) -> None:
    model = whole_on_disk(build("llama"), tmp_path)
    file = tmp_path / "offload" / "model.norm.weight.dat"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FormatError, match=r"model\.norm\.weight\.dat does not hold"):
        ModelQuantizer(config_of("int8")).quantize_model(model, batches())
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_folder_loaded_by_transformers_with_a_device_map(architecture: str, tmp_path: Path) -> None:
    """Its weights on disk are those of the folder itself, but for fused experts, which transformers copies."""
    from transformers import AutoModelForCausalLM

    build(architecture).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    blocks = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    inner = blocks.partition(".")[0]
    places = {f"{inner}.{name}": "cpu" for name, _ in getattr(model, inner).named_children()} | {"lm_head": "cpu"}
    places = {name: place for name, place in places.items() if name != blocks}
    places |= {f"{blocks}.0": "cpu", f"{blocks}.1": "disk"}
    expected = result_of(run_of("int8", "gptq")(model))
    folder, before = tmp_path / "offload", files_in(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=folder)
    kept = elsewhere(model)
    require_same(expected, result_of(run_of("int8", "gptq")(model)))
    assert kept <= elsewhere(model) | {name for name in kept if "experts" in name}
    assert files_in(tmp_path / "model") == before
