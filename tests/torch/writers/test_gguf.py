"""GGUF files, read back by gguf's own dequantizer, by transformers, and by ourselves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quark.base.libraries.installed_packages import is_transformers_version_lower
from quark.base.libraries.transformers import READS_TOKENIZER_FILES
from quark.core.blocks.block_types import BLOCK_TYPES
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from quark.core.quantize import compute_qparams, fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import ScaleType, TensorSpec, block_spec, spec
from quark.errors import (
    ConfigError,
    FormatError,
    MissingDependencyError,
    NonFiniteError,
    NotSupportedError,
    OutputExistsError,
    ShapeError,
)
from quark.gguf.architectures.recurrent import RECURRENT
from quark.gguf.architectures.table import ARCHITECTURES, architecture_of
from quark.gguf.types import block_type
from quark.torch import (
    LLMTemplate,
    ModelExporter,
    ModelQuantizer,
    export_gguf,
    gguf_config,
    import_model_from_gguf,
)
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.layers.replace import quantized_layers
from quark.torch.model.passes.unfuse_experts import unfuse_experts
from quark.torch.writers.gguf import format
from quark.torch.writers.gguf.format import GgufFormat, GgufLayout
from tests.models.gguf_rows import (
    CONFIGS,
    LLAMA3,
    PLAIN,
    VARIANTS,
    YARN,
    build,
    facts_of,
    filled,
    known_facts,
    write_gguf,
)
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, mlp
from tests.models.versions import needs_transformers

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
THEIRS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "starcoder2", "gemma2", "gemma3_text", "gpt2", "stablelm")
THEIRS += ("qwen2_moe", "qwen3_moe", "nemotron", "bloom", "minimax_m2")
"""Architectures that transformers reads GGUF files of."""
IDS = torch.randint(3, 2048, (2, 16), generator=torch.Generator().manual_seed(0))


def quantized(scheme: str, kind: str = "llama", dtype: torch.dtype = F32, **options: Any) -> Any:
    model = build(kind, dtype, **options)
    config = LLMTemplate.get("auto").get_config(scheme)
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS).logits
    return out


def theirs(file: Path, model: Any, dtype: torch.dtype = F32) -> Any:
    """The file as transformers loads it. What GGUF has no key for comes from the config: biases, Gemma's scale."""
    from transformers import AutoModelForCausalLM

    # transformers knows a mistral file as one of the architecture llama only.
    config = {} if model.config.model_type == "mistral" else {"config": model.config}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **config).eval()


def tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def metadata(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


# Blocks ---------------------------------------------------------------------------------------------------------------

F16_SCALE: dict[str, Any] = {"scale_type": ScaleType.float16}
EXACT = [
    spec("int4", PerGroup(-1, 32), **F16_SCALE),
    spec("int4", PerGroup(-1, 128), **F16_SCALE),
    spec("int4", PerChannel(0), **F16_SCALE),
    spec("int8", PerGroup(-1, 32), **F16_SCALE),
    spec("int8", PerTensor(), **F16_SCALE),
    spec("int8", PerBlock((4, 64)), **F16_SCALE),
    SCHEMES["mxfp4"].weight,
]


def decoded(layout: GgufLayout, stored: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """The blocks as the gguf package decodes them."""
    kind = gguf.GGMLQuantizationType[block_type(layout.spec)]
    return gguf.quants.dequantize(stored.numpy(), kind).reshape(shape)


@pytest.mark.parametrize("tensor_spec", EXACT, ids=str)
def test_blocks_decode_to_the_quantized_values(tensor_spec: TensorSpec) -> None:
    x = torch.randn(16, 256) * torch.logspace(-3, 2, 16)[:, None]
    x[3, :64] = 0
    layout, params = GgufLayout(tensor_spec, F32), compute_qparams(x, tensor_spec)
    stored = layout.store(x, params)
    expected = fake_quantize(x, params, tensor_spec)
    assert np.array_equal(decoded(layout, stored[""], (16, 256)), expected.numpy())
    assert torch.equal(layout.load(stored, (16, 256)), expected)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("trained", [False, True])
def test_block_types_decode_to_the_quantized_values(name: str, dtype: torch.dtype, trained: bool) -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 16)[:, None]
    x[3, :256] = 0
    if trained:
        x = load_file(LANGUAGE_MODEL / "model.safetensors")["model.layers.1.mlp.up_proj.weight"][:32].float()
    x, tensor_spec, shape = x.to(dtype), block_spec(name), tuple(x.shape)
    layout, params = GgufLayout(tensor_spec, dtype), compute_qparams(x, tensor_spec)
    expected = fake_quantize(x, params, tensor_spec)
    for stored in (layout.store(x, params), layout.store(expected, params, frozen=True)):
        assert stored[""].shape[1] == shape[1] // BLOCK_TYPES[name].block * BLOCK_TYPES[name].bytes
        assert torch.equal(torch.from_numpy(decoded(layout, stored[""], shape)).to(dtype), expected)  # type: ignore[arg-type]
        assert torch.equal(layout.load(stored, shape), expected)


@pytest.mark.parametrize("tensor_spec", [*EXACT, *map(block_spec, BLOCK_TYPES)], ids=str)
def test_blocks_are_packed_some_rows_at_a_time(tensor_spec: TensorSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(19 if not isinstance(tensor_spec.granularity, PerBlock) else 20, 512).bfloat16()
    params, layout, counts = compute_qparams(x, tensor_spec), GgufLayout(tensor_spec, BF16), []
    expected, store = layout.store(x, params)[""], GgufLayout._store_rows

    def counting(self: GgufLayout, rows: torch.Tensor, *given: Any) -> Any:
        counts.append(len(rows))
        return store(self, rows, *given)

    monkeypatch.setattr(GgufLayout, "_store_rows", counting)
    monkeypatch.setattr(format, "PIECE", 4 * 4 * 512)
    for frozen, values in ((False, x), (True, layout.load({"": expected}, (len(x), 512)))):
        assert torch.equal(layout.store(values, params, frozen)[""], expected)
    assert max(counts) == 4 and sum(counts) == 2 * len(x)


def test_the_offset_of_q4_1_is_a_float16() -> None:
    tensor_spec = spec("uint4", PerGroup(-1, 32), symmetric=False, **F16_SCALE)
    x = torch.randn(16, 256) + 0.3
    layout, params = GgufLayout(tensor_spec, F32), compute_qparams(x, tensor_spec)
    stored = layout.store(x, params)
    values = decoded(layout, stored[""], (16, 256))
    assert np.array_equal(layout.load(stored, (16, 256)).numpy(), values)
    offset = (params.scale * params.zero_point).repeat_interleave(32, 1)
    error = np.abs(values - fake_quantize(x, params, tensor_spec).numpy())
    assert (error <= offset.numpy() * 2.0**-11 + 1e-7).all() and error.max() > 0


def test_a_scale_beyond_float16_is_refused() -> None:
    x = torch.full((1, 32), 1e7)
    with pytest.raises(NonFiniteError, match="65504"):
        compute_qparams(x, block_spec("q5_0"))
    with pytest.raises(NonFiniteError, match="65504"):
        GgufLayout(EXACT[0], F32).store(x, compute_qparams(x, spec("int4", PerGroup(-1, 32))))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_scheme_is_read_back_or_refused(scheme: str, tmp_path: Path) -> None:
    if GgufFormat().refusal(SCHEMES[scheme]):
        with pytest.raises(NotSupportedError, match="It takes the schemes int4_wo_32"):
            GgufFormat().check_scheme(scheme)
        return
    model = quantized(scheme, dtype=F16, hidden_size=128)
    float_model = build("llama", F16, seed=5, hidden_size=128)
    loaded = import_model_from_gguf(float_model, export_gguf(model, tmp_path, "m", LANGUAGE_MODEL))
    # A float16 layer of a float16 model is a plain layer of it.
    assert quantized_layers(loaded).keys() == (set() if scheme == "float16" else quantized_layers(model).keys())
    if scheme.startswith("uint4"):
        torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=2e-3)
    else:
        assert torch.equal(logits(loaded), logits(model))


# Architectures --------------------------------------------------------------------------------------------------------


def test_each_row_was_tried_with_llama_cpp() -> None:
    assert set(ARCHITECTURES) == set(CONFIGS) and set(known_facts()) == CONFIGS.keys() | VARIANTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS])
def test_a_file_is_that_of_which_llama_cpp_computed_the_logits(name: str, tmp_path: Path) -> None:
    """Names, order of rows, values and metadata are those of `python -m benchmarks.gguf_rows`."""
    write_gguf(filled(name), tmp_path / "m.gguf", LANGUAGE_MODEL)
    found, expected = facts_of(tmp_path / "m.gguf"), known_facts()[name]
    factors = [tensor for tensor in expected["tensors"] if tensor.startswith("rope_")]
    for tensor in factors:
        assert found["tensors"].pop(tensor) == pytest.approx(expected["tensors"].pop(tensor), rel=1e-6)
    for key, value in expected["metadata"].items():
        assert found["metadata"].pop(key) == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    assert found == expected | {"metadata": {}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECURRENT, "granitemoehybrid, dense"])
def test_tensors_that_files_hold_in_another_form_are_read_back(name: str, tmp_path: Path) -> None:
    kind, options = VARIANTS.get(name, (name, {}))
    model = build(kind, **options)
    quantizer = ModelQuantizer(gguf_config(model, "q8_0"))
    model = quantizer.freeze(quantizer.quantize_model(model))
    file = export_gguf(model, tmp_path, "m", LANGUAGE_MODEL)
    loaded = import_model_from_gguf(build(kind, seed=5, **options), file)
    assert torch.equal(logits(loaded), logits(model))


@needs_transformers("5.13", "holds the experts of Granite as those of other models")
def test_half_of_a_matrix_that_is_two_tensors_is_no_model(tmp_path: Path) -> None:
    model = build("granitemoeshared")
    file = tmp_path / "m.gguf"
    unfuse_experts(model, lambda layer: True)
    write_gguf(model.bfloat16(), file, LANGUAGE_MODEL)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up_shexp.weight", b"blk.1.ffn_xx_shexp.weight"))
    with pytest.raises(FormatError, match=r"shared_mlp\.input_linear\.weight needs 2 tensors of the file"):
        import_model_from_gguf(build("granitemoeshared", BF16), file)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """Biases of the file, of which transformers' config of it knows nothing."""
    model = build("llama", BF16, attention_bias=True)
    write_gguf(model, tmp_path / "m.gguf", LANGUAGE_MODEL)
    plain = build("llama", BF16, attention_bias=False)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(
        FormatError, match=r"8 tensors that this llama model has no place for, blk\.0\.attn_q\.bias the"
    ):
        import_model_from_gguf(plain, tmp_path / "m.gguf")
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "the activation relu": ("llama", {"hidden_act": "relu"}),
    "the activation gelu": ("qwen2", {"hidden_act": "gelu"}),
    "type dynamic": ("llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 2.0}}),
    "type llama3": ("qwen2", {"rope_parameters": LLAMA3}),
    "truncate=False": ("qwen2", {"rope_parameters": YARN | {"truncate": False}}),
    "another rope_theta": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": PLAIN | {"rope_theta": 500.0}, "full_attention": PLAIN}},
    ),
    "full attention in layers other than each 6th": ("gemma3_text", {"layer_types": ["full_attention"] * 6}),
    "full attention in layers other than each 2th": ("gemma2", {"layer_types": ["sliding_attention"] * 2}),
    "query_pre_attn_scalar other than 16": ("gemma2", {"query_pre_attn_scalar": 32}),
    "without softcapping": ("gemma2", {"final_logit_softcapping": None}),
    "rotations in layers": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "attention_bias=True": ("qwen3", {"attention_bias": True}),
    "tie_word_embeddings=True": ("olmo2", {"tie_word_embeddings": True}),
    "clip_qkv": ("olmo", {"clip_qkv": 0.05}),
    "heads of other than": ("cohere2", {"head_dim": 32}),
    "fewer heads of keys": ("olmoe", {"num_key_value_heads": 1}),
    "keys of more than one head": ("gpt_bigcode", {"multi_query": False}),
    "layers without biases": ("starcoder2", {"use_bias": False}),
    "chosen by groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2}),
    "swiglu_alpha": ("gpt_oss", {"swiglu_alpha": 2.0}),
    "alibi": ("falcon", {"alibi": True}),
    "bias=True": ("falcon", {"bias": True}),
    "one after the other": ("falcon", {"parallel_attn": False}),
    "mscale other than mscale_all_dim": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}),
    "of other than 26 or 27 layers": ("deepseek_v2", {"q_lora_rank": None}),
    "rms_norm_eps": ("deepseek_v3", {"rms_norm_eps": 1e-3}),
    "rotations of halves": ("deepseek_v3", {"rope_interleave": False}),
    "attention_chunk_size=64": ("llama4_text", {"attention_chunk_size": 64}),
    "normed queries with 128": ("llama4_text", {"use_qk_norm": False}),
    "another temperature": ("llama4_text", {"attn_temperature_tuning": False}),
    "experts in other layers": ("llama4_text", {"moe_layers": [0, 1, 2, 3]}),
    "layers without experts after": ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 2}),
    "full attention in other layers": ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}),
    "values of another length": ("qwen3_next", {"linear_value_head_dim": 32}),
    "fewer keys than values": ("qwen3_5_text", {"linear_num_key_heads": 2}),
    "biases of other projections": ("mamba", {"use_bias": True}),
    "an epsilon of norms": ("falcon_mamba", {"mixer_rms_eps": 1e-3}),
    "time_step_limit": ("mamba2", {"time_step_limit": (0.1, 0.2)}),
    "conv_bias=True": ("lfm2", {"conv_bias": True}),
    "other than 64 layers": ("exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_llama_cpp_would_not_compute_is_refused(reason: str) -> None:
    from transformers import AutoConfig

    kind, options = REFUSED[reason]
    assert architecture_of(AutoConfig.for_model(kind, **CONFIGS[kind]))
    with pytest.raises(NotSupportedError, match=f"A GGUF file of a {kind} model has no place for .*{reason}"):
        architecture_of(AutoConfig.for_model(kind, **(CONFIGS[kind] | options)))


@pytest.mark.slow
def test_the_context_ends_where_a_window_does_that_readers_do_not_know(tmp_path: Path) -> None:
    file = export_gguf(quantized("int8_wo", "phi3", sliding_window=24), tmp_path, "m", LANGUAGE_MODEL)
    assert metadata(file)["phi3.context_length"] == 24 and "phi3.attention.sliding_window" not in metadata(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme", "dtype"),
    [*((kind, "int4_wo_32", F16) for kind in ARCHITECTURES), *((kind, "uint4_wo_32", F32) for kind in THEIRS)],
)
def test_transformers_reads_equal_logits(kind: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(scheme, kind, dtype)
    file = export_gguf(model, tmp_path, "model", LANGUAGE_MODEL)
    assert metadata(file)["general.architecture"] == ARCHITECTURES[kind].arch
    loaded = import_model_from_gguf(build(kind, dtype, seed=5), file)
    for result in (loaded, *((theirs(file, model, dtype),) if kind in THEIRS else ())):
        if scheme == "int4_wo_32" and kind != "gpt2" and not ARCHITECTURES[kind].mixture:
            assert torch.equal(logits(result), logits(model))
        else:
            # Q4_1: a float32 scale and the offset are rounded to float16. The weight of a Conv1D lies transposed in
            # memory, and a product over it sums in another order; so do experts in one tensor.
            torch.testing.assert_close(logits(result), logits(model), rtol=0, atol=3e-3)


@pytest.mark.slow
def test_the_trained_model_keeps_its_logits_and_its_config(tmp_path: Path) -> None:
    """Without any config from us: what transformers finds in the file is all that it needs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=F16)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32"))
    model = quantizer.freeze(quantizer.quantize_model(model))
    file = ModelExporter(tmp_path).export_gguf_model(model, LANGUAGE_MODEL, "trained")
    assert file == tmp_path / "trained.gguf"
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="trained.gguf", dtype=F16)), logits(model)
    )


FILE_TYPES = {"uint4_wo_32": 3, "int4_wo_64": 2, "int8_wo": 7, "mxfp4_weight_only": 38, "float16": 1, "bfloat16": 32}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FILE_TYPES)
def test_file_type_and_hyperparameters(scheme: str, tmp_path: Path) -> None:
    file = export_gguf(quantized(scheme), tmp_path, "model", LANGUAGE_MODEL)
    found = metadata(file)
    assert found["general.file_type"] == FILE_TYPES[scheme]
    expected = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "vocab_size": 2048,
    }
    assert {key: found[f"llama.{key}"] for key in expected} == expected
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(file).items()}
    assert (
        kinds["blk.0.ffn_down.weight"]
        == {3: "Q4_1", 2: "Q4_0", 7: "Q8_0", 38: "MXFP4", 1: "F16", 32: "BF16"}[FILE_TYPES[scheme]]
    )
    assert kinds["blk.1.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "F32"


@pytest.mark.slow
def test_queries_and_keys_of_llama_lie_in_the_order_of_its_readers(tmp_path: Path) -> None:
    """Rows 0 and size / 2 of a head, which rotate together, become neighbours."""
    model = quantized("int4_wo_32", dtype=F16)
    held = tensors(export_gguf(model, tmp_path, "model", LANGUAGE_MODEL))
    for stored, name in {"attn_q": "q_proj", "attn_k": "k_proj"}.items():
        weight = model.get_submodule(f"model.layers.0.self_attn.{name}").weight
        tensor = held[f"blk.0.{stored}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(F16)
        for head in range(weight.shape[0] // 16):
            for pair in range(8):
                for half in range(2):
                    assert torch.equal(values[head * 16 + 2 * pair + half], weight[head * 16 + half * 8 + pair])


@pytest.mark.slow
def test_quantized_embeddings_travel_too(tmp_path: Path) -> None:
    layer = config_of_layer(SCHEMES["int8_wo"])
    config = QConfig(global_quant_config=layer, layer_quant_config={"*embed_tokens": layer}, exclude=["lm_head"])
    model = ModelQuantizer(config).quantize_model(build("llama", F16))
    file = export_gguf(model, tmp_path, "model", LANGUAGE_MODEL)
    assert tensors(file)["token_embd.weight"].tensor_type.name == "Q8_0"
    assert torch.equal(logits(import_model_from_gguf(build("llama", F16, seed=5), file)), logits(model))


@pytest.mark.slow
def test_experts_of_a_block_are_one_tensor(tmp_path: Path) -> None:
    """(experts, rows, columns), each expert's rows as its layer holds them; the router in float32."""
    model = quantized("int4_wo_32", "mixtral", F16)
    held = tensors(export_gguf(model, tmp_path, "model", LANGUAGE_MODEL))
    for stored, leaf in {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}.items():
        tensor = held[f"blk.1.{stored}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(F16)
        layers = [model.get_submodule(f"model.layers.1.mlp.experts.{i}.{leaf}") for i in range(4)]
        assert torch.equal(values, torch.stack([layer.weight for layer in layers]))
    assert held["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"


@pytest.mark.slow
def test_fused_heads_lie_apart(tmp_path: Path) -> None:
    """Queries of all heads, then keys, then values, where GPT-NeoX has all three of a head side by side."""
    model = quantized("int4_wo_32", "gpt_neox", F16)
    tensor = tensors(export_gguf(model, tmp_path, "model", LANGUAGE_MODEL))["blk.0.attn_qkv.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(F16)
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight
    for part in range(3):
        for head in range(4):
            there, here = part * 64 + head * 16, head * 48 + part * 16
            assert torch.equal(values[there : there + 16], weight[here : here + 16])


# Mixes of block types -------------------------------------------------------------------------------------------------

MIX_SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8}
MIX_TYPES = {"q2_k": ("Q2_K", 10), "q3_k_s": ("Q3_K_S", 11), "q4_k_s": ("Q4_K_S", 14), "iq4_xs": ("IQ4_XS", 30)}


def mixed(mix: str, kind: str = "llama", algorithm: str | None = None, **options: Any) -> Any:
    model = build(kind, F32, **(MIX_SIZES | options))
    quantizer = ModelQuantizer(gguf_config(model, mix, algorithm))
    return quantizer.freeze(quantizer.quantize_model(model, [IDS] if algorithm else None))


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIX_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_mix_is_read_back_to_the_bit(mix: str, tied: bool, tmp_path: Path) -> None:
    model = mixed(mix, attention_bias=False, tie_word_embeddings=tied)
    file = export_gguf(model, tmp_path, "model", LANGUAGE_MODEL)
    held = tensors(file)
    assert metadata(file)["general.file_type"] == MIX_TYPES[mix][1]
    assert metadata(file)["general.name"] == LANGUAGE_MODEL.name
    assert ("output.weight" in held) is not tied
    assert held["token_embd.weight" if tied else "output.weight"].tensor_type.name == "Q6_K"
    float_model = build("llama", seed=5, **MIX_SIZES, attention_bias=False, tie_word_embeddings=tied)
    for result in (import_model_from_gguf(float_model, file), *([theirs(file, model)] if mix != "iq4_xs" else ())):
        assert torch.equal(logits(result), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "phi3", "gpt2"])
def test_mixes_of_other_architectures(kind: str, tmp_path: Path) -> None:
    """Queries, keys and values in one matrix (phi3), and matrices that lie transposed (gpt2)."""
    sizes = {"n_embd": 256, "hidden_size": 256} if kind == "gpt2" else MIX_SIZES
    model = mixed("q4_k_m", kind, **sizes)
    file = export_gguf(model, tmp_path, "model", LANGUAGE_MODEL)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(file).items()}
    assert kinds["blk.0.attn_output.weight"] == "Q4_K" and kinds["blk.0.attn_norm.weight"] == "F32"
    if kind != "qwen3":
        assert kinds["blk.1.attn_qkv.weight"] == "Q5_K"
    assert kinds.get("position_embd.weight", "F32") == "F32"
    loaded = import_model_from_gguf(build(kind, seed=5, **(MIX_SIZES | sizes)), file)
    # gpt2: a product over a transposed matrix sums in another order.
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4 if kind == "gpt2" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["importance", "gptq", "qronos"])
def test_algorithms_round_on_the_grids_of_block_types(algorithm: str, tmp_path: Path) -> None:
    """The file decodes to what was solved, and the solution is nearer on the data than rounding is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (TEXT / "calibration.txt").read_text(encoding="utf-8")[:40000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(LANGUAGE_MODEL)(text)["input_ids"])[: 32 * 256].reshape(8, 4, 256)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=F32).eval()

    def divergence(model: Any) -> float:
        reference, total = load(), 0.0
        for batch in ids:
            ours, floats = (torch.log_softmax(m(batch).logits, -1) for m in (model, reference))
            total += float((floats.exp() * (floats - ours)).sum(-1).mean())
        return total / len(ids)

    found = {}
    for name in (None, algorithm):
        model = load()
        quantizer = ModelQuantizer(gguf_config(model, "q2_k", name))
        model = quantizer.freeze(quantizer.quantize_model(model, list(ids)))
        with torch.no_grad():
            found[name] = divergence(model)
    assert found[algorithm] < found[None]
    loaded = import_model_from_gguf(load(), export_gguf(model, tmp_path, "m", LANGUAGE_MODEL))
    assert torch.equal(logits(loaded), logits(model))


# Tokenizers -----------------------------------------------------------------------------------------------------------

PROSE = " ".join((TEXT / "heldout.txt").read_text(encoding="utf-8").split()[:300]) + " 12345 it's naïve\n\n  x = [1]"


def same_tokens(file: Path, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert (
        loaded(PROSE, add_special_tokens=False)["input_ids"] == tokenizer(PROSE, add_special_tokens=False)["input_ids"]
    )
    assert loaded.eos_token == tokenizer.eos_token and loaded.bos_token == tokenizer.bos_token


def train(folder: Path, split: Any) -> Any:
    """A small byte-level BPE tokenizer, saved to the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([PROSE], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return fast


@pytest.mark.slow
def test_the_byte_level_tokenizer_comes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = export_gguf(quantized("int8_wo"), tmp_path, "model", LANGUAGE_MODEL)
    same_tokens(file, AutoTokenizer.from_pretrained(LANGUAGE_MODEL))
    found = metadata(file)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.add_eos_token"] is False
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert len(found["tokenizer.ggml.merges"]) == 1789


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dbrx", "qwen2"])
def test_the_rule_that_splits_words_is_named(name: str, tmp_path: Path) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    rule = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = train(tmp_path / "tokenizer", rule)
    file = export_gguf(quantized("int8_wo"), tmp_path, "model", tmp_path / "tokenizer")
    assert metadata(file)["tokenizer.ggml.pre"] == name
    same_tokens(file, tokenizer)
    # The tokenizer has fewer tokens than the model has rows.
    assert metadata(file)["tokenizer.ggml.tokens"][-1] == "[PAD2047]"


# Bad input ------------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_verified_are_refused(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    opt = OPTForCausalLM(
        OPTConfig(vocab_size=64, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2)
    )
    model = ModelQuantizer(LLMTemplate.get("opt").get_config("int8_wo")).quantize_model(opt)
    with pytest.raises(NotSupportedError, match=r"'opt' models .*Possible: llama, mistral, qwen2"):
        export_gguf(model, tmp_path, "opt", LANGUAGE_MODEL)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(NotSupportedError, match="rotary scaling of type dynamic"):
        export_gguf(quantized("int8_wo", rope_parameters=scaled), tmp_path, "m", LANGUAGE_MODEL)
    plain = ModelQuantizer(QConfig(global_quant_config=config_of_layer(SCHEMES["int8_wo"]))).quantize_model(mlp())
    with pytest.raises(ConfigError, match="save_params"):
        export_gguf(plain, tmp_path, "m", LANGUAGE_MODEL)
    assert not list(tmp_path.iterdir())


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"down_proj: .* blocks of 32; 136 values"):
        export_gguf(quantized("int8_wo", intermediate_size=136), tmp_path, "m", LANGUAGE_MODEL)


def test_tokenizers_that_gguf_has_no_name_for_are_refused(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    model = quantized("int8_wo")
    train(tmp_path / "words", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)]))
    with pytest.raises(NotSupportedError, match=r"text is split by .*Whitespace.*, for which llama.cpp has no name"):
        export_gguf(model, tmp_path / "out", "m", tmp_path / "words")
    with pytest.raises(FormatError, match="no tokenizer"):
        export_gguf(model, tmp_path / "out", "m", tmp_path)
    small = quantized("int8_wo", vocab_size=512)
    with pytest.raises(FormatError, match="2048 tokens; the model has 512"):
        export_gguf(small, tmp_path / "out", "m", LANGUAGE_MODEL)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_file_that_is_there_is_kept_unless_replaced(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    model = quantized("int8_wo")
    with pytest.raises(OutputExistsError, match="exists already"):
        export_gguf(model, tmp_path, "m", LANGUAGE_MODEL)
    assert (tmp_path / "m.gguf").read_text() == "mine"
    export_gguf(model, tmp_path, "m", LANGUAGE_MODEL, overwrite=True)
    assert tensors(tmp_path / "m.gguf")
    export_gguf(model, tmp_path, "m", LANGUAGE_MODEL)
    with pytest.raises(OutputExistsError, match="exists already"):
        export_gguf(model, tmp_path, "m", LANGUAGE_MODEL, overwrite=False)


@pytest.mark.slow
def test_bad_files_are_refused_and_the_model_stays(tmp_path: Path) -> None:
    file = export_gguf(quantized("int8_wo"), tmp_path, "m", LANGUAGE_MODEL)
    qwen = build("qwen2")
    with pytest.raises(FormatError, match="architecture 'llama', but the model needs 'qwen2'"):
        import_model_from_gguf(qwen, file)
    wide = build("llama", intermediate_size=192)
    with pytest.raises(FormatError, match="has the shape"):
        import_model_from_gguf(wide, file)
    assert not quantized_layers(wide)
    data = file.read_bytes()
    for damage in (b"no gguf file", data[:2000], data[:-5000]):
        file.write_bytes(damage)
        with pytest.raises(FormatError, match="no GGUF file, or a damaged one"):
            import_model_from_gguf(build("llama"), file)


def test_without_the_package_the_pip_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("int8_wo")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"openquark\[gguf\]"):
        export_gguf(model, tmp_path, "m", LANGUAGE_MODEL)


def test_a_folder_without_its_own_tokenizer_files(tmp_path: Path) -> None:
    shutil.copyfile(LANGUAGE_MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.copyfile(LANGUAGE_MODEL / "config.json", tmp_path / "config.json")
    if is_transformers_version_lower(READS_TOKENIZER_FILES):
        with pytest.raises(NotSupportedError, match="no tokenizer_config.json, without which transformers 5.5"):
            export_gguf(quantized("int8_wo"), tmp_path, "m", tmp_path)
    else:
        assert export_gguf(quantized("int8_wo"), tmp_path, "m", tmp_path).exists()


@pytest.mark.parametrize(
    ("hidden", "said"), [(64, "all of 16 layers have rows that are no multiple of 256 values, and get Q5_0"), (256, "")]
)
def test_a_mix_whose_types_do_not_fit_says_what_the_layers_get(
    hidden: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from quark.torch.writers.gguf.mix_config import gguf_config
    from tests.models.families import family

    with caplog.at_level("WARNING", "quark"):
        gguf_config(family("llama", hidden_size=hidden, intermediate_size=2 * hidden), "q4_k_m")
    assert said in caplog.text and bool(said) == bool(caplog.text)
