"""`quark plan` of an ONNX file says what `quark quantize` then makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.commands.onnx_files.plan import planned_bytes
from quark.core.dtypes import DTYPES
from quark.core.granularity import PerChannel, PerGroup
from quark.core.spec import TensorSpec
from tests.commands.program import quark
from tests.models.onnx_bodies import in_branches
from tests.models.onnx_zoo import Builder


def wide() -> onnx.ModelProto:
    """Weights of 1.3 MB, so that names and nodes weigh little."""
    b = Builder()
    hidden = b.node("MatMul", ["x", b.constant("a", b.random.normal(0, 0.1, (128, 1024)))], "hidden")
    live = b.node("Relu", [hidden], "live")
    b.node("MatMul", [live, b.constant("b", b.random.normal(0, 0.1, (1024, 192)))], "last")
    b.node("Erf", ["last"], "y")
    return b.model({"x": ["n", 128]}, {"y": ["n", 192]})


def different_branches() -> onnx.ModelProto:
    """Two branches of weights of their own: those of the same bits are written once."""
    model = in_branches(wide(), 2)
    for node in model.graph.node:
        for attribute in node.attribute:
            for inner in attribute.g.node:
                for body in (each.g for each in inner.attribute if each.name == "else_branch"):
                    for tensor in body.initializer:
                        array = onnx.numpy_helper.to_array(tensor)
                        tensor.CopyFrom(onnx.numpy_helper.from_array(array[::-1].copy(), tensor.name))
    return model


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float16."""
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


@pytest.mark.slow
def test_a_float16_file_has_the_size_that_was_planned(tmp_path: Path) -> None:
    """Its weights are float32 on the way."""
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(in_half(wide()), source)
    planned = quark("plan", source)
    size = re.search(r"size: [\d.]+ MB -> about ([\d.]+) MB", planned.out)
    assert size is not None, planned.err
    assert quark("quantize", source, "-o", out).code == 0
    assert float(size[1]) == pytest.approx(out.stat().st_size / 1e6, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "A8W8", "MATMUL_NBITS", "INT8_CPU_WEIGHTS"])
@pytest.mark.parametrize("branches", [False, True])
def test_the_file_that_follows_has_the_size_and_the_nodes(config: str | None, branches: bool, tmp_path: Path) -> None:
    if branches and config == "A8W8":
        pytest.skip("the branch that no sample runs stays in float, which only data show")
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(different_branches() if branches else wide(), source)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32))
    given = ["--config", config] if config else []
    planned = quark("plan", source, *given)
    assert planned.code == 0, planned.err
    size = re.search(r"size: [\d.]+ MB -> about ([\d.]+) MB", planned.out)
    assert size is not None and "Erf" in planned.out
    assert ("data: needed, and not given" if config == "A8W8" else "data: none are needed") in planned.out
    done = quark("quantize", source, *given, *(["--calib", tmp_path / "x.npz"] if config == "A8W8" else []), "-o", out)
    assert done.code == 0, done.err
    assert float(size[1]) == pytest.approx(out.stat().st_size / 1e6, rel=0.05)


def test_the_bytes_of_a_weight() -> None:
    spec = TensorSpec(DTYPES["uint4"], granularity=PerGroup(axis=0, size=32), symmetric=False)
    assert planned_bytes((64, 10), spec) == 64 * 10 // 2 + 20 * 4 + 10
    assert planned_bytes((3, 5), TensorSpec(DTYPES["int8"], granularity=PerChannel(0))) == 15 + 3 * 5


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    onnx.save(wide(), tmp_path / "in.onnx")
    for words, says in (
        (["--config", "A8W9"], "A8W8"),
        (["--exclude", "nowhere"], "no node has the name"),
        (["--layer", "a=int4"], "does not apply"),
        (["--bits", "4"], "--bits"),
    ):
        refused = quark("plan", tmp_path / "in.onnx", *words)
        assert refused.code != 0 and says in refused.err, words
