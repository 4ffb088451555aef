"""The awq and fp8 folders: tensors and config as documented, decoded by other programs and by formulas written here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quark.core.granularity import PerBlock, PerGroup, PerTensor
from quark.core.spec import LayerSpec, ScaleType, spec
from quark.errors import ConfigError, FormatError, NotSupportedError, ShapeError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from tests.models.checkpoints import change_config, frozen, logits, stored, weights
from tests.models.torch_zoo import tiny_llama
from tests.models.versions import FP8_WITHOUT_A_GPU, needs_transformers

F8, I32, F16, F32 = torch.float8_e4m3fn, torch.int32, torch.float16, torch.float32
DOWN = "model.layers.0.mlp.down_proj"


def nibbles(words: torch.Tensor) -> np.ndarray:
    """(rows, n) words to (rows, 8 n) codes: bits 4 k hold column ORDER[k] of each 8 (the kernels of AWQ)."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    array = words.numpy().view(np.uint32)
    out = np.empty((array.shape[0], array.shape[1] * 8), np.int64)
    for k, column in enumerate(order):
        out[:, column::8] = (array >> (4 * k)) & 15
    return out


@pytest.mark.parametrize("scheme", ["uint4_wo_32", "int4_wo_32", "uint4_wo_128", "int4_wo_64"])
def test_awq_holds_the_quantized_weights(scheme: str, tmp_path: Path) -> None:
    model, group = frozen(scheme, F16), int(scheme.rsplit("_", 1)[1])
    tensors, config = stored(export_safetensors(model, tmp_path / "out", "awq"))
    for name, weight in weights(model).items():
        qweight, qzeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        rows, columns = weight.shape
        assert (qweight.dtype, tuple(qweight.shape)) == (I32, (columns, rows // 8))
        assert (qzeros.dtype, tuple(qzeros.shape)) == (I32, (columns // group, rows // 8))
        assert (scales.dtype, tuple(scales.shape)) == (F16, (columns // group, rows))
        q, z = nibbles(qweight), nibbles(qzeros).repeat(group, 0)
        decoded = (q - z).astype(np.float32) * scales.float().numpy().repeat(group, 0)
        assert np.array_equal(decoded.T.astype(np.float16), weight.numpy())
    assert not any(n.endswith("proj.weight") for n in tensors) and "lm_head.weight" in tensors
    export = config.pop("export")
    assert config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": ["lm_head"],
        "version": "gemm",
        "zero_point": True,
        "pack_method": "reorder",
    }
    assert export["pack_method"] == "reorder"


def test_another_programs_converter_turns_awq_into_the_compressed_tensors_folder(tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    model = frozen("uint4_wo_32", F16)
    tensors, config = stored(export_safetensors(model, tmp_path / "awq", "awq"))
    converted = AutoAWQConverter.from_autoawq_config(config).process(dict(tensors))
    ours, _ = stored(export_safetensors(model, tmp_path / "packed", "compressed-tensors"))
    assert converted.keys() == ours.keys()
    assert all(torch.equal(converted[name], ours[name]) for name in ours)


def test_transformers_reads_the_awq_config(tmp_path: Path) -> None:
    from transformers import AutoConfig, AwqConfig

    folder = export_safetensors(frozen("uint4_wo_64", F16), tmp_path / "out", "awq")
    config = AwqConfig(**AutoConfig.from_pretrained(folder).quantization_config)
    assert (config.bits, config.group_size, config.zero_point, config.format) == (4, 64, True, "gemm")


def test_awq_refuses_mixed_schemes_and_ragged_layers(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("uint4_wo_32", layer_config={"*.down_proj": "uint4_wo_64"})
    model = ModelQuantizer(config).quantize_model(tiny_llama())
    with pytest.raises(NotSupportedError, match="one scheme for all"):
        export_safetensors(model, tmp_path / "out", "awq")
    with pytest.raises(ShapeError, match=r"gate_proj: .* 260 leave a rest"):
        config = LLMTemplate.get("llama").get_config("uint4_wo_32", exclude_layers=["lm_head", "*.down_proj"])
        export_safetensors(
            ModelQuantizer(config).quantize_model(tiny_llama(intermediate_size=260)), tmp_path / "out", "awq"
        )
    with pytest.raises(ConfigError, match="has one form only"):
        export_safetensors(frozen("uint4_wo_32"), tmp_path / "out", "awq", pack_method="order")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("entry", "value"), [("bits", 8), ("version", "gemv"), ("group_size", None), ("zero_point", False)]
)
def test_awq_of_another_form_is_refused(entry: str, value: object, tmp_path: Path) -> None:
    folder = export_safetensors(frozen("uint4_wo_32"), tmp_path / "out", "awq")
    change_config(folder, **{entry: value})
    with pytest.raises(FormatError, match="awq"):
        import_model_from_safetensors(tiny_llama(), folder)


# FP8 -----------------------------------------------------------------------------------------------------------------

PER_TENSOR = spec("fp8_e4m3", PerTensor())
LIVE = spec("fp8_e4m3", PerTensor(), dynamic=True)
TILES = LayerSpec(weight=spec("fp8_e4m3", PerBlock((32, 64))), input=spec("fp8_e4m3", PerGroup(-1, 64), dynamic=True))
FP8 = {
    "static": LayerSpec(weight=PER_TENSOR, input=PER_TENSOR),
    "dynamic": LayerSpec(weight=PER_TENSOR, input=LIVE),
    None: LayerSpec(weight=PER_TENSOR),
}


@pytest.mark.parametrize("scheme", FP8, ids=str)
def test_fp8_with_one_scale(scheme: str | None, tmp_path: Path) -> None:
    model = frozen(FP8[scheme], torch.bfloat16)
    folder = export_safetensors(model, tmp_path / "out", "fp8")
    tensors, config = stored(folder)
    config.pop("export")
    assert config == {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": None,
    }
    names = {n.removeprefix(f"{DOWN}.") for n in tensors if n.startswith(DOWN)}
    assert names == {"weight", "weight_scale"} | ({"input_scale"} if scheme == "static" else set())
    for name, weight in weights(model).items():
        code, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        assert (code.dtype, scale.dtype, scale.shape) == (F8, F32, ())
        assert torch.equal((code.float() * scale).to(torch.bfloat16), weight)
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=torch.bfloat16), folder)
    assert torch.equal(logits(loaded), logits(model))


@FP8_WITHOUT_A_GPU
def test_transformers_and_a_dequantizer_load_fp8_tiles(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = frozen(TILES)
    folder = export_safetensors(model, tmp_path / "out", "fp8")
    tensors, config = stored(folder)
    assert config["weight_block_size"] == [32, 64] and config["activation_scheme"] == "dynamic"
    for name, weight in weights(model).items():
        scale = tensors[f"{name}.weight_scale_inv"].repeat_interleave(32, 0).repeat_interleave(64, 1)
        assert torch.equal(tensors[f"{name}.weight"].float() * scale, weight)
    # Without a GPU transformers decodes the weights and does not quantize the inputs.
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(theirs.get_submodule(name).weight, weight) for name, weight in weights(model).items())
    loaded = import_model_from_safetensors(tiny_llama(seed=9), folder)
    assert torch.equal(logits(loaded), logits(model))


@needs_transformers("5.10.1", "decodes FP8 whose last tiles are cut")
@FP8_WITHOUT_A_GPU
def test_transformers_decodes_tiles_that_the_rows_of_a_weight_cut(tmp_path: Path) -> None:
    """Keys and values have 64 rows here, half a tile."""
    from transformers import AutoModelForCausalLM

    model = frozen("fp8_block_128", torch.bfloat16)
    folder = export_safetensors(model, tmp_path / "out", "fp8")
    tensors, _ = stored(folder)
    assert tensors["model.layers.0.self_attn.k_proj.weight_scale_inv"].shape == (1, 1)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert all(torch.equal(theirs.get_submodule(name).weight, weight) for name, weight in weights(model).items())
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(9, torch.bfloat16), folder)), logits(model))


@pytest.mark.parametrize("form", ["fp8", "compressed-tensors"])
def test_tiles_that_cut_the_inputs_are_refused(form: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("fp8_block_128")
    model = ModelQuantizer(config).quantize_model(tiny_llama(intermediate_size=192))
    with pytest.raises(ShapeError, match=r"down_proj: .* whole groups of 128; a row has 192 values"):
        export_safetensors(model, tmp_path / "out", form)
    folder = export_safetensors(model, tmp_path / "quark")
    loaded = import_model_from_safetensors(tiny_llama(9, intermediate_size=192), folder)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(weight=spec("fp8_e5m2"), input=spec("fp8_e5m2")),
        LayerSpec(weight=PER_TENSOR, input=spec("int8")),
        LayerSpec(weight=PER_TENSOR, bias=spec("int8")),
        LayerSpec(weight=TILES.weight),
        LayerSpec(weight=TILES.weight, input=LIVE),
    ],
    ids=str,
)
def test_fp8_refuses_what_its_readers_do_not_compute(layer: LayerSpec, tmp_path: Path) -> None:
    refusal = r"fp8 format cannot hold .* It takes the schemes fp8, fp8_block_128, fp8_wo\."
    with pytest.raises(NotSupportedError, match=refusal):
        export_safetensors(frozen(layer), tmp_path / "out", "fp8")
    assert not list(tmp_path.iterdir())


def test_fp8_without_quantized_inputs_is_refused_for_servers_and_said_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = frozen("fp8_wo", torch.bfloat16)
    for reader in ("vllm", "sglang"):
        with pytest.raises(NotSupportedError, match="activation_scheme null"):
            export_safetensors(model, tmp_path / reader, "fp8", reader=reader)
    assert not any(tmp_path.iterdir())
    export_safetensors(model, tmp_path / "out", "fp8")
    assert "activation_scheme null" in caplog.text


@pytest.mark.parametrize("form", ["awq", "fp8", "compressed-tensors"])
def test_import_builds_the_model_itself_and_names_a_missing_tensor(form: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = frozen("fp8" if form == "fp8" else "uint4_wo_32", torch.bfloat16)
    folder = export_safetensors(model, tmp_path / "out", form)
    assert torch.equal(logits(import_model_from_safetensors(None, folder, attn_implementation="sdpa")), logits(model))
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in sorted(tensors) if name.endswith(("qzeros", "input_scale", "zero_point")))
    save_file({n: t for n, t in tensors.items() if n != gone}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"lacks 1 tensors of the model: model\.layers\.0"):
        import_model_from_safetensors(tiny_llama(dtype=torch.bfloat16), folder)


@pytest.mark.parametrize("scale_type", [ScaleType.float32, ScaleType.float16])
def test_awq_refuses_scales_of_another_dtype_than_the_model(scale_type: ScaleType, tmp_path: Path) -> None:
    layer = LayerSpec(weight=spec("uint4", PerGroup(-1, 32), symmetric=False, scale_type=scale_type))
    with pytest.raises(NotSupportedError, match=r"holds scales in the dtype of the model, torch\.bfloat16; these are"):
        export_safetensors(frozen(layer, torch.bfloat16), tmp_path / "out", "awq")
    assert not list(tmp_path.iterdir())
