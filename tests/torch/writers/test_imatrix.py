"""Importance matrices: what is written is what llama.cpp's code reads, and scales follow it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quark.core.quantize import block_qparams, fake_quantize
from quark.core.spec import block_spec
from quark.errors import CalibrationError, FormatError, OutputError, OutputExistsError
from quark.gguf import Sums, read_imatrix, save_imatrix
from quark.torch import ModelQuantizer, gguf_config
from quark.torch.writers.gguf.imatrix import collect_imatrix
from tests.torch.writers.test_gguf import IDS, MIX_SIZES, build

SUMS: Sums = {
    "blk.0.ffn_down.weight": (np.array([[8, 0, 2, 6]], np.float32), np.array([2], np.float32)),
    "blk.0.ffn_up_exps.weight": (np.array([[4, 8], [0, 0]], np.float32), np.array([4, 0], np.float32)),
}
MEANS = {"blk.0.ffn_down.weight": [[4, 0, 1, 3]], "blk.0.ffn_up_exps.weight": [[1, 2], [1, 1]]}


def test_both_forms_hold_the_means(tmp_path: Path) -> None:
    for name in ("m.gguf", "m.dat"):
        found = read_imatrix(save_imatrix(SUMS, tmp_path / name, ["wiki.txt"]))
        assert found.keys() == MEANS.keys()
        for tensor, mean in MEANS.items():
            assert np.array_equal(found[tensor].reshape(-1), np.ravel(mean).astype(np.float32))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {t.name: list(map(int, t.shape)) for t in reader.tensors} == {
        "blk.0.ffn_down.weight.in_sum2": [4, 1],
        "blk.0.ffn_down.weight.counts": [1, 1],
        "blk.0.ffn_up_exps.weight.in_sum2": [2, 2],
        "blk.0.ffn_up_exps.weight.counts": [1, 2],
    }
    held = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert held == {
        "general.type": "imatrix",
        "imatrix.datasets": ["wiki.txt"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 512,
    }


def test_the_old_form_is_that_of_llama_cpp(tmp_path: Path) -> None:
    """Bytes as save_imatrix_legacy of imatrix.cpp lays them out: means times calls, then calls and the dataset."""
    name, values = b"blk.0.ffn_down.weight", np.array([12, 0, 3, 9], "<f4")
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 3, 4) + values.tobytes()
    (tmp_path / "theirs").write_bytes(data + struct.pack("<ii", 3, 4) + b"wiki")
    assert read_imatrix(tmp_path / "theirs")["blk.0.ffn_down.weight"].tolist() == [[4, 0, 1, 3]]
    only = {"blk.0.ffn_down.weight": SUMS["blk.0.ffn_down.weight"]}
    ours = save_imatrix(only, tmp_path / "ours.dat", ["wiki"]).read_bytes()
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, 4) + (values / 3).tobytes()
    assert ours == data + struct.pack("<ii", 1, 4) + b"wiki"


@pytest.mark.slow
def test_what_a_model_multiplies_is_summed() -> None:
    model = build("llama", **MIX_SIZES)
    names = {"attn_q": "self_attn.q_proj", "ffn_down": "mlp.down_proj"}
    expected = {}
    for tensor, leaf in names.items():
        layer = model.get_submodule(f"model.layers.1.{leaf}")
        layer.register_forward_pre_hook(lambda m, a, t=tensor: expected.__setitem__(t, a[0].flatten(0, 1)))
    sums = collect_imatrix(model, [IDS])
    assert len(sums) == 14 and all(name.startswith("blk.") for name in sums)
    for tensor, x in expected.items():
        total, counts = sums[f"blk.1.{tensor}.weight"]
        np.testing.assert_allclose(total[0], x.square().sum(0), rtol=1e-5)
        assert counts.tolist() == [IDS.numel()]
    with pytest.raises(CalibrationError, match="empty"):
        collect_imatrix(model, [])


@pytest.mark.slow
def test_scales_follow_the_file(tmp_path: Path) -> None:
    model = build("llama", attention_bias=False, **MIX_SIZES)
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    sums = collect_imatrix(model, [IDS])
    file = save_imatrix(sums, tmp_path / "m.dat")
    quantizer = ModelQuantizer(gguf_config(model, "q4_0", imatrix=file))
    quantized = quantizer.freeze(quantizer.quantize_model(model))
    total, counts = sums["blk.0.ffn_down.weight"]
    spec, importance = block_spec("q4_0"), torch.from_numpy(total / counts[:, None])
    expected = fake_quantize(weight, block_qparams(weight, importance, spec), spec)
    found = quantized.model.layers[0].mlp.down_proj.weight.detach()
    assert torch.equal(found, expected)
    plain = fake_quantize(weight, block_qparams(weight, None, spec), spec)
    loss = [float((F.mse_loss(y, weight, reduction="none") * importance).sum()) for y in (found, plain)]
    assert loss[0] < loss[1]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    good = {name: save_imatrix(SUMS, tmp_path / f"m{name}").read_bytes() for name in (".gguf", ".dat")}
    nan = {"blk.0.x.weight": (np.array([[np.nan]], np.float32), np.array([1], np.float32))}
    save_imatrix(nan, tmp_path / "nan.dat")
    os.mkfifo(tmp_path / "pipe")
    for name, data in {
        "empty": b"",
        "text": b"hello world, hello",
        "cut": good[".dat"][:40],
        "half": good[".gguf"][:90],
    }.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "none").write_bytes(struct.pack("<i", -1))
    for name in ("empty", "text", "cut", "half", "none", "nan.dat", "pipe", "absent", "."):
        with pytest.raises(FormatError):
            read_imatrix(tmp_path / name)
    with pytest.raises(OutputError, match=r"\.gguf or \.dat"):
        save_imatrix(SUMS, tmp_path / "m.txt")
    with pytest.raises(OutputExistsError):
        save_imatrix(SUMS, tmp_path / "m.dat")


@pytest.mark.slow
def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build("llama", **MIX_SIZES)
    with pytest.raises(FormatError, match="made for another model"):
        ModelQuantizer(gguf_config(model, "q4_0", imatrix=save_imatrix(SUMS, tmp_path / "m.gguf"))).quantize_model(
            model
        )
    small = collect_imatrix(build("llama"), [IDS])
    with pytest.raises(FormatError, match=r"attn_q.weight has 64 values; .* reads 256 columns"):
        file = save_imatrix(small, tmp_path / "small.gguf")
        ModelQuantizer(gguf_config(model, "q4_0", imatrix=file)).quantize_model(model)


def test_an_array_longer_than_the_file_ends_at_once(tmp_path: Path) -> None:
    """It used to be read until the memory was full: behind the end there were values of no bytes, without an end."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    of_uint32 = struct.pack("<IQ", 4, 2**60)
    (tmp_path / "long.gguf").write_bytes(header + of_uint32 + bytes(32))
    with pytest.raises(FormatError, match="damaged one: it ends at byte"):
        read_imatrix(tmp_path / "long.gguf")


def test_arrays_in_arrays_without_an_end_are_refused(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "deep.gguf").write_bytes(header + struct.pack("<IQ", 9, 1) * 5000)
    with pytest.raises(FormatError, match="damaged one: maximum recursion"):
        read_imatrix(tmp_path / "deep.gguf")
