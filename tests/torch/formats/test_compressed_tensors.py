"""The compressed-tensors folder, with transformers and the library of that name as its readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quark.core.quantize as quantize_module
from quark.base.libraries import installed_packages
from quark.base.libraries.compressed_tensors import THREE_BITS, undecoded_before
from quark.base.libraries.installed_packages import is_transformers_version_lower
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, spec
from quark.errors import FormatError, NotSupportedError, ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.formats import FORMATS
from tests.models.architectures import build
from tests.models.checkpoints import change_config, frozen, logits, stored, weights
from tests.models.torch_zoo import tiny_llama, token_batches
from tests.models.versions import needs_transformers, skip_where_undecoded

FORM = "compressed-tensors"
DOWN = "model.layers.0.mlp.down_proj"
I32, I64, U8, I8, F8 = torch.int32, torch.int64, torch.uint8, torch.int8, torch.float8_e4m3fn
F32, BF16 = torch.float32, torch.bfloat16
TAKEN = [name for name, layer in SCHEMES.items() if FORMATS[FORM].refusal(layer) is None]
FP4_DECODED_AS_BF16 = ("nvfp4", "nvfp4_weight_only", "fp4_block16_scale_e4m3")
"""Schemes whose two levels of scales the library multiplies out in bfloat16."""


def theirs(folder: Path, dequantize: bool = False) -> Any:
    """The folder as transformers and the library load it; `dequantize` decodes the weights while loading."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    return AutoModelForCausalLM.from_pretrained(folder, **config)


def same_weights(loaded: Any, model: Any, rtol: float = 0.0) -> None:
    for name, weight in weights(model).items():
        torch.testing.assert_close(loaded.get_submodule(name).weight, weight, rtol=rtol, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", TAKEN)
def test_transformers_decodes_the_weights_of_every_scheme(scheme: str, tmp_path: Path) -> None:
    skip_where_undecoded(scheme)
    for dtype in (F32, BF16):
        if (scheme, dtype) == ("int8", BF16):
            continue  # transformers rounds the float32 scale of a weight to bfloat16
        model = frozen(scheme, dtype)
        folder = export_safetensors(model, tmp_path / str(dtype), FORM)
        same_weights(theirs(folder, dequantize=True), model, 2**-8 if scheme in FP4_DECODED_AS_BF16 else 0.0)


EXACT = [n for n in TAKEN if SCHEMES[n].input is None and n.startswith("int")]
EXACT += ["fp8", "ptpc_fp8", "fp8_block_128", "int4_fp8_128"]


@pytest.mark.parametrize("scheme", EXACT)
def test_transformers_computes_equal_logits(scheme: str, tmp_path: Path) -> None:
    skip_where_undecoded(scheme)
    model = frozen(scheme)
    assert torch.equal(logits(theirs(export_safetensors(model, tmp_path / "out", FORM))), logits(model))


@pytest.mark.parametrize(
    ("release", "scheme", "first"),
    [([0, 17], "int3_wo_128", "0.18"), ([0, 18], "fp8_block_128", "0.19"), ([0, 19], "mxfp6_e2m3", "0.20"),
     ([0, 18], "int3_wo_128", None), ([0, 17], "int4_wo_128", None)],
)  # fmt: skip
def test_what_the_installed_release_does_not_decode_is_said(
    release: list[int], scheme: str, first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(installed_packages, "_version", lambda name: release if "compressed" in name else [9])
    export_safetensors(frozen(scheme, BF16), tmp_path / "out", FORM)
    assert (f"from {first} on it does" in capfd.readouterr().err) == (first is not None)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", ["int4_wo_32", pytest.param("int8_wo", marks=pytest.mark.slow)])
def test_a_quantized_head_is_named_and_found(head: str, tied: bool, tmp_path: Path) -> None:
    """vLLM does not take a head for a Linear, so that the group names it even where it is the only one."""
    config = LLMTemplate.get("llama").get_config("int4_wo_32", layer_config={"lm_head": head}, exclude_layers=[])
    model = ModelQuantizer(config).quantize_model(tiny_llama(tie_word_embeddings=tied))
    folder = export_safetensors(model, tmp_path / "out", FORM)
    tensors, stored_config = stored(folder)
    assert "lm_head.weight_packed" in tensors and "lm_head" not in stored_config["ignore"]
    groups = stored_config["config_groups"].values()
    (group,) = (group for group in groups if "lm_head" in group["targets"])
    assert group["weights"]["num_bits"] == int(head[3]) and (len(groups) == 2 or "Linear" in group["targets"])
    assert torch.equal(logits(theirs(folder)), logits(model))
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(9), folder)), logits(model))


def with_embedding(embedding: str, tied: bool = False) -> Any:
    config = LLMTemplate.get("llama").get_config("int4_wo_32", layer_config={"*embed_tokens": embedding})
    return ModelQuantizer(config).quantize_model(tiny_llama(tie_word_embeddings=tied))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["int4_wo_32", pytest.param("int8_wo", marks=pytest.mark.slow)])
def test_a_quantized_embedding_is_a_group_by_its_class(scheme: str, tied: bool, tmp_path: Path) -> None:
    """Where all layers have one scheme, too; of a head that is tied to it, the float weight is stored."""
    model = with_embedding(scheme, tied)
    folder = export_safetensors(model, tmp_path / "out", FORM, reader="vllm")
    tensors, stored_config = stored(folder)
    assert {"model.embed_tokens.weight_packed", "lm_head.weight"} < tensors.keys()
    targets = [group["targets"] for group in stored_config["config_groups"].values()]
    assert targets == [["Linear"], ["Embedding"]]
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(9), folder)), logits(model))
    # transformers decodes embeddings from 5.23 on, and all layers by the first group.
    if scheme == "int4_wo_32" and not is_transformers_version_lower("5.23"):
        assert torch.equal(logits(theirs(folder, dequantize=True)), logits(model))


def looked_up(tensors: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """Rows as the kernel of vLLM computes them (compressed_tensors_embedding.py), in its terms."""
    packed, scale = tensors["model.embed_tokens.weight_packed"], tensors["model.embed_tokens.weight_scale"]
    columns = torch.arange(packed.shape[1] * (32 // bits))
    words = packed[:, columns // (32 // bits)].long()
    codes = ((words >> (columns % (32 // bits) * bits)) & ((1 << bits) - 1)) - (1 << (bits - 1))
    return (codes.float() * scale.float().repeat_interleave(len(columns) // scale.shape[1], 1)).to(scale.dtype)


@pytest.mark.parametrize(("embedding", "bits"), [("int8_wo", 8), ("int4_wo_32", 4)])
def test_vllm_looks_up_the_rows_of_a_quantized_embedding(embedding: str, bits: int, tmp_path: Path) -> None:
    model = with_embedding(embedding)
    tensors, _ = stored(export_safetensors(model, tmp_path / "out", FORM, reader="vllm"))
    expected = model.get_submodule("model.embed_tokens")(torch.arange(len(tensors["lm_head.weight"])))
    assert torch.equal(looked_up(tensors, bits), expected)


def test_embeddings_are_refused_for_what_their_readers_do(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"'Embedding' object has no attribute 'weight'.*--for vllm"):
        export_safetensors(with_embedding("int4_wo_32"), tmp_path / "out", FORM)
    for scheme in ("uint4_wo_32", "mxfp4_weight_only"):
        with pytest.raises(NotSupportedError, match="embed_tokens: .*vLLM reads embeddings in symmetric integers"):
            export_safetensors(with_embedding(scheme), tmp_path / "out", FORM, reader="vllm")
    with pytest.raises(NotSupportedError, match="embed_tokens: .*transformers does not build one without its weight"):
        export_safetensors(with_embedding("int4_wo_32"), tmp_path / "out", "fp8", reader="vllm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "scheme", ["mxfp4", "mxfp4_weight_only", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3", "nvfp4_weight_only"]
)
def test_transformers_computes_equal_logits_of_fp4_in_bfloat16(scheme: str, tmp_path: Path) -> None:
    """The library decodes these weights to bfloat16, whatever the model."""
    skip_where_undecoded(scheme)
    model = frozen(scheme, BF16)
    assert torch.equal(logits(theirs(export_safetensors(model, tmp_path / "out", FORM))), logits(model))


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4_wa_64"])
def test_integer_inputs_differ_by_ties_only(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library divides by the scale, we multiply by its reciprocal: with a division here too, nothing differs."""
    model = frozen(scheme)
    expected = logits(theirs(export_safetensors(model, tmp_path / "out", FORM)))

    def divided(x: torch.Tensor, scale: torch.Tensor, zero: Any, spec: Any) -> torch.Tensor:
        return torch.round(x.float() / scale).clip(spec.dtype.min, spec.dtype.max)

    monkeypatch.setattr(quantize_module, "_encode", divided)
    assert torch.equal(logits(model), expected)


SHAPES = {
    "int4_wo_32": {"weight_packed": (I32, (128, 32)), "weight_scale": (BF16, (128, 8)), "weight_shape": (I64, (2,))},
    "uint4_wo_128": {
        "weight_packed": (I32, (128, 32)),
        "weight_scale": (BF16, (128, 2)),
        "weight_zero_point": (I32, (16, 2)),
        "weight_shape": (I64, (2,)),
    },
    "int4_wo_per_channel": {
        "weight_packed": (I32, (128, 32)),
        "weight_scale": (BF16, (128, 1)),
        "weight_shape": (I64, (2,)),
    },
    "int3_wo_128": {"weight_packed": (I32, (128, 24)), "weight_scale": (BF16, (128, 2)), "weight_shape": (I64, (2,))},
    "int8_dynamic": {"weight": (I8, (128, 256)), "weight_scale": (BF16, (128, 1))},
    "fp8": {"weight": (F8, (128, 256)), "weight_scale": (BF16, (1,)), "input_scale": (BF16, (1,))},
    "ptpc_fp8": {"weight": (F8, (128, 256)), "weight_scale": (BF16, (128, 1))},
    "mxfp4": {"weight_packed": (U8, (128, 128)), "weight_scale": (U8, (128, 8))},
    "nvfp4": {
        "weight_packed": (U8, (128, 128)),
        "weight_scale": (F8, (128, 16)),
        "weight_global_scale": (F32, (1,)),
        "input_global_scale": (F32, (1,)),
    },
}


@pytest.mark.parametrize("scheme", SHAPES)
def test_names_dtypes_and_shapes(scheme: str, tmp_path: Path) -> None:
    tensors, _ = stored(export_safetensors(frozen(scheme, BF16), tmp_path / "out", FORM))
    found = {n.removeprefix(f"{DOWN}."): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith(DOWN)}
    assert found == SHAPES[scheme]


def test_the_library_packs_the_same_words(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    older = undecoded_before({THREE_BITS}) is not None
    for scheme in ("int2_wo_64", *(() if older else ("int3_wo_128",)), "uint4_wo_32", "int8_wo"):
        tensors, _ = stored(export_safetensors(frozen(scheme), tmp_path / scheme, FORM))
        bits = int(scheme.removeprefix("u").removeprefix("int")[0])
        words = tensors[f"{DOWN}.weight_packed"]
        assert torch.equal(pack_to_int32(unpack_from_int32(words, bits, torch.Size((128, 256))), bits), words)


@pytest.mark.slow
def test_the_config_says_what_the_library_writes_itself(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    for scheme, preset in {"int4_wo_128": "W4A16", "fp8": "FP8", "int8_dynamic": "W8A8", "nvfp4": "NVFP4"}.items():
        _, config = stored(export_safetensors(frozen(scheme), tmp_path / scheme, FORM))
        read = QuantizationConfig(**config)
        assert (config["quant_method"], config["ignore"]) == (FORM, ["lm_head"])
        ours, named = read.config_groups["group_0"], QuantizationConfig(config_groups={preset: ["Linear"]})
        expected = named.config_groups[preset]
        for role in ("weights", "input_activations"):
            mine, wanted = getattr(ours, role), getattr(expected, role)
            fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype")
            assert (mine is None) == (wanted is None)
            assert mine is None or [getattr(mine, f) for f in fields] == [getattr(wanted, f) for f in fields]


def test_layers_of_several_schemes_are_groups_of_their_own(tmp_path: Path) -> None:
    rules = {"*.down_proj": "int8_wo", "*.q_proj": "fp8", "*.k_proj": "int4_wo_32"}
    config = LLMTemplate.get("llama").get_config("int4_wo_64", layer_config=rules)
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(tiny_llama(), token_batches()))
    folder = export_safetensors(model, tmp_path / "out", FORM)
    _, written = stored(folder)
    assert written["format"] == "mixed-precision" and len(written["config_groups"]) == 4
    assert torch.equal(logits(theirs(folder)), logits(model))
    loaded = import_model_from_safetensors(tiny_llama(seed=9), folder)
    assert torch.equal(logits(loaded), logits(model))


BEYOND_SCHEMES = [
    LayerSpec(weight=spec("uint8", PerChannel(0), symmetric=False)),
    LayerSpec(weight=spec("int4", PerTensor())),
    LayerSpec(weight=spec("int4", PerGroup(-1, -1))),
    LayerSpec(weight=spec("fp8_e4m3", PerBlock((32, 32))), input=spec("fp8_e4m3", PerGroup(-1, 32), dynamic=True)),
    LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("uint8", symmetric=False)),
    LayerSpec(weight=spec("int8", PerChannel(0)), input=spec("int8", PerToken(), symmetric=False, dynamic=True)),
    LayerSpec(weight=spec("fp8_e4m3", PerChannel(0))),
]


@needs_transformers("5.15", "decodes weights while loading (dequantize)")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layer", BEYOND_SCHEMES, ids=str)
def test_what_no_scheme_names_is_read_back(layer: LayerSpec, tmp_path: Path) -> None:
    model = frozen(layer)
    folder = export_safetensors(model, tmp_path / "out", FORM)
    same_weights(theirs(folder, dequantize=True), model)
    loaded = import_model_from_safetensors(tiny_llama(seed=9), folder)
    assert torch.equal(logits(loaded), logits(model))


def test_refusals(tmp_path: Path) -> None:
    for layer in (
        LayerSpec(weight=spec("int8"), output=spec("int8")),
        LayerSpec(weight=spec("fp8_e5m2")),
        LayerSpec(weight=spec("int8", PerChannel(1))),
    ):
        with pytest.raises(NotSupportedError, match="It takes the schemes"):
            export_safetensors(frozen(layer), tmp_path / "out", FORM)
    ragged = LayerSpec(weight=SCHEMES["mxfp4"].weight)
    with pytest.raises(ShapeError, match=r"down_proj: .*whole groups of 32; a row has 264"):
        export_safetensors(frozen(ragged, intermediate_size=264), tmp_path / "out", FORM)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"config_groups": {"a": {"targets": ["Embedding"], "weights": {"num_bits": 4, "group_size": 32}}}},
            "no group",
        ),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 5, "group_size": 32}}}}, "5-bit"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "without weights"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}, "format": "marlin-24"}}}, "marlin-24"),
    ],
)
def test_a_config_that_cannot_be_imported_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = export_safetensors(frozen("int4_wo_32"), tmp_path / "out", FORM)
    change_config(folder, **entries)
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(tiny_llama(), folder)


def test_layers_of_other_classes_that_are_linear_are_imported(tmp_path: Path) -> None:
    config = LLMTemplate.get("falcon").get_config("int8_dynamic")
    model = ModelQuantizer(config).quantize_model(build("falcon"))
    export_safetensors(model, tmp_path / "out", custom_mode="compressed-tensors")
    loaded = import_model_from_safetensors(build("falcon", seed=1), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


def test_weights_that_a_reader_would_take_for_transposed_are_refused(tmp_path: Path) -> None:
    """transformers loads such a folder into GPT-2 without an error, and computes something else."""
    model = ModelQuantizer(LLMTemplate.get("gpt2").get_config("int4_wo_32")).quantize_model(build("gpt2"))
    with pytest.raises(NotSupportedError, match="c_attn.*cannot hold a Conv1D"):
        export_safetensors(model, tmp_path / "out", custom_mode="compressed-tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"ignore": ["re:.*"]}, "`ignore` of the config names it"),
        ({"ignore": ["Linear"]}, "`ignore` of the config names it"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = export_safetensors(frozen("int4_wo_32"), tmp_path / "out", FORM)
    change_config(folder, **entries)
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(tiny_llama(), folder)


def test_a_shape_beside_codes_of_another_one_is_refused(tmp_path: Path) -> None:
    folder = export_safetensors(frozen("int4_wo_32"), tmp_path / "out", FORM)
    file = folder / "model.safetensors"
    save_file({**load_file(file), f"{DOWN}.weight_shape": torch.tensor([16, 128])}, file, {"format": "pt"})
    with pytest.raises(FormatError, match=rf"{DOWN}\.weight is said to have shape \(16, 128\)"):
        import_model_from_safetensors(tiny_llama(), folder)
