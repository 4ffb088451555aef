"""The argument lists of the documented scripts: each does what it says, or a line says what to use.

A list is the words that follow those that all begin with, and either what must be true of its run or a part of the
error. Every option of the language-model script, and of its sibling for ONNX files, stands in one of them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from quark.compat.quark_cli import get_cli_parser, main
from quark.errors import QuarkError
from tests.models.onnx_zoo import cnn
from tests.models.torch_zoo import LANGUAGE_MODEL, ROOT, tiny_llama

DOWN = "model.layers.0.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPORT = "--model_export hf_format"


@dataclass
class Run:
    """What a run of the script did.

    Attributes:
        out: --output_dir.
        said: Its standard output.
        log: What quark logged.
        metrics: What it returned.
        loaded: The arguments of get_model after the folder; empty where no model was loaded.
        batches: Shape of each batch of calibration data.
        model: The model at its export.
        compiled, tasks: The arguments of torch.compile and task_eval.
    """

    out: Path
    said: str = ""
    log: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    loaded: tuple[Any, ...] = ()
    batches: list[tuple[int, ...]] = field(default_factory=list)
    model: Any = None
    compiled: list[Any] = field(default_factory=list)
    tasks: tuple[Any, ...] = ()

    def tensor(self, name: str) -> torch.Tensor:
        return load_file(self.out / "model.safetensors")[name]

    def config(self) -> dict[str, Any]:
        return json.loads((self.out / "config.json").read_text())["quantization_config"]

    def files(self) -> set[str]:
        return {file.name for file in self.out.iterdir()}


def kv_scale(run: Run) -> float:
    return run.tensor("model.layers.0.self_attn.k_proj.output_scale").item()


def levels(run: Run, layer: int = 0) -> int:
    """Different values in the first group of 32 of a layer of the model in memory."""
    return len(run.model.model.layers[layer].mlp.up_proj.weight[0, :32].unique())


LISTS: dict[str, tuple[str, Callable[[Run], Any] | str]] = {
    "fp8, exported": (f"--quant_scheme fp8 {EXPORT}", lambda run: run.tensor(QUERY).dtype == torch.float8_e4m3fn),
    "the tokenizer beside it": (f"--quant_scheme int8 {EXPORT}", lambda run: "tokenizer.json" in run.files()),
    "a name of older versions": (f"--quant_scheme w_fp8_a_fp8 {EXPORT}", lambda run: run.tensor(QUERY).itemsize == 1),
    "vLLM: groups of MXFP4, which has no others": (
        f"--quant_scheme w_mxfp4_a_mxfp4 --group_size 32 {EXPORT}",
        lambda run: run.config()["global_quant_config"]["weight"]["group_size"] == 32,
    ),
    "zentorch: -1 is a channel": (
        f"--quant_scheme w_int4_per_group_sym --group_size -1 --data_type bfloat16 --quant_algo awq {EXPORT}",
        lambda run: run.config()["global_quant_config"]["weight"]["qscheme"] == "per_channel",
    ),
    "groups of another size": (
        f"--quant_scheme w_uint4_per_group_asym --group_size 32 {EXPORT}",
        lambda run: run.config()["global_quant_config"]["weight"]["group_size"] == 32,
    ),
    "groups of what has none": ("--quant_scheme fp8 --group_size 32", "a scheme whose name has one"),
    "no scheme": ("", "--quant_scheme is needed"),
    "a scheme that is misspelled": ("--quant_scheme w_uint4_per_grup_asym", "no scheme 'w_uint4_per_grup_asym'"),
    "a scheme for some layers": (
        f"--quant_scheme int4_wo_32 --layer_quant_scheme *down_proj fp8 {EXPORT}",
        lambda run: run.tensor(DOWN).dtype == torch.float8_e4m3fn and run.tensor(QUERY).dtype == torch.int32,
    ),
    "a cache": (f"--quant_scheme fp8 --kv_cache_dtype fp8 {EXPORT}", lambda run: 0 < kv_scale(run) < 1),
    "a cache, as it was called": (f"--quant_scheme fp8 --kv_cache_quant_scheme fp8 {EXPORT}", kv_scale),
    "the smallest scale of a cache": (
        f"--quant_scheme fp8 --kv_cache_dtype fp8 --min_kv_scale 1.0 {EXPORT}",
        lambda run: kv_scale(run) == 1,
    ),
    "a cache after rotary embedding": (
        f"--quant_scheme fp8 --kv_cache_dtype fp8 --kv_cache_post_rope {EXPORT}",
        lambda run: run.config()["kv_cache_post_rope"] is True,
    ),
    "a smallest scale of no cache": (
        "--quant_scheme fp8 --min_kv_scale 1.0 --kv_cache_post_rope",
        lambda run: "--min_kv_scale has no effect without --kv_cache_dtype" in run.said,
    ),
    "attention": (
        f"--quant_scheme fp8 --attention_dtype fp8 {EXPORT}",
        lambda run: run.config()["softmax_quant_spec"]["dtype"] == "fp8_e4m3",
    ),
    "algorithms in order": (
        f"--quant_scheme int4_wo_32 --quant_algo awq,gptq {EXPORT}",
        lambda run: [algorithm["name"] for algorithm in run.config()["algo_config"]] == ["awq", "gptq"],
    ),
    "an algorithm from a file": (
        f"--quant_scheme int4_wo_32 --quant_algo gptq --quant_algo_config_file gptq gptq.json {EXPORT}",
        lambda run: run.config()["algo_config"][0]["damp_percent"] == 0.05,
    ),
    "a file of no algorithm": (
        "--quant_scheme int4_wo_32 --quant_algo_config_file gptq gptq.json",
        lambda run: "--quant_algo_config_file has no effect without --quant_algo" in run.said,
    ),
    "an algorithm that does not exist": ("--quant_scheme int4_wo_32 --quant_algo aqw", "Did you mean.*awq"),
    "layers that stay float": (
        f"--quant_scheme int8 --exclude_layers lm_head *self_attn* {EXPORT}",
        lambda run: run.tensor(QUERY).is_floating_point() and not run.tensor(DOWN).is_floating_point(),
    ),
    "none stays float": (
        f"--quant_scheme int8 {EXPORT} --exclude_layers",
        lambda run: run.tensor("lm_head.weight").dtype == torch.int8,
    ),
    "Ryzen AI: brackets, as in Python": (
        f"--quant_scheme int8 --exclude_layers [] {EXPORT}",
        lambda run: "'[]'" in run.log and run.tensor(QUERY).dtype == torch.int8,
    ),
    "patterns of another model": (
        f"--quant_scheme int8 --exclude_layers *mlp.gate.linear *31.fc* {EXPORT}",
        lambda run: "'*mlp.gate.linear'" in run.log and run.tensor(QUERY).dtype == torch.int8,
    ),
    "layers of a float model that were quantized before": (
        f"--quant_scheme int8 --no_keep_prequantized_layers {EXPORT}",
        lambda run: run.tensor(QUERY).dtype == torch.int8,
    ),
    "kernels": (
        "--quant_scheme int8 --enable_native_inference",
        lambda run: any(getattr(module, "is_packed", False) for module in run.model.modules()),
    ),
    "kernels of a mode": ("--quant_scheme fp8 --enable_native_inference --native_linear_mode fp8_per_tensor", levels),
    "a mode of no kernels": (
        "--quant_scheme fp8 --native_linear_mode fp8_per_tensor",
        lambda run: "--native_linear_mode has no effect without --enable_native_inference" in run.said,
    ),
    "ONNX": ("--quant_scheme int8 --model_export onnx", lambda run: "quark_model.onnx" in run.files()),
    "GGUF": ("--quant_scheme uint4_wo_32 --model_export gguf", lambda run: "llama.gguf" in run.files()),
    "two formats": (
        f"--quant_scheme uint4_wo_32 {EXPORT} --model_export gguf",
        lambda run: {"llama.gguf", "model.safetensors"} <= run.files(),
    ),
    "a format of older versions": ("--quant_scheme fp8 --model_export quark_safetensors", "choose from .*hf_format"),
    "AWQ's layout": (
        f"--quant_scheme uint4_wo_32 --custom_mode awq {EXPORT}",
        lambda run: run.config()["quant_method"] == "awq",
    ),
    "FP8's layout": (
        f"--quant_scheme fp8 --custom_mode fp8 {EXPORT}",
        lambda run: run.config()["quant_method"] == "fp8",
    ),
    "codes in order": (
        f"--quant_scheme uint4_wo_32 --pack_method order {EXPORT}",
        lambda run: run.config()["export"]["pack_method"] == "order",
    ),
    "an order of nothing": (
        "--quant_scheme uint4_wo_32 --pack_method order",
        lambda run: "--pack_method has no effect without --model_export" in run.said,
    ),
    "rounded weights": (
        f"--quant_scheme int4_wo_32 --export_weight_format fake_quantized {EXPORT}",
        lambda run: len(run.tensor(QUERY)[0, :32].unique()) <= 16 and run.tensor(QUERY).is_floating_point(),
    ),
    "rounded weights in AWQ's layout": (
        f"--quant_scheme uint4_wo_32 --custom_mode awq --export_weight_format fake_quantized {EXPORT}",
        "--custom_mode quark only",
    ),
    "from file to file": (
        f"--quant_scheme mxfp4 --file2file_quantization {EXPORT}",
        lambda run: run.tensor(QUERY).dtype == torch.uint8 and not run.loaded,
    ),
    "from file to file, as it is called now": (
        "--quant_scheme mxfp4 --exclude_layers *self_attn* *lm_head --quant_flow file2file",
        lambda run: run.tensor(QUERY).is_floating_point() and not run.loaded,
    ),
    "from file to file, of a model in memory": (
        "--quant_scheme mxfp4 --quant_flow file2file --multi_gpu balanced --params_save",
        lambda run: re.search("Without effect: --multi_gpu, .*--params_save", run.said),
    ),
    "from file to file, to another format": (
        "--quant_scheme mxfp4 --quant_flow file2file --model_export onnx",
        "writes hf_format only, not onnx",
    ),
    "block by block": ("--quant_scheme nvfp4 --quant_flow per_block --gpu_resident_blocks 2", "--stream"),
    "data": (
        "--quant_scheme fp8 --num_calib_data 3 --batch_size 2 --seq_len 8",
        lambda run: run.batches == [(2, 8), (1, 8)],
    ),
    "data that do not exist": ("--quant_scheme fp8 --dataset pile", "The dataset 'pile' is unknown"),
    "data of images": ("--quant_scheme fp8 --dataset ScienceQA", "only text is read here"),
    "a model in bfloat16": (
        f"--quant_scheme fp8 --data_type bfloat16 --model_attn_implementation sdpa {EXPORT}",
        lambda run: run.model.dtype == torch.bfloat16 and run.model.config._attn_implementation == "sdpa",
    ),
    "attention of a package": ("--quant_scheme fp8 --model_attn_implementation flash_attention_2", "FlashAttention2"),
    "all devices": ("--quant_scheme int8_wo --multi_device", lambda run: run.loaded[3] is True and levels(run)),
    "all GPUs": (
        "--quant_scheme int8_wo --multi_gpu balanced",
        lambda run: run.loaded[2] == "balanced" and levels(run),
    ),
    "no code of the folder": ("--quant_scheme int8_wo --no_trust_remote_code", lambda run: run.loaded[-1] is False),
    "code of the folder": ("--quant_scheme int8_wo --trust_remote_code", lambda run: run.loaded[-1] is True),
    "a revision of a folder": ("--quant_scheme fp8 --revision main", "of a model on the hub"),
    "parameters, saved": (
        "--quant_scheme int8 --params_save --save_dir params",
        lambda run: Path("params/llama.safetensors").exists(),
    ),
    "parameters, loaded from nowhere": ("--params_load", "needs --json_path and --safetensors_path"),
    "parameters that are not loaded": (
        "--quant_scheme int8 --json_path a.json --safetensors_path a.safetensors",
        lambda run: "--json_path has no effect" in run.said and "--safetensors_path has no effect" in run.said,
    ),
    "a folder that is not reloaded": (
        "--quant_scheme int8 --import_model_dir elsewhere",
        lambda run: "--import_model_dir has no effect without --model_reload" in run.said,
    ),
    "the float model": ("--skip_quantization --evaluate", lambda run: run.metrics["perplexity"] > 1),
    "perplexity, in a file": (
        "--quant_scheme int8 --evaluate --use_ppl_eval_model --save_metrics_to_csv --metrics_output_dir metrics",
        lambda run: "perplexity" in Path("metrics/metrics.csv").read_text(),
    ),
    "perplexity with a cache": (
        "--quant_scheme int8 --evaluate --use_ppl_eval_for_kv_cache --ppl_eval_for_kv_cache_context_size 8 "
        "--ppl_eval_for_kv_cache_sample_size 4 --ppl_eval_for_kv_cache_patch_size 2",
        lambda run: run.metrics["perplexity_kv_cache"] > 1,
    ),
    "sizes of no cache": (
        "--quant_scheme int8 --ppl_eval_for_kv_cache_context_size 8",
        lambda run: "has no effect without --use_ppl_eval_for_kv_cache" in run.said,
    ),
    "tasks": (
        "--quant_scheme int8 --evaluate --tasks piqa,mmlu --num_fewshot 5 --apply_chat_template --eval_batch_size auto "
        "--max_eval_batch_size 8",
        lambda run: run.tasks[2:7] == (8, "auto", "piqa,mmlu", 5, True),
    ),
    "texts of a file": ("--quant_scheme int8 --evaluate --num_eval_data 4", "a text file is evaluated whole"),
    "compiled": ("--quant_scheme int8 --torch_compile", lambda run: len(run.compiled) == 1),
    "MLPerf's data": (
        "--quant_scheme int8 --evaluate --use_mlperf_rouge --eval_data_dir data",
        "Python pickles",
    ),
    "tensor parallelism": ("--quant_scheme int8 --use_tp", "tensor parallelism"),
    "QuaRot, as it was called": (
        "--quant_scheme int8 --pre_quantization_optimization quarot",
        "unrecognized arguments: --pre_quantization_optimization quarot. Possible: --quant_algo rotation",
    ),
    "matrices, as they were merged": ("--quant_scheme fp8 --no_weight_matrix_merge", "matrices are never merged"),
    "a word that is misspelled": ("--quant_scheme fp8 --excludelayers lm_head", "--exclude_layers"),
}


Checked = Callable[[onnx.ModelProto, str], Any] | str


def quantized(model: onnx.ModelProto, log: str) -> int:
    return sum(node.op_type == "QuantizeLinear" for node in model.graph.node)


def float_weights(model: onnx.ModelProto) -> set[str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {node.input[1] for node in model.graph.node if node.op_type == "Conv" and node.input[1] in stored}


ONNX_LISTS: dict[str, tuple[str, Checked]] = {
    "XINT8, and what there is none of here": (
        "--model_name cnn --num_calib_data 2 --batch_size 2 --workers 4 --device cuda --calib_image_dim 64",
        lambda model, log: (
            {"model_name", "num_calib_data", "batch_size", "workers", "device"}
            == {*re.findall(r"--(\w+) changes nothing here", log)}
        ),
    ),
    "CLE": ("--config XINT8 --cle", lambda model, log: "Cross-layer equalization of 8 pairs" in log),
    "CLE, as it was called": ("--config XINT8 --include_cle", lambda model, log: "Cross-layer equalization" in log),
    "AdaRound": ("--config A8W8 --adaround --learning_rate 0.1 --num_iters 3", quantized),
    "AdaQuant": ("--config A8W8 --adaquant --learning_rate 1e-5 --num_iters 3", quantized),
    "ranges": ("--config S8S8_AAWS --calib_method percentile+99.9 --use_moving_average", quantized),
    "ranges that do not exist": ("--config S8S8_AAWS --calib_method best", r"percentile\+99.99"),
    "nodes in float": (
        "--config A8W8 --exclude_nodes stem_conv_node;a_conv_node",
        lambda model, log: float_weights(model) == {"stem_w", "a_w"},
    ),
    "a node that is not there": (
        "--config A8W8 --exclude_nodes nowhere",
        lambda model, log: "no node has the name 'nowhere'" in log and not float_weights(model),
    ),
    "a part in float": (
        "--config A8W8 --exclude_subgraphs [stem_conv_node],[stem_node]",
        lambda model, log: float_weights(model) == {"stem_w", "stem_norm_node_weight"},
    ),
    "half a part": ("--config A8W8 --exclude_subgraphs [a]", "expected .first nodes., .last nodes."),
    "weights beside the file": (
        "--config A8W8 --save_as_external_data",
        lambda model, log: len({*Path().glob("out.onnx*")}) == 2,
    ),
    "a model in memory": ("--config A8W8 --use_crypto", "CryptoMode: out.onnx is not written"),
    "SmoothQuant": ("--config A8W8 --include_sq --sq_alpha 0.7", lambda model, log: "SmoothQuantConfig" in log),
    "GPTQ": ("--config INT8_TRANSFORMER_DEFAULT --use_gptq", lambda model, log: "GPTQConfig: 1 places" in log),
    "rotation": (
        "--config INT8_TRANSFORMER_DEFAULT --include_rotation --hidden_size 16 --use_random_had",
        lambda model, log: "QuarotConfig: nothing in this model qualifies" in log,
    ),
    "rotation by a file that is not there": (
        "--config INT8_TRANSFORMER_DEFAULT --include_rotation --r_config_path rotation.json",
        "rotation.json cannot be read",
    ),
    "a named dataset": ("--calib_dataset_name pileval --num_head 32", "datasets are not fetched"),
    "arguments of the search": (
        "--config A8W8 --num_head 8 --auto_search_config default_auto_search",
        lambda model, log: "--num_head changes nothing here" in log and "--auto_search_config changes nothing" in log,
    ),
    "a configuration that does not exist": ("--config A8W9", "Did you mean 'A8W8'"),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantize_quark", ROOT / "examples" / "compat" / "quantize_quark.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What all lists begin with."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    tiny_llama(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text("A small text, which is all that the model of this test ever reads. " * 20)
    fixed = f"--model_dir {folder} --device cpu --num_calib_data 2 --seq_len 16 --output_dir out"
    return f"{fixed} --dataset {folder / 'text.txt'} --evaluation_dataset {folder / 'text.txt'}".split()


def ran(script: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the script in this folder, and keep what it did."""
    run = Run(Path("out"))

    def recorded(name: str, keep: Callable[..., None], module: Any = script) -> None:
        function = getattr(module, name)

        def called(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            keep(found, *arguments, *options.values())
            return found

        monkeypatch.setattr(module, name, called)

    recorded("get_model", lambda found, folder, *rest: setattr(run, "loaded", rest))
    recorded("get_calib_dataloader", lambda found, *_, **__: run.batches.extend(tuple(batch.shape) for batch in found))
    recorded("export", lambda found, args, model, profiler: setattr(run, "model", model))
    monkeypatch.setattr(torch, "compile", lambda model: run.compiled.append(model) or model)
    monkeypatch.setattr(
        "quark.compat.llm_scripts.evaluation.task_eval",
        lambda *arguments: setattr(run, "tasks", arguments) or {"results": {}},
    )
    run.metrics = script.main(words)
    return run


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] if index % 8 else []) for index, title in enumerate(LISTS)]
)
def test_a_list_does_what_it_says_or_is_refused(
    title: str, script: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("gptq.json").write_text('{"name": "gptq", "damp_percent": 0.05}')
    more, expected = LISTS[title]
    asked = [*words, *more.replace("--evaluate", "").split()]
    asked += [] if "--evaluate" in more else ["--skip_evaluation"]
    if isinstance(expected, str):
        with pytest.raises((SystemExit, QuarkError)) as refused:
            ran(script, asked, monkeypatch)
        said = str(refused.value) if isinstance(refused.value, QuarkError) else capsys.readouterr().err
        assert re.search(expected, said)
        assert not Path("out").exists(), "an error comes before the work"
        return
    run = ran(script, asked, monkeypatch)
    run.said, run.log = capsys.readouterr().out, caplog.text
    assert expected(run)


def test_every_option_stands_in_a_list(
    script: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.arguments(["--help"])
    options = {*re.findall(r"--\w+", capsys.readouterr().out)}
    listed = {word for more, _ in LISTS.values() for word in more.split()} | {*words}
    elsewhere = {
        "--help",
        "--skip_evaluation",
        "--model_reload",
        "--no",
    }  # of each list, of the test below, half a word
    assert options - listed <= elsewhere and len(options) > 60


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model and with arrays to calibrate it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(cnn(), "model.onnx")
    Path("arrays").mkdir()
    for index in range(4):
        pixels = np.random.default_rng(index).normal(size=(1, 3, 16, 16))
        np.save(f"arrays/{index}.npy", pixels.astype(np.float32))


NEEDED = "onnx-ptq --input_model_path model.onnx --output_model_path out.onnx"
DATA = {"--calib_data_path", "--calibration_dataset_path"}


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=[pytest.mark.slow] if index % 8 else []) for index, title in enumerate(ONNX_LISTS)],
)
@pytest.mark.usefixtures("files")
def test_an_onnx_list_does_what_it_says_or_is_refused(
    title: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quark")
    more, expected = ONNX_LISTS[title]
    asked = [*NEEDED.split(), max(DATA) if "cle" in more else min(DATA), "arrays", *more.split()]
    if callable(expected):
        main(asked)
        assert expected(onnx.load("out.onnx"), caplog.text)
        return
    try:
        main(asked)
    except SystemExit as stopped:
        assert stopped.code == 1
    assert re.search(expected, capsys.readouterr().err + caplog.text)
    assert not Path("out.onnx").exists()


def test_every_option_of_the_onnx_command_stands_in_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get_cli_parser().parse_args(["onnx-ptq", "--help"])
    options = {*re.findall(r"--\w+", capsys.readouterr().out)}
    listed = {word for more, _ in ONNX_LISTS.values() for word in more.split()} | {*NEEDED.split()} | DATA
    assert options - listed == {"--help"} and len(options) > 25


@pytest.mark.slow
def test_what_is_saved_is_loaded(
    script: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--params_load, --model_reload and --import_model_dir compute what was written, twice into the same folder."""
    monkeypatch.chdir(tmp_path)
    made = [*words, *f"--quant_scheme fp8 --kv_cache_dtype fp8 --params_save --save_dir params {EXPORT}".split()]
    expected = script.main(made)
    assert script.main(made) == expected
    files = "--json_path params/llama.json --safetensors_path params/llama.safetensors"
    assert script.main([*words, "--params_load", *files.split()]) == expected
    assert script.main([*words, "--model_reload", "--import_model_dir", "out"]) == expected


def test_documented_defaults(script: ModuleType) -> None:
    """But code of a folder, which runs only where it is asked for (migration.md)."""
    args = script.arguments(["--model_dir", "m", "--quant_scheme", "fp8"])
    documented = Namespace(
        device="cuda", dataset="pileval", seq_len=512, batch_size=1, num_calib_data=512, output_dir="exported_model",
        custom_mode="quark", pack_method="reorder", export_weight_format="real_quantized", quant_flow="standard",
        save_dir="model_params", evaluation_dataset="wikitext", max_eval_batch_size=64, min_kv_scale=0.0,
        exclude_layers=None, model_export=None, data_type="auto", model_attn_implementation="eager",
    )  # fmt: skip
    assert {name: getattr(args, name) for name in vars(documented)} == vars(documented)
