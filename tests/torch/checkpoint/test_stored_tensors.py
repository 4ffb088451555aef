"""A quantized folder of any format computes what was saved, or is refused by the name of the tensor that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.core.granularity import PerChannel
from quark.core.spec import LayerSpec, spec
from quark.errors import ConfigError, FormatError, NonFiniteError, NotSupportedError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors, load_params, save_params
from quark.torch.checkpoint import shards
from quark.torch.checkpoint.shards import save_tensors
from quark.torch.checkpoint.sources.source import check_finite
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from tests.models.checkpoints import change_config, frozen, logits
from tests.models.torch_zoo import mlp, tiny_llama

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.down_proj"
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A folder of a format and a scheme, from a bfloat16 model; made once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(form: str, scheme: str) -> Path:
        if (form, scheme) not in made:
            out = tmp_path_factory.mktemp("good") / "out"
            made[form, scheme] = export_safetensors(frozen(scheme, BF16), out, form)
        return made[form, scheme]

    return folder


def first(x: torch.Tensor, value: float) -> torch.Tensor:
    """x with another first value."""
    changed = x.clone()
    changed.reshape(-1)[0] = value
    return changed


def changed(folder: Path, out: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """A copy of a folder in which one tensor is changed, or gone."""
    tensors = load_file(folder / "model.safetensors")
    new = change(tensors.pop(name))
    out.mkdir()
    kept = tensors if new is None else tensors | {name: new.contiguous()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def refused(folder: Path, form: str, message: str) -> None:
    """Neither way of loading takes the folder, and a model that was passed in stays as it was."""
    from transformers import AutoModelForCausalLM

    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(None, folder, device="cpu")
    model = tiny_llama(dtype=BF16)
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(model, folder)
    assert torch.equal(logits(model), logits(tiny_llama(dtype=BF16)))
    if form == "quark":
        with pytest.raises(FormatError, match=message):
            AutoModelForCausalLM.from_pretrained(folder)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "gone": lambda x: None,
    "NaN": lambda x: first(x, float("nan")),
    "infinite": lambda x: first(x, float("inf")),
    "negative": lambda x: first(x, -1.0),
    "zero": lambda x: first(x, 0.0),
    "255": lambda x: first(x, 255),
    "other half": lambda x: x.view(torch.float16 if x.dtype == BF16 else torch.float32),
    "cut": lambda x: x.reshape(-1)[:-1],
    "other codes": lambda x: x.view(torch.float8_e5m2),
    "signed": lambda x: x.view(torch.int8),
    "unsigned": lambda x: x.view(torch.uint8),
    "12": lambda x: first(x, 12),
}

CASES = [
    ("quark", "fp8", "weight_scale", "gone", r"lacks 1 tensors .*weight_scale"),
    ("quark", "fp8", "input_scale", "gone", r"lacks 1 tensors .*input_scale"),
    ("quark", "fp8", "weight_scale", "other half", r"weight_scale is torch.float16"),
    ("quark", "fp8", "input_scale", "negative", r"down_proj.input cannot be read: its scale holds -1"),
    ("quark", "fp8", "weight", "other codes", r"weight is torch.float8_e5m2"),
    ("quark", "int8", "weight_zero_point", "gone", r"lacks 1 tensors .*weight_zero_point"),
    ("quark", "int8", "weight_zero_point", "12", r"down_proj.weight .* zero point is not 0 everywhere"),
    ("quark", "int8", "input_zero_point", "unsigned", r"input_zero_point is torch.uint8"),
    ("quark", "int4_wo_32", "weight_scale", "NaN", r"down_proj.weight cannot be read: its scale holds NaN"),
    ("quark", "int4_wo_32", "weight_scale", "zero", r"scale holds 0, and scales are positive"),
    ("quark", "int4_wo_32", "weight_scale", "cut", r"weight_scale has shape"),
    ("quark", "mxfp4", "weight_scale", "255", r"scale holds the exponent of NaN"),
    ("quark", "mxfp4", "weight_scale", "signed", r"weight_scale is torch.int8"),
    ("quark", "mx6", "weight_shift", "gone", r"lacks 1 tensors .*weight_shift"),
    ("quark", "nvfp4", "weight_scale_2", "gone", r"lacks 1 tensors .*weight_scale_2"),
    ("quark", "nvfp4", "weight_scale_2", "zero", r"second-level scale holds 0"),
    ("quark", "nvfp4", "input_scale_2", "infinite", r"down_proj.input .* scale holds NaN or infinity"),
    ("quark", "nvfp4", "weight_scale", "NaN", r"scale holds NaN"),
    ("quark", "int3_wo_128", "weight_zero_point", "12", r"zero point holds"),
    ("awq", "uint4_wo_32", "qzeros", "gone", r"lacks 1 tensors .*weight_zero_point"),
    ("awq", "uint4_wo_32", "scales", "other half", r"scales is torch.float16"),
    ("awq", "uint4_wo_32", "scales", "infinite", r"scale holds NaN or infinity"),
    ("awq", "uint4_wo_32", "qweight", "gone", r"lacks 1 tensors"),
    ("fp8", "fp8", "weight_scale", "gone", r"weight holds codes \(torch.float8_e4m3fn\), and .* no scale"),
    ("fp8", "fp8", "weight_scale", "negative", r"scale holds -1"),
    ("fp8", "fp8", "input_scale", "gone", r"lacks 1 tensors .*input_scale"),
    ("compressed-tensors", "int4_wo_32", "weight_scale", "gone", r"down_proj.weight_packed has shape"),
    ("compressed-tensors", "int4_wo_32", "weight_scale", "NaN", r"scale holds NaN"),
    ("compressed-tensors", "uint4_wo_32", "weight_zero_point", "gone", r"lacks 1 tensors .*weight_zero_point"),
    ("compressed-tensors", "mxfp4", "weight_scale", "255", r"scale holds NaN or infinity"),
    ("compressed-tensors", "nvfp4", "weight_global_scale", "zero", r"second-level scale holds NaN or infinity"),
    ("compressed-tensors", "nvfp4", "input_global_scale", "negative", r"down_proj.input .* scale holds -1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "scheme", "leaf", "change", "message"), CASES, ids=lambda x: None)
def test_a_tensor_that_is_wrong_is_named(
    form: str, scheme: str, leaf: str, change: str, message: str, folders: Any, tmp_path: Path
) -> None:
    refused(changed(folders(form, scheme), tmp_path / "bad", f"{LAYER}.{leaf}", CHANGES[change]), form, message)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["quark", "awq", "compressed-tensors"])
def test_a_tensor_that_nothing_takes_is_named(form: str, folders: Any, tmp_path: Path) -> None:
    folder = folders(form, "uint4_wo_32")
    tensors = load_file(folder / "model.safetensors") | {f"{LAYER}.weight_g_idx": torch.ones(3)}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, form, r"holds 1 tensors that nothing takes: .*down_proj\.weight_g_idx")


@pytest.mark.slow
def test_a_missing_norm_is_named_by_the_report_of_transformers(folders: Any, tmp_path: Path) -> None:
    folder = changed(folders("quark", "fp8"), tmp_path / "bad", "model.norm.weight", lambda x: None)
    with pytest.raises(FormatError, match=r"has no model\.norm\.weight"):
        import_model_from_safetensors(None, folder, device="cpu")


@pytest.mark.slow
def test_a_norm_of_NaN_is_named(folders: Any, tmp_path: Path) -> None:
    folder = changed(folders("awq", "uint4_wo_32"), tmp_path / "bad", "model.norm.weight", CHANGES["NaN"])
    refused(folder, "awq", r"model\.norm\.weight cannot be read: its values are NaN or infinite")


@pytest.mark.slow
def test_what_a_class_leaves_out_by_design_is_left_out(folders: Any, tmp_path: Path) -> None:
    folder = folders("quark", "fp8")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "mtp.weight": torch.ones(3)}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        load_file(folder / "model.safetensors") | extra, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    model = tiny_llama(dtype=BF16)
    model._keys_to_ignore_on_load_unexpected = {r"^mtp\."}
    assert torch.equal(logits(import_model_from_safetensors(model, tmp_path)), logits(frozen("fp8", BF16)))


@pytest.mark.slow
def test_transformers_loads_a_part_and_other_dtypes(folders: Any) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folders("quark", "int4_wo_32"))
    part = AutoModel.from_pretrained(folders("quark", "int4_wo_32"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(part(ids).last_hidden_state, whole.model(ids).last_hidden_state)
        assert torch.isfinite(
            AutoModel.from_pretrained(folders("quark", "int4_wo_32"), dtype=torch.float32)(ids)[0]
        ).all()


def entries(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield (*path, key)
            yield from entries(value, (*path, key))


@pytest.mark.parametrize("value", [7, [], "junk"])
def test_a_config_of_the_wrong_form_is_a_config_error(value: Any) -> None:
    written = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int8")))).to_dict()
    for path in entries(written):
        damaged = json.loads(json.dumps(written))
        place = damaged
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        try:
            QConfig.from_dict(damaged)
        except ConfigError:
            continue  # any other error fails the test


@pytest.mark.slow
@pytest.mark.parametrize("groups", [7, {"group_0": {"weights": {"num_bits": "x"}}}])
def test_a_damaged_config_of_another_program_is_named(groups: Any, folders: Any, tmp_path: Path) -> None:
    folder = changed(folders("compressed-tensors", "int4_wo_32"), tmp_path / "bad", "model.norm.weight", lambda x: x)
    change_config(folder, config_groups=groups)
    with pytest.raises(FormatError, match=r"quantization_config\.config_groups.* is .*; possible: "):
        import_model_from_safetensors(tiny_llama(dtype=BF16), folder)


def test_codes_of_two_bits_that_are_none_are_refused(tmp_path: Path) -> None:
    config = QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int2", PerChannel(0)))))
    file = save_params(ModelQuantizer(config).quantize_model(mlp()), "net", export_dir=tmp_path, compressed=True)
    path = tmp_path / "net.safetensors"
    load_params(mlp(), file, path)
    save_file(load_file(path) | {"up.weight": first(load_file(path)["up.weight"], 5)}, path)
    # Of a former version, which did not say what belongs together.
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "sha256"}))
    with pytest.raises(FormatError, match=r"up\.weight cannot be read: its codes are no 2-bit integers"):
        load_params(mlp(), file, path)


@pytest.mark.parametrize(("values", "good"), [
    (float("inf"), True), (-float("inf"), True), (float("nan"), False), ([1.0, float("inf")], False),
])  # fmt: skip
def test_a_single_number_may_be_a_bound_that_nothing_meets(values: Any, good: bool) -> None:
    """Gemma 4 clips the inputs of its audio layers to bounds that are infinite where none was trained."""
    with nullcontext() if good else pytest.raises(FormatError, match=r"ffw\.input_max cannot be read"):
        check_finite("layers.0.ffw.input_max", torch.tensor(values))


@pytest.mark.slow
def test_a_published_name_that_scales_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of Inkling 2, whose checkpoints call `weight_proj.weight` `weight_proj`."""
    monkeypatch.setattr(shards, "published_names", lambda _: lambda name: name.replace(f"{LAYER}.weight", LAYER))
    with pytest.raises(NotSupportedError, match=f"{LAYER}.weight is {LAYER} in checkpoints.*--exclude {LAYER}"):
        export_safetensors(frozen("int8_wo", BF16), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_is_called_like_a_scale_is_loaded_into_the_model(tmp_path: Path) -> None:
    """As those of softmax_scaling in Mistral Large 4."""
    model = tiny_llama()
    quantizer = ModelQuantizer(QConfig(global_quant_config=config_of_layer(LayerSpec(weight=spec("int8")))))
    model.model.norm.scale = torch.nn.Parameter(torch.tensor([1.5, 2.5]))
    model.model.norm.zero_point = torch.nn.Parameter(torch.tensor([3.5]))
    folder = export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), tmp_path / "out")
    other = tiny_llama()
    other.model.norm.scale, other.model.norm.zero_point = (torch.nn.Parameter(torch.zeros(n)) for n in (2, 1))
    import_model_from_safetensors(other, folder)
    assert other.model.norm.scale.tolist() == [1.5, 2.5] and other.model.norm.zero_point.tolist() == [3.5]


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [("fp8", "weight", 0x7F), ("fp8", "weight_scale", 1e38), ("int8_wo", "weight_scale", 1e38)],
)
def test_what_decodes_to_no_numbers_is_named_when_it_is_first_used(
    scheme: str, name: str, value: float, folders: Any, tmp_path: Path
) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        return first(x.view(torch.uint8), value).view(x.dtype) if x.dtype.itemsize == 1 else first(x.float(), value)

    folder = changed(folders("quark", scheme), tmp_path / "out", f"{LAYER}.{name}", change)
    model = import_model_from_safetensors(None, folder, device="cpu")
    with pytest.raises(NonFiniteError, match=rf"{LAYER}\.weight decodes to NaN or infinity"):
        model(torch.arange(8)[None])


def test_no_file_gets_values_that_are_no_numbers(tmp_path: Path) -> None:
    mask = torch.tensor([[0, -torch.inf], [0, 0]])
    save_tensors({"mask": mask, "bound": torch.tensor(torch.inf)}, tmp_path / "mask.safetensors")
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="layer.bias cannot be written"):
            save_tensors({"layer.bias": first(torch.arange(3.0) + 1, wrong)}, tmp_path / "wrong.safetensors")
    large = torch.full((8,), 3e38)  # whose sum is beyond float32
    save_tensors({"large": large}, tmp_path / "large.safetensors")
    assert torch.equal(load_file(tmp_path / "large.safetensors")["large"], large)
