"""The cache of keys and values and attention, block by block: the bytes of the model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration

from quark.compat.torch_names.shorthand_specs import FP8E4M3PerTensorSpec, Uint8PerTensorSpec
from quark.core.schemes import SCHEMES
from quark.errors import CalibrationError, ConfigError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, QuantFlow, export_safetensors
from quark.torch.calibration.calibrate import waiting_ranges
from quark.torch.checkpoint.float_model import load_float_model
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.algo_configs import (
    AutoRoundConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    SmoothQuantConfig,
)
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.flows import per_block as per_block_flow
from quark.torch.flows.from_disk import FromDisk, stream
from quark.torch.flows.resume import Manifest
from quark.torch.layers.attention.cache_view import CacheQuantize
from quark.torch.layers.fake_quant import Mode
from quark.torch.layers.replace import quantized_layers
from quark.torch.writers.folder import FolderTarget
from tests.models.families import family
from tests.models.torch_zoo import token_batches
from tests.torch.flows.test_file2file import contents
from tests.torch.flows.test_stream import Killed, killed_after

FP8 = QLayerConfig(output_tensors=FP8E4M3PerTensorSpec())
SHARD = "60KB"


def config(model_type: str, scheme: str = "uint4_wo_32", cache: str | None = "fp8", **options: Any) -> QConfig:
    """The template's config; `attention`, `algorithms` and the fields of QConfig are options."""
    given = {key: options.pop(key) for key in ("min_kv_scale", "exclude_layers") if key in options}
    attention, algorithms = options.pop("attention", None), options.pop("algorithms", None)
    made = LLMTemplate.get(model_type).get_config(scheme, kv_cache_scheme=cache, attention_scheme=attention, **given)
    return replace(made, algo_config=algorithms, **options)


def save(folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    family(model_type, **{"num_hidden_layers": 3, **options}).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    return folder


def in_memory(config: QConfig, source: Path, output: Path, data: Any) -> dict[str, bytes]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    export_safetensors(ModelQuantizer(config).quantize_model(model, data), output, max_shard_size=SHARD)
    return contents(output)


def streamed(config: QConfig, source: Path, output: Path, data: Any) -> dict[str, bytes]:
    stream(config, OpenedFolder(source), output, data, target=FolderTarget(max_shard_size=SHARD))
    return contents(output)


def per_block(config: QConfig, source: Path, output: Path, data: Any) -> dict[str, bytes]:
    return in_memory(replace(config, quant_flow=QuantFlow.per_block, gpu_resident_blocks=1), source, output, data)


def alike(config: QConfig, source: Path, folder: Path) -> None:
    """Both flows of blocks give what the one in memory gives."""
    data = token_batches()
    expected = in_memory(config, source, folder / "memory", data)
    assert streamed(config, source, folder / "stream", data) == expected
    found = per_block(config, source, folder / "blocks", data)
    found["config.json"] = found["config.json"].replace(b'"per_block"', b'"standard"')
    assert found == expected


SCHEMES_TRIED = ("uint4_wo_32", "fp8", "int8", "mxfp4", "nvfp4")
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "int8": {"cache": "int8"},
    "each head": {"cache": "fp8_per_head"},
    "grouped": {"kv_cache_group": ["*k_proj", "*v_proj"]},
    "before RoPE": {"kv_cache_post_rope": False},
    "attention": {"attention": "fp8"},
    "attention alone": {"attention": "fp8", "cache": None},
    "probabilities with a zero point": {"softmax_quant_spec": Uint8PerTensorSpec()},
    "least scale": {"min_kv_scale": 0.01},
    "excluded projections": {"exclude_layers": ["*k_proj", "*layers.0.self_attn.*", "lm_head"]},
    "all": {"cache": "int8", "attention": "fp8", "min_kv_scale": 0.003},
}


def test_all_of_it_at_once(tmp_path: Path) -> None:
    alike(config("llama", "fp8", **OPTIONS["all"]), save(tmp_path / "float", num_hidden_layers=2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES_TRIED)
@pytest.mark.parametrize("options", OPTIONS)
def test_bytes_are_those_of_the_model_in_memory(options: str, scheme: str, tmp_path: Path) -> None:
    alike(config("llama", scheme, **OPTIONS[options]), save(tmp_path / "float"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["fp8", "before RoPE", "attention", "all"])
@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "mixtral", "deepseek_v3", "qwen3", "gemma2", "opt"])
def test_other_families(name: str, options: str, tmp_path: Path) -> None:
    excluded = {"exclude_layers": ["lm_head"]} if name == "deepseek_v3" else {}  # all attention, by its template
    alike(config(name, "int8", **excluded, **OPTIONS[options]), save(tmp_path / "float", name), tmp_path)
    names = [name for file in (tmp_path / "stream").glob("*.safetensors") for name in load_file(file)]
    assert sum(key.endswith(".output_scale") for key in names) >= 3
    assert sum(key.endswith(".prob_output_scale") for key in names) == (3 if "attention" in OPTIONS[options] else 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    alike(config("llama", "int8", **OPTIONS["all"]), save(tmp_path / "float", dtype=dtype), tmp_path)


ALGORITHMS: dict[str, tuple[str, list[Any]]] = {
    "GPTQ": ("uint4_wo_32", [GPTQConfig(damp_percent=0.01)]),
    "AWQ": ("uint4_wo_32", [AWQConfig()]),
    "AWQ and GPTQ": ("uint4_wo_32", [AWQConfig(), GPTQConfig()]),
    "SmoothQuant": ("int8", [SmoothQuantConfig(alpha=0.5)]),
    "GPTAQ": ("int8", [GPTAQConfig()]),
    "Qronos by Fisher information": ("uint4_wo_32", [QronosConfig(fisher=True)]),
    "AutoRound": ("uint4_wo_32", [AutoRoundConfig(iters=2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", ["grouped", "all"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_beside_algorithms(algorithm: str, options: str, tmp_path: Path) -> None:
    scheme, algorithms = ALGORITHMS[algorithm]
    alike(config("llama", scheme, algorithms=algorithms, **OPTIONS[options]), save(tmp_path / "float"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithms", [None, [GPTQConfig()], [GPTAQConfig()]])
def test_embeddings_are_in_float_where_ranges_are_observed(algorithms: list[Any] | None, tmp_path: Path) -> None:
    made = config("llama", "uint4_wo_32", algorithms=algorithms, **OPTIONS["all"])
    layers = {**made.layer_quant_config, "*embed_tokens": config_of_layer(SCHEMES["int4_wo_32"])}
    alike(replace(made, layer_quant_config=layers), save(tmp_path / "float"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithms", [None, [GPTQConfig()]])
def test_a_cache_in_one_block(algorithms: list[Any] | None, tmp_path: Path) -> None:
    """The blocks before it run for its ranges, those behind it do not."""
    cache = dict.fromkeys(["*layers.1.*k_proj", "*layers.1.*v_proj"], FP8)
    made = config("llama", cache=None, algorithms=algorithms, kv_cache_quant_config=cache)
    alike(made, save(tmp_path / "float"), tmp_path)


# A run that is killed. -----------------------------------------------------------------------------------------------


def resumed(made: QConfig, source: Path, folder: Path, patch: pytest.MonkeyPatch, blocks: int) -> list[str]:
    """Kill a run behind so many blocks, and let it go on; the bytes are those of the model in memory. The blocks that
    were left.
    """
    data, done = token_batches(), list[str]()
    expected = in_memory(made, source, folder / "memory", data)
    with patch.context() as killing, pytest.raises(Killed):
        killed_after(blocks, killing)
        stream(made, OpenedFolder(source), folder / "out", data, target=FolderTarget(max_shard_size=SHARD))
    finish: Callable[..., None] = Manifest.finish
    with patch.context() as counting:
        counting.setattr(
            Manifest, "finish", lambda self, block, *args: (done.append(block), finish(self, block, *args))
        )
        assert streamed(made, source, folder / "out", data) == expected
    return done


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "float", num_hidden_layers=2)
    assert resumed(config("llama", **OPTIONS["all"]), source, tmp_path, monkeypatch, 1) == ["model.layers.1"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["none", "GPTQ", "GPTAQ", "Qronos by Fisher information"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_killed_run_goes_on_beside_algorithms(
    algorithm: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, algorithms = ALGORITHMS.get(algorithm, ("fp8", None))
    made = config("llama", scheme, algorithms=algorithms, **OPTIONS["all"])
    left = resumed(made, save(tmp_path / "float"), tmp_path, monkeypatch, blocks)
    assert left == [f"model.layers.{index}" for index in range(blocks, 3)]


@pytest.mark.slow
def test_a_block_that_is_taken_away_waits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it had found lies in the folder; what finds it later must find it as it was."""
    take, seen = FromDisk.take, list[tuple[int, int]]()

    def looked_at(self: FromDisk, name: str) -> None:
        block = self.model.get_submodule(name)
        before = len(waiting_ranges(block, quantized_layers(block)))
        take(self, name)
        waiting = waiting_ranges(block, quantized_layers(block))
        seen.append((before, len(waiting)))
        if waiting:
            assert isinstance(waiting["self_attn.k_proj.output"], CacheQuantize)
            assert waiting["self_attn.prob_output"].mode is Mode.off

    monkeypatch.setattr(FromDisk, "take", looked_at)
    streamed(config("llama", **OPTIONS["all"]), save(tmp_path / "float"), tmp_path / "out", token_batches())
    # Keys, values, queries and probabilities of three blocks; tables outside of them stay in their file.
    assert seen[:3] == [(0, 4)] * 3 and set(seen[3:]) <= {(0, 0)}


# What is refused. ----------------------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused_before_any_work(tmp_path: Path) -> None:
    source = save(tmp_path / "float", num_hidden_layers=1)
    plain = config("llama", cache=None)
    refused: list[tuple[QConfig, type[Exception], str]] = [
        (replace(plain, min_kv_scale=0.5), ConfigError, "min_kv_scale has no meaning without"),
        (replace(plain, kv_cache_quant_config={"*key": FP8}), ConfigError, "kv_cache_quant_config: the pattern"),
        (
            replace(plain, softmax_quant_spec=FP8E4M3PerTensorSpec(is_dynamic=True)),
            NotSupportedError,
            "softmax_quant_spec.*static",
        ),
    ]
    for made, error, message in refused:
        with pytest.raises(error, match=message):
            streamed(made, source, tmp_path / "out", token_batches())
    with pytest.raises(CalibrationError, match=r"layers\.0\.self_attn\.k_proj\.output.*: needs calibration data"):
        streamed(config("llama"), source, tmp_path / "out", None)
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("bloom", "attention"), ("deepseek_v3", "all")])
def test_what_the_model_in_memory_refuses_is_refused_in_its_words(name: str, options: str, tmp_path: Path) -> None:
    """Also beside an algorithm that would learn for long."""
    made = config(name, algorithms=[QronosConfig(fisher=True)], **OPTIONS[options])
    source = save(tmp_path / "float", name)
    with pytest.raises(NotSupportedError) as expected:
        in_memory(made, source, tmp_path / "memory", token_batches())
    for flow in (streamed, per_block):
        with pytest.raises(NotSupportedError) as refused:
            flow(made, source, tmp_path / "out", token_batches())
        assert str(refused.value) == str(expected.value)
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.slow
def test_attention_outside_the_blocks_is_refused_before_anything_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an encoder and a decoder one runs block by block, as an algorithm asks; both hold what the patterns name."""
    source = encoder_and_decoder(tmp_path / "float")
    monkeypatch.setattr(per_block_flow, "prepare_algorithms", None)
    algorithm = QronosConfig(fisher=True, model_decoder_layers="model.decoder.layers")
    made = config("bart", algorithms=[algorithm], **OPTIONS["attention alone"])
    with pytest.raises(NotSupportedError, match=r"encoder\.layers\.0.*has a static scale and lies outside the blocks"):
        streamed(made, source, tmp_path / "out", token_batches())
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


@pytest.mark.slow
def test_attention_in_an_encoder_and_its_decoder(tmp_path: Path) -> None:
    source, made = encoder_and_decoder(tmp_path / "float"), config("bart", **OPTIONS["attention alone"])
    for folder, flow in (("memory", QuantFlow.standard), ("blocks", QuantFlow.per_block)):
        model = load_float_model(OpenedFolder(source))
        quantizer = ModelQuantizer(replace(made, quant_flow=flow))
        export_safetensors(quantizer.quantize_model(model, token_batches()), tmp_path / folder)
    stream(made, OpenedFolder(source), tmp_path / "out", token_batches())
    expected = contents(tmp_path / "memory")
    assert contents(tmp_path / "out") == expected
    assert contents(tmp_path / "blocks")["model.safetensors"] == expected["model.safetensors"]


def encoder_and_decoder(source: Path) -> Path:
    sizes: dict[str, Any] = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
    heads = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
             (("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    torch.manual_seed(0)
    BartForConditionalGeneration(BartConfig(**sizes, **heads, max_position_embeddings=64)).save_pretrained(source)
    return source
