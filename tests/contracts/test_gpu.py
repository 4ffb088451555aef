"""What the CPU computes, a GPU computes, too: over the registries, on the pretended one.

Results are compared bit by bit, for its operators are those of the CPU, whose compiled solvers, which sum in another
order, are switched off here, as are the float32 products of bfloat16 on a CPU that has no bfloat16 ones. What is not
the same arithmetic has a bound: float16, which a CPU multiplies in float32, and packed kernels, of which each kind of
device has its own.

How often Python waits is counted in the same runs: at most `WAITS` a block and pass, and none a batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.core.schemes import SCHEMES
from quark.core.solvers.columns import columns
from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.calibration import work_device
from quark.torch.config.named_algorithms import ALGO_CONFIGS, algo_config_by_name
from quark.torch.config.tensor.enums import QuantFlow, QuantizationMode
from quark.torch.model import half_products
from tests.commands.program import quark
from tests.models.architectures import build, token_ids
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama
from tests.pretended_gpu import Meter, PretendedGpu, on_host


@pytest.fixture(autouse=True)
def no_compiled_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_library", lambda: None)


@pytest.fixture(autouse=True)
def bfloat16_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX-512 has no products of bfloat16: there `half_products` computes them in float32, whose
    sums are in another order, on the host and not on the device."""
    lacking = half_products.lacking_types() - {torch.bfloat16}
    monkeypatch.setattr(half_products, "lacking_types", lambda: lacking)


WAITS = 4
CPU, GPU = "cpu", "cuda"
Result = tuple[dict[str, torch.Tensor], torch.Tensor]

IN_ALL = {"distillation": "int4_wo_64"}
"""Algorithms that are tried under another scheme in the everyday tests."""
BY_NAME = [name for name in ALGO_CONFIGS if name not in ("imatrix", "smoothquant", "autosmoothquant")]
"""Of each algorithm one name; that of an importance matrix reads a file."""
OFTEN = ("int8", "uint4_wo_64", "nvfp4", "mxfp4_fp8", "mx6", "int4_fp8")


def small_config(name: str) -> Any:
    """An algorithm by name, where that can be in a few steps."""
    config = algo_config_by_name(name)
    for field, value in (("iters", 4), ("epochs", 1), ("min_layer_size", 32), ("svd_rank", 4)):
        if hasattr(config, field):
            setattr(config, field, value)
    return config


def config_of(scheme: str, *algorithms: str, **options: Any) -> Any:
    config = LLMTemplate.get("auto").get_config(scheme, **options)
    config.algo_config = [small_config(name) for name in algorithms] or None
    return config


def one_block(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_llama(num_hidden_layers=1, intermediate_size=128, vocab_size=64, dtype=dtype)


def batches(count: int = 3) -> list[torch.Tensor]:
    return [token_ids(seed=seed) for seed in range(count)]


def quantized(model: Any, config: Any, data: list[Any] | None) -> Any:
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, data))


def result_of(model: Any) -> Result:
    with torch.no_grad():
        logits = model(token_ids(seed=9).to(next(model.parameters()).device)).logits
    return on_host(model.state_dict()), on_host(logits)


def require_same(cpu: Result, gpu: Result) -> None:
    assert cpu[0].keys() == gpu[0].keys()
    assert [name for name, tensor in cpu[0].items() if not torch.equal(tensor, gpu[0][name])] == []
    assert torch.equal(cpu[1], gpu[1])


def compare(run: Callable[[str], Result]) -> PretendedGpu:
    """Run on both; the device, for its meter."""
    cpu = run(CPU)
    with PretendedGpu(count=2) as gpu:
        require_same(cpu, run(GPU))
    return gpu


def in_memory(scheme: str, *algorithms: str, dtype: torch.dtype = torch.float32) -> Callable[[str], Result]:
    def run(device: str) -> Result:
        # The data stay on the host: they are moved to where the model is.
        return result_of(quantized(one_block(dtype).to(device), config_of(scheme, *algorithms), batches()))

    return run


def own_waits(gpu: PretendedGpu) -> int:
    """Waits but for those inside of transformers, which looks at each mask."""
    return sum(count for line, count in gpu.meter.waited_at.items() if not line.startswith("torch/model/batches.py"))


@pytest.mark.parametrize(
    "scheme", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_every_scheme(scheme: str) -> None:
    gpu = compare(in_memory(scheme))
    assert own_waits(gpu) <= WAITS


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name == "awq" else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]
)
def test_every_algorithm(name: str, dtype: torch.dtype) -> None:
    compare(in_memory(IN_ALL.get(name, "uint4_wo_64"), name, dtype=dtype))


EVERY = [(scheme, name) for scheme in SCHEMES for name in BY_NAME if name not in ("rotation", "quarot", "distillation")]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name"), EVERY)
def test_every_scheme_under_every_algorithm(scheme: str, name: str) -> None:
    """What the CPU refuses, the device refuses in the same words."""
    run = in_memory(scheme, name)
    cpu = outcome(run, CPU)
    with PretendedGpu():
        gpu = outcome(run, GPU)
    if isinstance(cpu, str) or isinstance(gpu, str):
        assert cpu == gpu
    else:
        require_same(cpu, gpu)


def outcome(run: Callable[[str], Result], device: str) -> Result | str:
    try:
        return run(device)
    except QuarkError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq", "int8"])
def test_float16_within_a_tenth_of_its_loss(name: str) -> None:
    """A CPU multiplies float16 in float32, a device as it is: the difference is that of float16 itself."""
    run = in_memory("int8") if name == "int8" else in_memory("uint4_wo_64", name, dtype=torch.float16)
    cpu = run(CPU)
    with PretendedGpu():
        gpu = run(GPU)
    lost = (cpu[1].float() - gpu[1].float()).norm() / cpu[1].float().norm()
    assert lost < 0.1


ARCHITECTURES = ["mixtral", "qwen3_moe", "gpt2", "bert", "phi3", "falcon", "gemma2", "opt", "gpt_neox"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme, name", [("int8", None), ("uint4_wo_32", "gptq"), ("int8", "smooth"), ("fp8", "rotation")]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_with_and_without_experts(architecture: str, scheme: str, name: str | None) -> None:
    def run(device: str) -> Result:
        config = config_of(scheme, *([name] if name else []))
        return result_of(quantized(build(architecture).to(device), config, batches()))

    compare(run)


def test_cache_and_attention() -> None:
    def run(device: str) -> Result:
        config = config_of("fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
        return result_of(quantized(one_block().to(device), config, batches()))

    compare(run)


OF_THE_WHOLE = ("rotation", "quarot", "distillation")
"""Algorithms that run on the whole model, so that no batch waits for a block."""


def often(names: list[str]) -> list[Any]:
    """GPTQ in the everyday tests, the others in the slow ones."""
    return [name if name == "gptq" else pytest.param(name, marks=pytest.mark.slow) for name in names]


def onloading(name: str, data: list[torch.Tensor]) -> Any:
    """A model of the host, quantized block by block on the device."""
    config = config_of(IN_ALL.get(name, "uint4_wo_64"), name)
    config.quant_flow = QuantFlow.per_block
    return quantized(one_block(), config, data)


@pytest.mark.parametrize("name", often(BY_NAME))
def test_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays on the host; on the device are one block, what its solver needs, and some of the batches."""
    in_memory_on_the_host = in_memory(IN_ALL.get(name, "uint4_wo_64"), name)(CPU)
    gc.collect()
    before = Meter.alive()
    for bound in (work_device.ON_DEVICE, 1 << 14):  # all batches wait on the device, or a few of them
        monkeypatch.setattr(work_device, "ON_DEVICE", bound)
        with PretendedGpu() as gpu:
            require_same(in_memory_on_the_host, result_of(onloading(name, batches())))
        assert gpu.meter.queued["to cpu"] > 0 or bound > 1 << 14 or name in OF_THE_WHOLE
    gc.collect()
    assert Meter.alive() < before + (1 << 14)  # constants of solvers, which are copied to a device once


SMALL = 1 << 11
"""Bytes, at most, of what each batch leaves on the device: tensors that are not worth a copy."""


@pytest.mark.parametrize("name", often([name for name in BY_NAME if name not in OF_THE_WHOLE]))
def test_more_samples_take_no_more_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_device, "ON_DEVICE", 1 << 14)
    few, many = (4, 6) if name == "gptq" else (16, 64)
    peaks, uploads, waits = [], [], []
    for count in (few, many):
        gc.collect()
        with PretendedGpu(where=name == "gptq") as gpu:
            gpu.meter.reset()
            onloading(name, [torch.cat([batch, batch, batch, batch], 1) for batch in batches(count)])
        peaks.append(gpu.meter.peak())
        uploads.append(gpu.meter.uploads.total())
        waits.append(gpu.meter.waits.total())
    assert peaks[1] - peaks[0] <= SMALL * (many - few), peaks
    if name == "gptq":
        assert uploads[1] <= uploads[0] and waits[1] <= waits[0]  # the first run brings constants, too


@pytest.mark.slow
def test_generating_training_and_kernels() -> None:
    from quark.torch import accelerate

    def generated(device: str) -> Result:
        model = quantized(one_block().to(device), config_of("int8"), batches())
        return {}, on_host(model.generate(token_ids().to(device), max_new_tokens=4, do_sample=False))

    def trained(device: str) -> Result:
        quantizer = ModelQuantizer(config_of("int8"))
        model = quantizer.quantize_model(one_block().to(device), batches()).train()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for batch in batches(2):
            model(batch.to(device), labels=batch.to(device)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return result_of(quantizer.freeze(model.eval()))

    def packed(device: str) -> Result:
        model = accelerate(quantized(one_block(torch.bfloat16).to(device), config_of("uint4_wo_64"), batches()))
        return {}, result_of(model)[1]

    for run in (generated, trained):
        compare(run)
    cpu = packed(CPU)[1].float()
    with PretendedGpu():
        assert (packed(GPU)[1].float() - cpu).norm() < 2 * torch.finfo(torch.bfloat16).eps * cpu.norm()


@pytest.mark.slow
def test_graph_mode() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)

    def run(device: str) -> Result:
        graph = torch.export.export(module, (x,)).module().to(device)
        config = config_of("int8")
        config.quant_mode = QuantizationMode.fx_graph_mode
        model = quantized(graph, config, [x.to(device)])
        return on_host(model.state_dict()), on_host(model(x.to(device)))

    compare(run)


def test_a_folder_is_written_and_loaded(tmp_path: Path) -> None:
    def run(device: str) -> Result:
        model = quantized(one_block().to(device), config_of("uint4_wo_64"), None)
        export_safetensors(model, tmp_path / device)
        return result_of(import_model_from_safetensors(one_block().to(device), tmp_path / device))

    compare(run)
    assert (tmp_path / CPU / "model.safetensors").read_bytes() == (tmp_path / GPU / "model.safetensors").read_bytes()


# Commands. -----------------------------------------------------------------------------------------------------------

CALIBRATION = ["--calib", Path(__file__).parents[2] / "README.md", "--samples", 4, "--length", 32]
COMMANDS = {
    "streamed": ["--scheme", "int8", "--stream", *CALIBRATION],
    "nearest": ["--scheme", "uint4_wo_32"],
    "cache": ["--scheme", "fp8", "--kv-cache", "fp8", "--attention", "fp8", *CALIBRATION],
    "streamed cache": ["--scheme", "fp8", "--kv-cache", "fp8", "--attention", "fp8", "--stream", *CALIBRATION],
    "gptq": ["--scheme", "uint4_wo_32", "--algorithm", "gptq", "--stream", *CALIBRATION],
    "awq": ["--scheme", "uint4_wo_32", "--algorithm", "awq", "--stream", *CALIBRATION],
    "file to file": ["--scheme", "mxfp4", "--stream"],
    "compressed-tensors": ["--scheme", "int4_wo_32", "--export-format", "compressed-tensors"],
    "awq format": ["--scheme", "uint4_wo_32", "--export-format", "awq"],
    "fp8 format": ["--scheme", "fp8", "--export-format", "fp8", *CALIBRATION],
    "onnx": ["--scheme", "int8", "--export-format", "onnx", *CALIBRATION],
    "gguf": ["--scheme", "q4_k_m", "--export-format", "gguf"],
    "vllm": ["--for", "vllm", *CALIBRATION],
    "bits": ["--bits", 5, *CALIBRATION],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one block with the tokenizer of the example one."""
    import transformers

    made = tmp_path_factory.mktemp("gpu") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    tiny_llama(num_hidden_layers=1, vocab_size=len(tokenizer), dtype=torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@cache
def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files of a folder but for the recipe, which says where it ran."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in files
        if file.is_file() and file.name != "quark_recipe.yaml"
    }


@pytest.mark.parametrize(
    "case", [case if case == "streamed" else pytest.param(case, marks=pytest.mark.slow) for case in COMMANDS]
)
def test_commands_write_the_same_bytes(case: str, folder: Path, tmp_path: Path) -> None:
    ending = ".gguf" if case == "gguf" else ""

    def made(device: str) -> Path:
        output = tmp_path / f"{device}{ending}"
        done = quark("quantize", folder, *COMMANDS[case], "--device", device, "-o", output)
        assert done.code == 0, done.err
        return output

    cpu = made(CPU)
    with PretendedGpu():
        assert contents(made(GPU)) == contents(cpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_algorithm_streams_the_same_bytes(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device under a small bound and on the CPU; what needs the whole model is refused in the same words."""
    scheme = IN_ALL.get(name, "uint4_wo_32")

    def made(device: str) -> str | dict[str, bytes]:
        output = tmp_path / device
        words = ["--scheme", scheme, "--algorithm", name, "--stream", *CALIBRATION]
        done = quark("quantize", folder, *words, "--device", device, "-o", output)
        return contents(output) if done.code == 0 else done.err.splitlines()[-1]

    cpu = made(CPU)
    monkeypatch.setattr(work_device, "ON_DEVICE", 1 << 14)
    with PretendedGpu():
        assert made(GPU) == cpu


@pytest.mark.slow
def test_other_commands_print_the_same(folder: Path, tmp_path: Path) -> None:
    assert quark("quantize", folder, "--scheme", "uint4_wo_32", "-o", tmp_path / "q").code == 0
    words = ["plan", folder, "--bits", 5, *CALIBRATION]
    cpu = quark(*words, "--device", CPU)
    with PretendedGpu():
        gpu = quark(*words, "--device", GPU)
        of_text = ["--windows", 2, "--device", GPU]
        assert quark("evaluate", folder, tmp_path / "q", "--text", CALIBRATION[1], *of_text).code == 0
        schemes = ["--schemes", "int8_wo,uint4_wo_32", *CALIBRATION[:2], "--length", 32]
        assert quark("compare", folder, *schemes, *of_text).code == 0
    assert cpu.code == gpu.code == 0 and cpu.out == gpu.out
