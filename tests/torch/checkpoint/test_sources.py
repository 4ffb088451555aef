"""Quantized checkpoints as sources: FP8 blocks by their formula, compressed-tensors against its own library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.errors import ConfigError, FormatError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.checkpoint.carried import CarriedLayers, carried_entries, carried_layers, plan_carried
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.sources.decode import StoredCodes, Tile, _tile_of, decode
from quark.torch.checkpoint.sources.methods import tile_of
from quark.torch.checkpoint.sources.source import Source
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.lowering import config_of_layer
from quark.torch.formats import FORMATS
from quark.torch.plan import Plan
from tests.models.torch_zoo import tiny_llama
from tests.models.versions import FP8_WITHOUT_A_GPU

Stored = dict[str, torch.Tensor]
Encode = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
"""A weight -> what is stored, and the float values that it stands for."""


def make(folder: Path, encode: Encode, quantization: Any, **sizes: int) -> Any:
    """A folder whose linear layers are stored as `encode` says, and the float model that it stands for.

    Every tensor lies in a file of its own, so a code and its scale are always in different files.
    """
    model = tiny_llama(dtype=torch.bfloat16, **({"hidden_size": 160, "intermediate_size": 192} | sizes))
    stored: Stored = {}
    for name, tensor in list(model.state_dict().items()):
        parent, _, leaf = name.rpartition(".")
        if "_proj" not in name or leaf != "weight":
            stored[name] = tensor
            continue
        parts, value = encode(tensor)
        stored |= {f"{parent}.{part}": part_tensor for part, part_tensor in parts.items()}
        model.get_submodule(parent).weight.data = value.to(torch.bfloat16)
    folder.mkdir()
    where = {name: f"model-{i:05d}.safetensors" for i, name in enumerate(stored)}
    for name, file in where.items():
        save_file({name: stored[name].contiguous()}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model


def same(model: Any, source: Path, tmp_path: Path, scheme: str = "mxfp4") -> None:
    """Whether file to file gives what the float model gives in memory."""
    quantizer = ModelQuantizer(LLMTemplate.get("auto").get_config(scheme))
    quantizer.direct_quantize_checkpoint(source, tmp_path / "files")
    export_safetensors(quantizer.quantize_model(model), tmp_path / "memory")
    files, memory = (load_file(tmp_path / kind / "model.safetensors") for kind in ("files", "memory"))
    assert files.keys() == memory.keys()
    for name, tensor in memory.items():
        assert torch.equal(files[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((tmp_path / "files" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quark"
    assert AutoConfig.from_pretrained(tmp_path / "files").dtype == torch.bfloat16


def fp8_blocks(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Codes and scales of 128 x 128 tiles, the last ones cut; and what they stand for, tile by tile."""
    rows, columns = x.shape
    codes, value = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = x[tile].float().abs().max() / 448
            codes[tile] = (x[tile].float() / scales[i, j]).to(torch.float8_e4m3fn)
            value[tile] = (codes[tile].float() * scales[i, j]).to(x.dtype)
    return {"weight": codes, "weight_scale_inv": scales}, value


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.slow
def test_fp8_blocks(tmp_path: Path) -> None:
    model = make(tmp_path / "source", fp8_blocks, FP8)
    same(model, tmp_path / "source", tmp_path)


def with_compressed_tensors(kind: str, arguments: QuantizationArgs) -> Encode:
    """What the library makes of a weight, and what it reads back."""

    def encode(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        size = arguments.group_size or x.shape[1]
        blocks = x.reshape(x.shape[0], -1, size)
        if arguments.strategy == "tensor":
            blocks = x.reshape(1, 1, -1)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments)
        state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    return encode


KINDS = {
    "int4 groups": ("pack-quantized", QuantizationArgs(num_bits=4, group_size=32, strategy="group")),
    "int4 groups, asymmetric": (
        "pack-quantized",
        QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=False),
    ),
    "int3 channels": ("pack-quantized", QuantizationArgs(num_bits=3, strategy="channel")),
    "int8 packed": ("pack-quantized", QuantizationArgs(num_bits=8, strategy="channel")),
    "int8 channels": ("int-quantized", QuantizationArgs(num_bits=8, strategy="channel")),
    "fp8 tensor": ("float-quantized", QuantizationArgs(num_bits=8, type="float", strategy="tensor")),
    "fp8 channels": ("float-quantized", QuantizationArgs(num_bits=8, type="float", strategy="channel")),
}


def compressed(kind: str, arguments: QuantizationArgs) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_tensors(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path / "source", with_compressed_tensors(*KINDS[kind]), compressed(*KINDS[kind]))
    same(model, tmp_path / "source", tmp_path)


@pytest.mark.slow
def test_activation_order(tmp_path: Path) -> None:
    """Columns that belong to groups by an index (GPTQ's act-order)."""

    def encode(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        stored, value = plain(x)
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
        index = torch.empty(x.shape[1], dtype=torch.int32)
        index[order] = torch.arange(x.shape[1], dtype=torch.int32) // 32
        codes = (value.float() / stored["weight_scale"].float().repeat_interleave(32, 1)).round()
        return stored | {"weight_g_idx": index}, codes * stored["weight_scale"].float()[:, index.long()]

    plain = with_compressed_tensors(*KINDS["int4 groups"])
    model = make(tmp_path / "source", encode, compressed(*KINDS["int4 groups"]))
    same(model, tmp_path / "source", tmp_path, "int8_wo")


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [("gptq", NotSupportedError, "'gptq'.*Possible: float checkpoints, 'fp8'"), ("quark", ConfigError, "already")],
)
def test_other_quantizers(method: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    def encode(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        return ({"qweight": x.int()}, x) if method == "gptq" else fp8_blocks(x)

    make(tmp_path / "source", encode, {"quant_method": method})
    with pytest.raises(error, match=said):
        ModelQuantizer(LLMTemplate.get("auto").get_config("mxfp4")).direct_quantize_checkpoint(
            tmp_path / "source", tmp_path / "out"
        )


@pytest.mark.parametrize(
    ("drop", "said"), [("weight_scale_inv", "has no tensor .*weight_scale_inv"), ("shape", "does not fit")]
)
def test_scales_that_are_absent_or_do_not_fit(drop: str, said: str, tmp_path: Path) -> None:
    def encode(x: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        stored, value = fp8_blocks(x)
        if drop == "shape":
            return stored | {"weight_scale_inv": torch.ones(7, 3)}, value
        return {"weight": stored["weight"]}, value

    make(tmp_path / "source", encode, FP8)
    with pytest.raises(FormatError, match=said):
        ModelQuantizer(LLMTemplate.get("auto").get_config("mxfp4")).direct_quantize_checkpoint(
            tmp_path / "source", tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@FP8_WITHOUT_A_GPU
def test_transformers_reads_the_fp8_source_alike(tmp_path: Path) -> None:
    """The formula of the FP8 test is that of transformers' own loader, which takes whole tiles only."""
    from transformers import FineGrainedFP8Config

    model = make(tmp_path / "source", fp8_blocks, FP8, hidden_size=128, intermediate_size=256, num_key_value_heads=4)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    ours, theirs = model.state_dict(), loaded.state_dict()
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(ours[name], theirs[name].to(torch.bfloat16))  # float32 in transformers before 5.11


@pytest.mark.parametrize(
    ("method", "said"),
    [("hqq", r"is quantized \('hqq'\)\. Possible: float checkpoints"),
     ("modelopt", "ModelOpt's NVFP4_AWQ are not supported. Possible: FP8")],
)  # fmt: skip
def test_what_a_config_calls_quantized_in_a_way_that_is_not_known_is_refused(
    method: str, said: str, tmp_path: Path
) -> None:
    """Whatever its tensors are: transformers passes over the name modelopt, and asks for a package of the other."""
    from quark.jobs.folders.models import load_model

    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_4bit": True, "quant_algo": "NVFP4_AWQ"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotSupportedError, match=said):
        load_model(OpenedFolder(tmp_path), dequantize=True)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.layers.0.self_attn.q_proj.weight", lambda x: x.view(torch.uint8), "has the type uint8"),
        ("model.norm.weight", lambda x: x.view(torch.int16), "has the type int16"),
        (
            "model.layers.0.self_attn.q_proj.weight_scale_inv",
            lambda x: x.view(torch.int32),
            "has the type int32, and not that of scales",
        ),
    ],
)
def test_integers_of_which_nothing_says_what_they_mean_are_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path
) -> None:
    held = {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
            "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1),
            "model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}  # fmt: skip
    save_file({**held, name: change(held[name])}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=said):
        Source([tmp_path / "model.safetensors"], {"quant_method": "fp8", "weight_block_size": [4, 4]})


def test_scales_of_groups_of_another_size_than_the_config_says_are_refused() -> None:
    """Transposed scales have whole tiles, too: of 16 rows and 2 columns."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    tile = tile_of({"config_groups": {"group_0": {"weights": weights}}})
    packed, scale = torch.zeros(32, 8, dtype=torch.int32), torch.ones(32, 2)
    assert decode(StoredCodes("w", packed, scale, True, tile=tile), (32, 64), torch.float32).shape == (32, 64)
    with pytest.raises(FormatError, match="does not fit"):
        decode(StoredCodes("w", packed, scale.t(), True, tile=tile), (32, 64), torch.float32)


def test_what_is_carried_is_decoded_where_it_is_in_codes_and_else_stays_in_its_type(tmp_path: Path) -> None:
    codes, value = fp8_blocks(torch.linspace(-3, 3, 130 * 4, dtype=torch.bfloat16).reshape(130, 4))
    held = {f"mtp.fc.{name}": tensor for name, tensor in codes.items()} | {"mtp.norm.weight": torch.ones(4).double()}
    save_file(held, tmp_path / "model.safetensors")
    source = Source([tmp_path / "model.safetensors"], FP8)
    names = sorted(source.names())
    assert names == ["mtp.fc.weight", "mtp.norm.weight"]
    kept = {}
    for name, make_stored, likes in carried_entries(source, names, torch.bfloat16):
        kept[name] = make_stored()[""]
        assert (likes[""].dtype, likes[""].shape) == (kept[name].dtype, kept[name].shape)
    assert torch.equal(kept["mtp.fc.weight"], value) and kept["mtp.fc.weight"].dtype == torch.bfloat16
    assert torch.equal(kept["mtp.norm.weight"], torch.ones(4).double()) and kept["mtp.norm.weight"].itemsize == 8


class TopRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))


def model_with_a_router() -> nn.Module:
    """An embedding of 6 tokens, a layer `proj`, and a router `choose`."""
    model = nn.Module()
    model.embed, model.proj, model.choose = nn.Embedding(6, 4), nn.Linear(4, 4), TopRouter()
    return model


def test_layers_are_the_matrices_among_what_is_carried_that_are_no_tables_and_no_routers(tmp_path: Path) -> None:
    shapes = {"embed": (6, 4), "proj": (6, 4), "fc": (4, 8), "choose": (3, 4), "norm": (4,)}
    save_file({f"mtp.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    source = Source([tmp_path / "a.safetensors"])
    found = carried_layers(model_with_a_router(), source, source.names())
    assert found == {"mtp.proj": (6, 4), "mtp.fc": (4, 8)}


def test_carried_layers_follow_the_config_of_the_others() -> None:
    weight = config_of_layer(LayerSpec(weight=SCHEMES["int8_wo"].weight))
    model, shapes = model_with_a_router(), {"mtp.fc": (4, 4), "mtp.kept": (4, 4), "mtp.proj": (4, 4)}
    for pattern, exclude, quantized in (
        ("mtp.*", ["mtp.kept"], {"mtp.fc", "mtp.proj"}),
        ("mtp.fc", [], {"mtp.fc"}),
        ("*proj", [], set()),  # which names a layer of the model
    ):
        config = QConfig(QLayerConfig(), layer_quant_config={pattern: weight}, exclude=exclude)
        assert plan_carried(config, model, Plan({}, ()), shapes).beside.keys() == quantized


def test_carried_siblings_have_the_largest_of_their_second_scales(tmp_path: Path) -> None:
    held = {f"mtp.{name}_proj.weight": torch.full((4, 32), value) for name, value in (("gate", 3.0), ("up", 0.5))}
    save_file(held, tmp_path / "a.safetensors")
    source, layer = Source([tmp_path / "a.safetensors"]), LayerSpec(weight=SCHEMES["nvfp4"].weight)
    layers = CarriedLayers(
        {name.removesuffix(".weight"): layer for name in held},
        lambda spec, of, dtype: FORMATS["quark"].make_layout(spec, of, dtype, "reorder", True),
        [["gate_proj", "up_proj"]],
    )
    gate, up = (make() for _, make, _ in carried_entries(source, [*held], torch.float32, layers))
    alone = replace(layers, groups=())
    gate_alone, up_alone = (make() for _, make, _ in carried_entries(source, [*held], torch.float32, alone))
    second = "scale_2"
    assert gate[second] == up[second] == gate_alone[second] > up_alone[second]


def test_more_scales_than_columns_do_not_fit() -> None:
    with pytest.raises(FormatError, match="a scale of shape .* does not fit a weight"):
        _tile_of("layer.weight_scale", Tile(1, 0), torch.ones(4, 128), (4, 64))
