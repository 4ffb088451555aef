"""The gptq format and auto-round folders: made here as their programs define them, and decoded by their formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.errors import FormatError, NotSupportedError, ShapeError
from quark.torch import export_safetensors, import_model_from_safetensors
from quark.torch.checkpoint.dequantize import dequantize
from quark.torch.layers.replace import quantized_layers
from tests.models.checkpoints import change_config, frozen, logits, stored, weights
from tests.models.torch_zoo import tiny_llama

GROUP = 32
Q = "model.layers.0.self_attn.q_proj"


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """Fields down the rows as one stream of bits in 32-bit words, least significant first."""
    stream = ((fields[:, None] >> np.arange(bits)[:, None]) & 1).reshape(-1, fields.shape[1]).astype(np.uint8)
    packed = np.packbits(stream.T, axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32).T.copy())


def fields_of(packed: torch.Tensor, bits: int) -> np.ndarray:
    """Inverse of `words`."""
    stream = np.unpackbits(packed.numpy().T.copy().view(np.uint8), axis=1, bitorder="little")
    return (stream.reshape(packed.shape[1], -1, bits).astype(np.int64) << np.arange(bits)).sum(-1).T


class Written:
    """A folder as AutoGPTQ, gptqmodel or auto-round writes it, and its float weights."""

    def __init__(
        self,
        folder: Path,
        bits: int = 4,
        symmetric: bool = True,
        version: int = 1,
        group: int = GROUP,
        ordered: bool = False,
        dtype: torch.dtype = torch.float16,
        other: dict[str, dict[str, Any]] | None = None,
        least_zero: int = 1,
        biased: bool = False,
        **entries: Any,
    ) -> None:
        self.folder, self.other = folder, other or {}
        self.model = tiny_llama(dtype=dtype, attention_bias=biased)
        for name, bias in self.model.named_parameters():
            if name.endswith("bias"):
                bias.data.uniform_(-1, 1).copy_(bias.half())
        self.model.save_pretrained(folder)
        tensors, draw = load_file(folder / "model.safetensors"), np.random.default_rng(3)
        for name in [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]:
            one = {"bits": bits, "group_size": group, "sym": symmetric, **self.other.get(name, {})}
            rows, columns = tensors.pop(f"{name}.weight").shape
            size = columns if one["group_size"] == -1 else one["group_size"]
            made = self._layer(draw, rows, columns, size, one["bits"], one["sym"], version, ordered, least_zero)
            weight = made.pop("weight")
            self.model.get_submodule(name).weight.data = weight.to(dtype)
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in made.items()}
            if f"{name}.bias" in tensors:
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"].half()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": ordered,
            **entries,
        }
        (folder / "config.json").write_text(json.dumps(config))

    @staticmethod
    def _layer(
        draw: np.random.Generator,
        rows: int,
        columns: int,
        size: int,
        bits: int,
        symmetric: bool,
        version: int,
        ordered: bool,
        least_zero: int,
    ) -> dict[str, torch.Tensor]:
        groups, top = columns // size, 1 << bits
        order = np.arange(columns) // size
        if ordered:
            draw.shuffle(order)
        codes = draw.integers(0, top, (columns, rows))
        zeros = draw.integers(least_zero, top, (groups, rows)) if not symmetric else np.full((groups, rows), top // 2)
        scales = torch.from_numpy(draw.uniform(0.01, 0.02, (groups, rows))).half()
        values = (codes - zeros[order]).astype(np.float32) * scales.float().numpy()[order]
        stored_zeros = words((zeros - 1 if version == 1 else zeros).T, bits).T.contiguous()
        return {
            "qweight": words(codes, bits),
            "qzeros": stored_zeros,
            "scales": scales,
            "g_idx": torch.from_numpy(order.astype(np.int32)),
            "weight": torch.from_numpy(values.T.copy()),
        }

    def change(self, edit: Any) -> None:
        """Change the tensors of the file."""
        tensors = load_file(self.folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})

    def check(self, dtype: torch.dtype = torch.float16) -> Any:
        """The model as it is read: it computes with the very weights that were written."""
        loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=dtype), self.folder)
        assert torch.equal(logits(loaded), logits(self.model))
        return loaded


KINDS = [
    {},
    {"bits": 3, "symmetric": False},
    {"bits": 2, "symmetric": False, "version": 2, "least_zero": 0},
    {"bits": 8, "group": -1},
    {"symmetric": False, "ordered": True},
    {"bits": 3, "ordered": True},
    {"dtype": torch.bfloat16, "symmetric": False, "version": 2, "least_zero": 0},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_folders_decode_to_the_formula(kind: dict[str, Any], tmp_path: Path) -> None:
    Written(tmp_path / "made", **kind).check(kind.get("dtype", torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", [16, 64, -1])
def test_every_kind_of_folder(bits: int, symmetric: bool, version: int, group: int, tmp_path: Path) -> None:
    Written(tmp_path / "made", bits, symmetric, version, group).check()


def test_a_folder_is_converted_to_the_bit_or_refused(tmp_path: Path) -> None:
    for form, kind in (("compressed-tensors", {}), ("awq", {"symmetric": False}), ("gptq", {}), ("quark", {"bits": 8})):
        made = Written(tmp_path / f"from-{form}", **kind)
        folder = export_safetensors(made.check(), tmp_path / form, form)
        again = import_model_from_safetensors(tiny_llama(seed=7, dtype=torch.float16), folder)
        assert torch.equal(logits(again), logits(made.model)), form
    made = Written(tmp_path / "ordered", ordered=True)
    with pytest.raises(NotSupportedError, match=r"layers.*weight: .*not consecutive inputs \(desc_act\).*--requantize"):
        export_safetensors(made.check(), tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
    assert torch.equal(logits(dequantize(made.check())), logits(made.model))


def test_layers_of_their_own_are_read(tmp_path: Path) -> None:
    eight, none = {"bits": 8, "group_size": 16, "sym": False}, "model.layers.1.self_attn.v_proj"
    entries = {"+:.*layers\\.0\\.self_attn\\.q_proj$": eight, "-:.*lm_head": {}}
    loaded = Written(tmp_path / "made", other={Q: eight}, dynamic=entries).check()
    specs = {name: layer.spec.weight for name, layer in quantized_layers(loaded).items()}
    assert (specs[Q].dtype.bits, specs[none].dtype.bits) == (8, 4)
    change_config(tmp_path / "made", dynamic={"-:.*q_proj": {}})
    with pytest.raises(FormatError, match=r"q_proj is quantized in the files, but '-:.*q_proj' of dynamic"):
        import_model_from_safetensors(tiny_llama(), tmp_path / "made")


def test_zeros_of_old_programs_and_their_biases(tmp_path: Path) -> None:
    """AutoGPTQ gave each layer a bias of zeros; auto-round writes no g_idx."""
    made = Written(tmp_path / "made")
    made.change(lambda t: t.update({f"{Q}.bias": torch.zeros(t[f"{Q}.qweight"].shape[1], dtype=torch.float16)}))
    made.check()
    made.change(lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])
    made.check()
    made.change(lambda t: t[f"{Q}.bias"].fill_(1))
    with pytest.raises(FormatError, match=f"nothing takes: {Q}.bias"):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)


@pytest.mark.parametrize("given", [True, False], ids=["into a model", "a model of its own"])
def test_float16_biases_of_a_bfloat16_model(given: bool, tmp_path: Path) -> None:
    """gptqmodel and auto-round write biases and scales in float16, whatever the model is in."""
    made = Written(tmp_path / "made", biased=True, dtype=torch.bfloat16)
    model = tiny_llama(seed=9, dtype=torch.bfloat16, attention_bias=True) if given else None
    options: dict[str, Any] = {"device": "cpu", "attn_implementation": None}
    loaded = import_model_from_safetensors(model, made.folder, **options)
    assert torch.equal(logits(loaded), logits(made.model))
    folder = export_safetensors(loaded, tmp_path / "out", "compressed-tensors")
    assert torch.equal(logits(import_model_from_safetensors(None, folder, **options)), logits(made.model))


def test_a_zero_point_of_0_in_version_1_is_read_only_where_it_is_known(tmp_path: Path) -> None:
    """gptqmodel takes 1 from each field of a word as one number; others spoil the word."""
    made = Written(tmp_path / "made", symmetric=False, version=2, least_zero=0)

    def borrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name] = tensors[name] - 0x11111111

    made.change(borrow)
    change_config(made.folder, checkpoint_format="gptq", meta={"quantizer": ["gptqmodel:7.7.0"]})
    made.check()
    change_config(made.folder, meta=None)
    with pytest.raises(FormatError, match=r"self_attn\.\w+.weight cannot be read: its qzeros hold 15: .*0 or as 16"):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)


DAMAGES = {
    "shape": (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:-1].clone()}), r"q_proj\.qweight has shape"),
    "scales": (
        lambda t: t[f"{Q}.scales"][0].fill_(float("nan")),
        r"q_proj\.weight cannot be read: its scale holds NaN",
    ),
    "missing": (lambda t: t.pop(f"{Q}.qzeros"), r"lacks 1 tensors of the model: .*q_proj\.weight_zero_point"),
    "zeros": (lambda t: t[f"{Q}.qzeros"][0].add_(1), "qzeros are not 7 everywhere"),
    "dtype": (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}), r"q_proj\.qweight is torch.int64"),
    "order": (lambda t: t[f"{Q}.g_idx"][:1].fill_(1), r"g_idx cannot be read: its groups are no runs of 32 inputs"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_refused(damage: str, tmp_path: Path) -> None:
    made = Written(tmp_path / "made")
    edit, message = DAMAGES[damage]
    made.change(edit)
    with pytest.raises(FormatError, match=message):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)


@pytest.mark.parametrize("group", [-1, 99])
def test_groups_out_of_range_are_refused(group: int, tmp_path: Path) -> None:
    made = Written(tmp_path / "made", ordered=True)
    made.change(lambda t: t[f"{Q}.g_idx"][3:4].fill_(group))
    with pytest.raises(FormatError, match=rf"q_proj\.weight cannot be read: its g_idx holds .*{group}.* groups"):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"bits": 5},
        {"group_size": 0},
        {"group_size": 24},
        {"sym": "yes"},
        {"checkpoint_format": "marlin"},
        {"pack_dtype": "int64"},
        {"rotation": "hadamard"},
        {"dynamic": {"(": {}}},
        {"dynamic": {".*q_proj": {"desc_act": True}}},
        {"dynamic": 3},
        {"dynamic": {".*q_proj": 3}},
        {"meta": 3},
    ],
    ids=str,
)
def test_other_forms_are_refused_in_a_line(entries: dict[str, Any], tmp_path: Path) -> None:
    made = Written(tmp_path / "made")
    change_config(made.folder, **entries)
    with pytest.raises((FormatError, NotSupportedError)) as caught:
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)
    assert "\n" not in str(caught.value)
    assert any(named in str(caught.value) for named in ("gptq", "dynamic", "_proj", "sym"))


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_64", "int4_wo_per_channel"])
def test_what_is_written_decodes_by_the_formula(scheme: str, tmp_path: Path) -> None:
    model, symmetric = frozen(scheme, torch.float16), not scheme.startswith("u")
    tensors, config = stored(export_safetensors(model, tmp_path / "out", "gptq"))
    size = -1 if scheme.endswith("channel") else int(scheme.rsplit("_", 1)[1])
    assert config == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        "bits": 4,
        "group_size": size,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
        "dynamic": {"-:^lm_head$": {}},
    }
    for name, weight in weights(model).items():
        order = tensors[f"{name}.g_idx"].numpy()
        columns = weight.shape[1]
        assert np.array_equal(order, np.arange(columns) // (columns if size == -1 else size))
        codes = fields_of(tensors[f"{name}.qweight"], 4)
        zeros = fields_of(tensors[f"{name}.qzeros"].t().contiguous(), 4).T + (1 if symmetric else 0)
        values = (codes - zeros[order]).astype(np.float32) * tensors[f"{name}.scales"].float().numpy()[order]
        assert np.array_equal(values.T.astype(np.float16), weight.numpy())


def test_ragged_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"gate_proj: the gptq format packs 4-bit codes .* 260 leave a rest"):
        export_safetensors(frozen("int4_wo_per_channel", intermediate_size=260), tmp_path / "out", "gptq")


# auto-round ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "version", "name"),
    [
        ("auto_round:auto_gptq", 1, "auto-round"),
        ("auto_round:gptq", 1, "intel/auto-round"),
        ("auto", 1, "auto-round"),
        ("auto_round", 2, "auto-round"),
        ("auto_round:gptqmodel", 2, "auto-round"),
    ],
)
def test_auto_round_folders_are_read(packing: str, version: int, name: str, tmp_path: Path) -> None:
    eight, two = {"bits": 8, "group_size": 64}, {"bits": 2, "data_type": "int"}
    up = "model.layers.1.mlp.up_proj"
    made = Written(
        tmp_path / "made",
        symmetric=False,
        version=version,
        other={Q: eight, up: two},
        quant_method=name,
        packing_format=packing,
        block_name_to_quantize="model.layers",
        extra_config={".*layers\\.1\\.mlp\\.up_.*": two, "lm_head": {"bits": 16}, Q: eight, "q_proj|o_proj$": {}},
        autoround_version="0.16.1",
    )
    made.change(lambda t: [t.pop(n) for n in list(t) if n.endswith("g_idx")])
    made.check()


def test_auto_round_folders_of_awq_are_read(tmp_path: Path) -> None:
    model = frozen("uint4_wo_32", torch.float16)
    folder = export_safetensors(model, tmp_path / "out", "awq")
    entries = {"packing_format": "auto_round:auto_awq", "sym": False, "extra_config": {"lm_head": {"bits": 16}}}
    change_config(folder, quant_method="auto-round", **entries)
    loaded = import_model_from_safetensors(tiny_llama(seed=9, dtype=torch.float16), folder)
    assert torch.equal(logits(loaded), logits(model))
    change_config(folder, extra_config={Q: {"bits": 8}})
    with pytest.raises(NotSupportedError, match=f"bits=8 for {Q}; of auto_round:auto_awq"):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"packing_format": "auto_round:llm_compressor"},
        {"packing_format": "mlx"},
        {"data_type": "mx_fp"},
        {"act_bits": 8},
        {"static_kv_dtype": "fp8"},
        {"extra_config": {Q: {"act_bits": 8}}},
        {"extra_config": [Q]},
        {"bits": 6},
    ],
    ids=str,
)
def test_other_auto_round_folders_are_refused(entries: dict[str, Any], tmp_path: Path) -> None:
    made = Written(tmp_path / "made", quant_method="auto-round")
    change_config(made.folder, **entries)
    with pytest.raises((FormatError, NotSupportedError), match="auto-round|gptq"):
        import_model_from_safetensors(tiny_llama(dtype=torch.float16), made.folder)
