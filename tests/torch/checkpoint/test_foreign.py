"""Weights that bitsandbytes, torchao and MLX stored: read as those libraries read them, and refused where damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quark.errors import FormatError, NotSupportedError, QuarkError
from quark.torch.checkpoint.sources.source import Source
from tests.models.record_foreign import LIBRARY, NAME, RECORDS, file_of, weight_of

Stored = dict[str, torch.Tensor]


def recorded(kind: str) -> tuple[Stored, dict[str, str], dict[str, Any]]:
    """Tensors, metadata and `quantization_config` of a kind."""
    with safe_open(file_of(kind), "pt") as file:
        metadata = dict(file.metadata())
    return load_file(file_of(kind)), metadata, json.loads(metadata.pop("config"))


def source_of(folder: Path, stored: Stored, metadata: dict[str, str], config: dict[str, Any]) -> Source:
    save_file({name: x.contiguous() for name, x in stored.items()}, folder / "model.safetensors", metadata)
    return Source([folder / "model.safetensors"], config)


def read_back(folder: Path, stored: Stored, metadata: dict[str, str], config: dict[str, Any]) -> torch.Tensor:
    source = source_of(folder, stored, metadata, config)
    assert list(source.names()) == [NAME] and source.is_coded(NAME)
    return source.float(NAME)


@pytest.mark.parametrize("kind", RECORDS)
def test_values_are_those_that_the_library_read(kind: str, tmp_path: Path) -> None:
    stored, metadata, config = recorded(kind)
    expected = stored.pop("expected")
    found = read_back(tmp_path, stored, metadata, config)
    assert found.shape == weight_of(1).shape
    assert torch.equal(found.to(expected.dtype), expected)
    coarse = 1.0 if kind in ("mlx 2", "torchao int3") else 0.3
    assert float((found - weight_of(1)).abs().max()) < coarse * float(weight_of(1).abs().max())


@pytest.mark.parametrize("kind", RECORDS)
def test_values_are_those_that_the_installed_library_reads(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARY.get(kind.split()[0], "bitsandbytes"))
    stored, expected, metadata, config = RECORDS[kind](weight_of(2))
    found = read_back(tmp_path, stored, metadata, config)
    assert torch.equal(found.to(expected.dtype), expected)


def of_mslk(weight: torch.Tensor) -> Stored:
    """The parts of torchao's Int4Tensor, by the steps of `int4_row_quantize_zp` and `pack_int4` of mslk, on a GPU."""
    groups = weight.numpy().reshape(len(weight), -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = np.maximum(high - low, 1e-6) / 15
    zero = low + scale * 8
    codes = (np.clip(np.rint((groups - low) / scale), 0, 15) - 8).astype(np.int8).reshape(weight.shape)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4).astype(np.int8)
    parts = {"qdata": packed, "scale": scale[..., 0].T, "zero_point": zero[..., 0].T}
    return {f"layer._weight_{part}": torch.from_numpy(np.ascontiguousarray(x)) for part, x in parts.items()}


def described(kind: str, **attributes: Any) -> dict[str, str]:
    row = {"_type": kind, "_data": attributes}
    return {NAME: json.dumps(row), "tensor_names": json.dumps([NAME])}


AO = {"quant_method": "torchao"}


def test_int4_tensors_of_torchao_lie_half_a_step_from_their_weight(tmp_path: Path) -> None:
    """The one quantizer of this class runs on a GPU; its inverse is told by its error, which is at most half a step."""
    weight = weight_of(3)
    stored = of_mslk(weight)
    metadata = described("Int4Tensor", block_size=[1, 32], shape=list(weight.shape))
    found = read_back(tmp_path, stored, metadata, AO)
    step = stored["layer._weight_scale"].T.repeat_interleave(32, 1)
    assert bool(((found - weight).abs() <= step * (0.5 + 1e-5)).all())


def test_experts_of_torchao_are_read_one_by_one(tmp_path: Path) -> None:
    experts = [of_mslk(weight_of(seed)) for seed in (4, 5)]
    stored = {name: torch.stack([one[name] for one in experts]) for name in experts[0]}
    metadata = described("Int4Tensor", block_size=[1, 1, 32], shape=[2, *weight_of(4).shape])
    source = source_of(tmp_path, stored, metadata, AO)
    whole = source.float(NAME)
    for index, one in enumerate(experts):
        (tmp_path / str(index)).mkdir()
        alone = described("Int4Tensor", block_size=[1, 32], shape=list(weight_of(4).shape))
        assert torch.equal(whole[index], read_back(tmp_path / str(index), one, alone, AO))
        assert torch.equal(source.read(NAME, torch.float32, tuple(whole.shape), index), whole[index])


def test_the_names_of_torchao_14(tmp_path: Path) -> None:
    stored, metadata, config = recorded("torchao float8")
    expected, bias = stored.pop("expected"), torch.randn(7)
    stored = {name.replace("._weight_", ".weight:"): x for name, x in stored.items()} | {"layer.bias:_data": bias}
    metadata |= {"layer.bias": '{"_type": "Tensor"}', "tensor_names": json.dumps([NAME, "layer.bias"])}
    source = source_of(tmp_path, stored, metadata, config)
    assert sorted(source.names()) == ["layer.bias", NAME]
    assert torch.equal(source.float("layer.bias"), bias)
    assert torch.equal(source.float(NAME).to(expected.dtype), expected)


def test_codes_of_4_bits_in_wider_storage(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`: the same bytes under the name of another type."""
    stored, metadata, config = recorded("nf4 twice")
    expected = stored.pop("expected")
    stored[NAME] = stored[NAME].reshape(-1, 4).view(torch.float32)
    assert torch.equal(read_back(tmp_path, stored, metadata, config), expected)


def test_layers_of_mlx_have_groups_of_their_own(tmp_path: Path) -> None:
    stored, metadata, _ = recorded("mlx 6")
    expected = stored.pop("expected")
    own = {"quant_method": "mlx", "group_size": 32, "bits": 2, "layer": {"group_size": 64, "bits": 6}}
    assert torch.equal(read_back(tmp_path, stored, metadata, own), expected)
    with pytest.raises(FormatError, match="groups of 32 in 2 bits, as config.json says"):
        source_of(tmp_path, stored, metadata, {key: value for key, value in own.items() if key != "layer"})


# Damage. -------------------------------------------------------------------------------------------------------------

STATE4 = f"{NAME}.quant_state.bitsandbytes__nf4"


def json_bytes(change: Callable[[dict[str, Any]], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(x: torch.Tensor) -> torch.Tensor:
        text = json.dumps(change(json.loads(bytes(x.tolist()))))
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return changed


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.full_like(x, value)


def as_type(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.view(torch.uint8).reshape(-1).to(dtype)


DAMAGED: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    ("nf4", NAME, lambda x: x[:-1], r"layer.weight holds 447 bytes, which are no weight of \(7, 128\)"),
    ("nf4", NAME, as_type(torch.int32), "layer.weight holds int32"),
    ("nf4", f"{NAME}.absmax", lambda x: None, "no tensor layer.weight.absmax"),
    ("nf4", f"{NAME}.absmax", lambda x: x[:-1], r"absmax holds float32 of shape \(3,\)"),
    ("nf4", f"{NAME}.absmax", lambda x: x.half(), "absmax holds float16"),
    ("nf4", f"{NAME}.absmax", filled(torch.nan), "scales are NaN or infinite"),
    ("nf4", f"{NAME}.quant_map", lambda x: x.flip(0), "quant_map is not the table of nf4"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "shape": [7, 2**33]}), "which are no weight of"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "shape": [-7, 128]}), "its shape is"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "blocksize": 0}), "its blocksize is 0"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "blocksize": 1 << 39}), "absmax holds float32"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "quant_type": "fp4"}), "its quant_type is 'fp4'"),
    ("nf4", STATE4, json_bytes(lambda s: [s]), "does not describe a weight"),
    ("nf4", STATE4, lambda x: x[:-1], "is not JSON"),
    ("nf4", STATE4, json_bytes(lambda s: {**s, "nested_blocksize": 256, "nested_offset": 0}), "scales are quantized"),
    ("nf4 twice", f"{NAME}.nested_absmax", lambda x: None, "scales are quantized"),
    ("nf4 twice", f"{NAME}.nested_absmax", filled(torch.inf), "scales are NaN or infinite"),
    ("nf4 twice", f"{NAME}.nested_quant_map", lambda x: x[:9], r"nested_quant_map holds float32 of shape \(9,\)"),
    ("nf4 twice", f"{NAME}.absmax", lambda x: x.view(torch.int8), "absmax holds int8"),
    ("llm.int8", "layer.SCB", lambda x: x[:3], r"layer.SCB holds float32 of shape \(3,\)"),
    ("llm.int8", "layer.SCB", filled(torch.nan), "layer.SCB cannot be read"),
    ("llm.int8", NAME, lambda x: x.view(torch.uint8), "layer.weight holds uint8"),
    ("llm.int8", NAME, lambda x: x.flatten(), "LLM.int8 stores matrices"),
    ("llm.int8", "layer.weight_format", filled(2), "lies in tiles of a GPU"),
    ("torchao int4", "layer._weight_scale", lambda x: None, "no scale of layer.weight"),
    ("torchao int4", "layer._weight_scale", lambda x: x[:, :2], r"_weight_scale has shape \(7, 2\)"),
    ("torchao int4", "layer._weight_scale", filled(torch.nan), "scales are NaN or infinite"),
    ("torchao int4", "layer._weight_scale", lambda x: x.view(torch.int16), "_weight_scale holds int16"),
    ("torchao int4", "layer._weight_zero_point", lambda x: x[:3], r"zero_point has shape \(3, 4\)"),
    ("torchao int4", "layer._weight_qdata", filled(8), "codes outside of -8 to 7"),
    ("torchao int4", "layer._weight_qdata", lambda x: x[:, :100], "do not fit a weight of"),
    ("torchao int4", "layer._weight_qdata", lambda x: x.view(torch.uint8), "_weight_qdata holds uint8"),
    ("torchao float8", "layer._weight_qdata", lambda x: x.view(torch.int8), "_weight_qdata holds int8"),
    ("torchao float8", "layer._weight_scale", lambda x: x[:2], r"_weight_scale has shape \(2, 1\)"),
    ("mlx 4", "layer.biases", lambda x: None, "no tensor layer.biases"),
    ("mlx 4", "layer.biases", lambda x: x[:3], r"layer.biases holds float32 of shape \(3, 1\)"),
    ("mlx 4", "layer.biases", filled(torch.inf), "layer.biases cannot be read"),
    ("mlx 4", "layer.scales", lambda x: x.view(torch.int32), "layer.scales holds int32"),
    ("mlx 4", "layer.scales", lambda x: x[:3], "do not hold groups of 128 in 4 bits"),
    ("mlx 4", NAME, lambda x: x.view(torch.int32), "layer.weight holds int32"),
    ("mlx 4", NAME, lambda x: x[:, :15], "do not hold groups of 128 in 4 bits"),
    ("mlx mxfp4", "layer.scales", filled(255), "scales are NaN or infinite"),
    ("mlx nvfp4", "layer.scales", filled(127), "scales are NaN or infinite"),
    ("mlx nvfp4", "layer.scales", lambda x: x.view(torch.float8_e4m3fn), "layer.scales holds float8_e4m3fn"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "change", "said"), DAMAGED, ids=[f"{row[0]}: {row[3]}" for row in DAMAGED])
def test_damaged_tensors_are_refused_by_name(
    kind: str, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    stored, metadata, config = recorded(kind)
    del stored["expected"]
    changed = change(stored.pop(name))
    with pytest.raises(QuarkError, match=said) as caught:
        source = source_of(tmp_path, stored if changed is None else {**stored, name: changed}, metadata, config)
        for each in source.names():
            source.float(each)
    assert type(caught.value) is (NotSupportedError if "tiles of a GPU" in said else FormatError)


METADATA = [
    ({"tensor_names": "5"}, FormatError, "not a list of names"),
    ({"tensor_names": "["}, FormatError, "is not JSON"),
    ({NAME: "7"}, FormatError, "not an object"),
    ({NAME: ""}, FormatError, "is not JSON"),
    (described("Int4TilePackedTo4dTensor"), NotSupportedError, "Int4TilePackedTo4dTensor', whose layout is not read"),
    (described("IntxUnpackedToInt8Tensor", block_size=[1, 0]), FormatError, r"blocks of \[1, 0\] do not fit"),
    (described("IntxUnpackedToInt8Tensor", block_size=[1, True]), FormatError, r"blocks of \[1, True\] do not fit"),
    (described("IntxUnpackedToInt8Tensor", block_size=[1, 48]), FormatError, r"blocks of \[1, 48\] do not fit"),
    (described("IntxUnpackedToInt8Tensor", block_size="1, 32"), FormatError, "do not fit"),
    (described("IntxUnpackedToInt8Tensor", block_size=[7, 32]), FormatError, "_weight_scale has shape"),
    (
        described("IntxUnpackedToInt8Tensor", block_size=[1, 32], target_dtype="uint4"),
        NotSupportedError,
        "are not read",
    ),
    (described("IntxUnpackedToInt8Tensor"), FormatError, "_weight_scale has shape|do not fit"),
]


@pytest.mark.parametrize(("change", "kind", "said"), METADATA)
def test_metadata_of_torchao_that_describe_nothing_are_refused(
    change: dict[str, str], kind: type[QuarkError], said: str, tmp_path: Path
) -> None:
    stored, metadata, config = recorded("torchao int4")
    del stored["expected"]
    if change == described("IntxUnpackedToInt8Tensor"):  # without blocks: they are those of the scales
        stored["layer._weight_scale"] = stored["layer._weight_scale"][:, :3]
    with pytest.raises(kind, match=said):
        source_of(tmp_path, stored, metadata | change, config)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"mode": "mxfp3"}, NotSupportedError, "the mode 'mxfp3' of MLX is not read"),
        ({"bits": 7}, FormatError, "in 7 bits"),
        ({"group_size": 1 << 40}, FormatError, "do not hold groups"),
        ({"group_size": -64}, FormatError, "groups of -64"),
        ({"mode": "nvfp4"}, FormatError, "groups of 128 in 4 bits of the mode nvfp4"),
        ({"layer": False}, FormatError, "that this layer is not quantized"),
    ],
)
def test_what_the_config_of_mlx_says_wrongly_is_refused(
    change: dict[str, Any], kind: type[QuarkError], said: str, tmp_path: Path
) -> None:
    stored, metadata, config = recorded("mlx 4")
    del stored["expected"]
    with pytest.raises(kind, match=said):
        source_of(tmp_path, stored, metadata, config | change)


def test_integers_that_no_program_describes_are_refused(tmp_path: Path) -> None:
    stored, metadata, config = recorded("llm.int8")
    with pytest.raises(FormatError, match=r"layer\.weight has the type int8, and nothing says how to decode it"):
        source_of(tmp_path, {NAME: stored[NAME]}, metadata, config)
