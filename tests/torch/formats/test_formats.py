"""The quark layout and the checkpoint folder: names, shapes, values, round trips, bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from quark.core.granularity import PerBlock, PerChannel, PerGroup
from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec, ScaleType, TensorSpec, spec
from quark.errors import ConfigError, FormatError, OutputError, OutputExistsError, QuarkError
from quark.torch import (
    LLMTemplate,
    ModelExporter,
    ModelImporter,
    ModelQuantizer,
    export_safetensors,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats.quark.layout import QuarkLayout
from quark.torch.layers.replace import quantized_layers
from tests.models.checkpoints import stored
from tests.models.torch_zoo import every_layer, mlp, tiny_llama, token_batches


def frozen(scheme: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A frozen tiny Llama (in the group sizes of the scheme) and its float twin's class."""
    model = tiny_llama(dtype=dtype, **options)
    config = LLMTemplate.get("llama").get_config(scheme)
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(model, token_batches()))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(token_batches(1)[0]).logits
    return out


F8, I32, U8, I8, BF16, F32 = torch.float8_e4m3fn, torch.int32, torch.uint8, torch.int8, torch.bfloat16, torch.float32
# For a Linear (O, I) = (128, 256) of a bfloat16 model: suffix -> dtype, shape (reference: the documented checkpoints).
STORED = {
    "fp8": {"": (F8, (128, 256)), "scale": (BF16, ()), "input_scale": (BF16, ())},
    "ptpc_fp8": {"": (F8, (128, 256)), "scale": (BF16, (128,))},
    "int8": {
        "": (I8, (128, 256)),
        "scale": (F32, ()),
        "zero_point": (I8, ()),
        "input_scale": (F32, ()),
        "input_zero_point": (I8, ()),
    },
    "int4_wo_32": {"": (I32, (256, 16)), "scale": (BF16, (8, 128)), "zero_point": (I32, (8, 16))},
    "uint4_wo_128": {"": (I32, (256, 16)), "scale": (BF16, (2, 128)), "zero_point": (I32, (2, 16))},
    "uint4_wo_per_channel": {"": (I32, (128, 32)), "scale": (BF16, (128,)), "zero_point": (I32, (16,))},
    "int4_wa_64": {"": (I32, (256, 16)), "scale": (BF16, (4, 128)), "zero_point": (I32, (4, 16))},
    "mxfp4": {"": (U8, (128, 128)), "scale": (U8, (128, 8))},
    "mxfp6_e2m3": {"": (U8, (128, 192)), "scale": (U8, (128, 8))},
    "mxfp6_e3m2": {"": (U8, (128, 192)), "scale": (U8, (128, 8))},
    "mxfp4_fp8": {"": (U8, (128, 128)), "scale": (U8, (128, 8)), "input_scale": (BF16, ())},
    "amdfp4": {"": (U8, (128, 128)), "scale": (U8, (128, 16))},
    "nvfp4": {"": (U8, (128, 128)), "scale": (F8, (128, 16)), "scale_2": (F32, ()), "input_scale_2": (F32, ())},
    "int4_fp8": {
        "": (I32, (128, 32)),
        "scale": (F32, ()),
        "scale_2": (F32, (128,)),
        "zero_point_2": (I32, (16,)),
    },
    "mx6": {"": (U8, (128, 160)), "scale": (U8, (128, 16)), "shift": (U8, (128, 16))},
    "mx9": {"": (I8, (128, 256)), "scale": (U8, (128, 16)), "shift": (U8, (128, 16))},
    "bfp16": {"": (I8, (128, 256)), "scale": (U8, (128, 32))},
    "mxint8": {"": (I8, (128, 256)), "scale": (U8, (128, 8))},
    "mxfp8_e4m3": {"": (F8, (128, 256)), "scale": (U8, (128, 8))},
}


@pytest.mark.parametrize("scheme", STORED)
def test_names_dtypes_and_shapes_of_a_bfloat16_checkpoint(scheme: str, tmp_path: Path) -> None:
    export_safetensors(frozen(scheme, torch.bfloat16), tmp_path / "out")
    layer = "model.layers.0.mlp.down_proj"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {n.removeprefix(layer + "."): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith(layer)}
    expected = {}
    for suffix, entry in STORED[scheme].items():
        name = suffix if suffix.startswith("input") else f"weight_{suffix}" if suffix else "weight"
        expected[name] = entry
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [
        ("real_quantized", torch.float32),
        ("fake_quantized", torch.float32),
        ("real_quantized", torch.bfloat16),
        ("real_quantized", torch.float16),
    ],
)
def test_transformers_loads_every_scheme_with_equal_logits(
    scheme: str, weight_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = frozen(scheme, dtype)
    export_safetensors(model, tmp_path / "out", weight_format=weight_format)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert quantized_layers(loaded).keys() == quantized_layers(model).keys()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_importer_gives_equal_logits(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = frozen(scheme, dtype)
    export_safetensors(model, tmp_path / "out", pack_method="order")
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=dtype), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


def test_the_config_block_is_as_documented(tmp_path: Path) -> None:
    export_safetensors(frozen("uint4_wo_32"), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "quark" and stored["quant_mode"] == "eager_mode"
    assert stored["exclude"] == ["lm_head"]
    assert stored["export"] == {
        "kv_cache_group": [],
        "min_kv_scale": 0.0,
        "pack_method": "reorder",
        "weight_format": "real_quantized",
        "weight_merge_groups": None,
    }
    weight = stored["global_quant_config"]["weight"]
    assert list(weight) == [
        "dtype", "is_dynamic", "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "round_method",
        "scale_type", "zero_point_type", "scale_format", "scale_calculation_mode", "mx_element_dtype",
        "observer_cls", "is_scale_quant", "enable_buffer_reuse", "max_input_numel",
    ]  # fmt: skip
    assert (weight["dtype"], weight["qscheme"], weight["group_size"]) == ("uint4", "per_group", 32)


def test_unfrozen_models_give_the_same_file(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("uint4_wo_32")
    model = ModelQuantizer(config).quantize_model(tiny_llama())
    export_safetensors(model, tmp_path / "before")
    export_safetensors(ModelQuantizer.freeze(model), tmp_path / "after")
    before, after = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("before", "after"))
    assert before == after


@pytest.mark.slow
def test_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    model = frozen("nvfp4")
    export_safetensors(model, tmp_path / "one")
    export_safetensors(model, tmp_path / "many", max_shard_size="100KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert len(set(index.values())) >= 3 and index.keys() == whole.keys()
    for name, file in index.items():
        part = load_file(tmp_path / "many" / file)[name]
        assert torch.equal(part.reshape(-1).view(torch.uint8), whole[name].reshape(-1).view(torch.uint8))
    loaded = import_model_from_safetensors(None, tmp_path / "many", device="cpu")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.slow
def test_tied_and_untied_heads_load(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = frozen("int4_wo_32", tie_word_embeddings=True)
    export_safetensors(model, tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "tied")), logits(model))
    both = QConfig(global_quant_config=config_of_layer(SCHEMES["int4_wo_32"]))
    quantizer = ModelQuantizer(both)
    model = quantizer.freeze(quantizer.quantize_model(tiny_llama(tie_word_embeddings=True)))
    export_safetensors(model, tmp_path / "head")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "head")), logits(model))


BEYOND_SCHEMES = {
    "embedding": LayerSpec(weight=spec("uint4", PerGroup(-1, 32), symmetric=False)),
    "inputs, outputs, biases": LayerSpec(
        weight=spec("int8"), input=spec("uint8", symmetric=False), output=spec("int8"), bias=spec("int8")
    ),
    "static per channel": LayerSpec(weight=spec("int8"), input=spec("int8", PerChannel(-1))),
    "tiles": LayerSpec(weight=spec("fp8_e4m3", PerBlock((32, 32)))),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", BEYOND_SCHEMES)
def test_transformers_loads_what_no_scheme_names(kind: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    layer = config_of_layer(BEYOND_SCHEMES[kind])
    names = {"*embed_tokens": layer} if kind == "embedding" else {}
    config = QConfig(global_quant_config=layer, layer_quant_config=names, exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=True)
    model = quantizer.freeze(quantizer.quantize_model(model, token_batches()))
    export_safetensors(model, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["tie_word_embeddings"] is (tied and kind != "embedding")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


def test_companions_and_dropped_tensors_travel_along(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    tiny_llama().save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    tensors = load_file(source / "model.safetensors")
    extra = {"mtp.norm.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3, 3)}
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(source)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo")).quantize_model(model)
    for form, key in (("quark", "exclude"), ("compressed-tensors", "ignore")):
        out = export_safetensors(model, tmp_path / form, form)
        # A reader would take a layer that is not named for one that is quantized.
        assert "mtp.fc" in stored(out)[1][key]
    out = tmp_path / "quark"
    assert (out / "chat_template.jinja").read_text() == "hello"
    assert (out / "tokenizer_config.json").exists() and (out / "generation_config.json").exists()
    assert torch.equal(stored(out)[0]["mtp.fc.weight"], torch.ones(3, 3))


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("reorder", [True, False])
def test_save_params_round_trip_of_any_module(compressed: bool, reorder: bool, tmp_path: Path) -> None:
    weight = spec("uint4", PerChannel(0), symmetric=False)
    layer = config_of_layer(LayerSpec(weight=weight, bias=spec("int8"), input=spec("int8"), output=spec("int8")))
    config = QConfig(global_quant_config=layer, layer_quant_config={"embedding": config_of_layer(SCHEMES["int8_wo"])})
    ids = token_batches(2)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(every_layer(), ids))
    file = save_params(model, "cnn", export_dir=tmp_path, compressed=compressed, reorder=reorder)
    loaded = load_params(every_layer(seed=5), file, tmp_path / "cnn.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(ids[0]), model(ids[0]))


def test_the_older_exporter_and_importer(tmp_path: Path) -> None:
    model = frozen("int8")
    ModelExporter(export_dir=tmp_path / "out").export_safetensors_model(model, model.quant_config)
    loaded = ModelImporter(tmp_path / "out", "hf_format").import_model_info(tiny_llama(seed=3))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int3", "uint2", "int32"])
def test_types_without_a_scheme_are_stored_too(dtype: str, tmp_path: Path) -> None:
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec(dtype, PerChannel(0)))))
    model = ModelQuantizer(config).quantize_model(tiny_llama(dtype=torch.bfloat16))
    export_safetensors(ModelQuantizer.freeze(model), tmp_path / "out")
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=torch.bfloat16), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "weight",
    [
        spec("fp8_e5m3"),
        spec("uint8", PerGroup(-1, 64), symmetric=False, scale_type=ScaleType.float),
        spec("int8", PerChannel(0), symmetric=False, scale_type=ScaleType.float),
        spec("uint16", PerChannel(0), symmetric=False, scale_type=ScaleType.float),
        spec("uint8", PerChannel(0), symmetric=False, float_zero_point=True),
    ],
    ids=str,
)
def test_a_frozen_half_precision_weight_keeps_its_codes(weight: TensorSpec, dtype: torch.dtype, tmp_path: Path) -> None:
    """Freezing rounds the values to the dtype of the model; the codes are found again all the same."""
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=weight)))
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(tiny_llama(dtype=dtype)))
    export_safetensors(model, tmp_path / "out")
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=dtype), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_per_channel", "mxfp4", "mx6", "int3_wo_128", "int4_fp8"])
def test_sizes_that_fill_no_whole_word(scheme: str, tmp_path: Path) -> None:
    def odd() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(128, 10), torch.nn.Linear(10, 3, bias=False)).eval()

    names = {"0": config_of_layer(SCHEMES[scheme])}
    config = QConfig(global_quant_config=config_of_layer(LayerSpec()), layer_quant_config=names)
    x = torch.randn(4, 128)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(odd(), [x]))
    file = save_params(model, "odd", export_dir=tmp_path, compressed=True)
    assert torch.equal(load_params(odd(), file, tmp_path / "odd.safetensors")(x), model(x))


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_safetensors(frozen("int4_wo_32"), tmp_path_factory.mktemp("good") / "out")


def damaged(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def refuse_import(folder: Path, message: str) -> None:
    model = tiny_llama()
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(model, folder)
    assert not quantized_layers(model)
    assert torch.equal(logits(model), logits(tiny_llama()))


def test_a_truncated_or_corrupt_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint, tmp_path / "a")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    refuse_import(folder, r"model.safetensors is truncated: its header promises \d+ bytes, it has \d+")
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    refuse_import(folder, "model.safetensors is no safetensors file, or its header is corrupt")
    (folder / "model.safetensors").unlink()
    refuse_import(folder, "neither model.safetensors nor")


def test_missing_and_misshapen_tensors_are_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint, tmp_path / "a")
    tensors = load((folder / "model.safetensors").read_bytes())  # older ones map the file
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    refuse_import(folder, r"lacks 1 tensors.*q_proj\.weight_scale")
    save_file({**tensors, name: torch.ones(3)}, folder / "model.safetensors")
    refuse_import(folder, r"q_proj\.weight_scale has shape \(3,\).*needs \(4, 128\)")


def test_another_quantizers_config_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint, tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitnet"
    (folder / "config.json").write_text(json.dumps(config))
    refuse_import(folder, "quant_method 'bitnet'.*gptq.*auto-round")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    refuse_import(folder, "no quantization_config")
    (folder / "config.json").write_text("{")
    refuse_import(folder, "not JSON")


def test_an_existing_output_is_refused_and_replaced_only_on_request(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    model = frozen("int4_wo_32")
    with pytest.raises(OutputExistsError, match="exists already"):
        export_safetensors(model, out, overwrite=False)
    assert [f.name for f in out.iterdir()] == ["mine.txt"]
    with pytest.raises(OutputExistsError, match="holds no model"):
        export_safetensors(model, out, overwrite=True)
    (out / "config.json").touch()
    export_safetensors(model, out, overwrite=True)
    assert not (out / "mine.txt").exists() and (out / "config.json").exists()
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("option", ["weight_format", "custom_mode", "pack_method"])
def test_misspelled_options_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{option}='quarkk'"):
        export_safetensors(frozen("int8_wo"), tmp_path / "out", **{option: "quarkk"})
    assert not list(tmp_path.iterdir())


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quark.torch.checkpoint.safetensors_file as checkpoint_module

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_tensor", full)
    with pytest.raises(OutputError, match="No space left on device"):
        export_safetensors(frozen("int8_wo"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_float_and_foreign_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not quantized"):
        export_safetensors(tiny_llama(), tmp_path / "out")
    model = ModelQuantizer(QConfig(global_quant_config=config_of_layer(SCHEMES["int8_wo"]))).quantize_model(mlp())
    with pytest.raises(ConfigError, match="save_params"):
        export_safetensors(model, tmp_path / "out")
    with pytest.raises(QuarkError):
        load_params(mlp(), tmp_path / "none.json", tmp_path / "none.safetensors")


FOUR_BITS = [name for name, layer in SCHEMES.items() if layer.weight and layer.weight.dtype.bits == 4]


@pytest.mark.parametrize("name", FOUR_BITS)
def test_codes_of_frozen_weights_are_those_that_decode_to_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02  # worth compiling
    weight[0, :512] = 0
    weight[1] *= 1e-3
    weight[2, ::9] *= 30
    of = SCHEMES[name].weight
    assert of is not None
    params = tensor_qparams(weight, of)
    layout, shape = QuarkLayout(of, torch.bfloat16), tuple(weight.shape)
    x = fake_quantize(weight, params, of)
    found = layout.store(x, params, frozen=True)
    monkeypatch.setattr(QuarkLayout, "_store_compiled", lambda *_: None)
    assert torch.equal(found[""].view(torch.uint8), layout.store(x, params, frozen=True)[""].view(torch.uint8))
    assert torch.equal(layout.load_codes(found[""], shape), layout.codes(x, params, frozen=True))


def test_zero_points_of_a_wider_type_are_read(tmp_path: Path) -> None:
    """AMD Quark writes int32 beside float values of int8."""
    model = frozen("int8", torch.float32)
    export_safetensors(model, tmp_path / "out", weight_format="fake_quantized")
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.up_proj.input_zero_point"
    tensors = load_file(file)
    wide = {key: value.int() if key.endswith("input_zero_point") else value for key, value in tensors.items()}
    assert wide[name].dtype == torch.int32 != tensors[name].dtype
    save_file(wide, file, {"format": "pt"})
    assert torch.equal(logits(import_model_from_safetensors(tiny_llama(), tmp_path / "out")), logits(model))
    save_file({**wide, name: torch.full_like(wide[name], 300)}, file, {"format": "pt"})
    with pytest.raises(FormatError, match=f"{name} is torch.int32 in the checkpoint; torch.int8 is needed"):
        import_model_from_safetensors(tiny_llama(), tmp_path / "out")
