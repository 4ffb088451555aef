"""Dynamic quantization that is timed, with a timer of the test's own: nothing here depends on the machine's speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import SlowerThanFloatError
from quark.onnx import ModelQuantizer
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.decide import decide, write
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.latency.kernels import ProfiledModel, Timer
from quark.onnx.search.latency.measure import leave_slower_in_float
from quark.onnx.search.latency.noise_sample import noise_sample


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_CACHE", str(tmp_path / "cache"))


def model_of_words(columns: Sequence[int] = (48, 40)) -> onnx.ModelProto:
    """Rows of a table, each through MatMuls in a row."""
    rng, x, width = np.random.default_rng(0), "rows", 32
    nodes = [helper.make_node("Gather", ["table", "words"], ["rows"], name="table_of_words")]
    constants = {"table": rng.normal(0, 1, (64, width))}
    for place, wide in enumerate(columns):
        constants[f"w{place}"] = rng.normal(0, 0.2, (width, wide))
        nodes.append(helper.make_node("MatMul", [x, f"w{place}"], [f"y{place}"], name=f"matmul{place}"))
        x, width = f"y{place}", wide
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("words", TensorProto.INT64, [1, "length"])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, "length", width])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def clock(seconds: Callable[[str], float]) -> Timer:
    """Gives each kernel the seconds that a function of its signature says."""

    def give(models: Sequence[ProfiledModel], _: float) -> list[dict[str, float]]:
        return [{kernel.name: seconds(kernel.signature) for kernel in model.kernels} for model in models]

    return give


def kernels(seconds: Callable[[str], float]) -> Counter[str]:
    """The op types of what is made of the model where kernels take these times."""
    model = load(model_of_words())
    settings = prepare(model, ModelQuantizer("INT8_CPU_DYNAMIC").settings)
    settings = leave_slower_in_float(Prepared(model), settings, clock(seconds))
    write(decide(Prepared(model), settings))
    return Counter(node.op_type for node in to_proto(model).graph.node)


def _integers(signature: str) -> bool:
    return "DynamicQuantize" in signature or "MatMulInteger" in signature


@pytest.mark.slow
def test_what_is_faster_as_it_comes_stays_so() -> None:
    found = kernels(lambda signature: 1e-6 if _integers(signature) or "MatMul" not in signature else 1e-3)
    assert found["MatMulInteger"] == 2 and found["MatMul"] == 0
    # The table loses less than the products gain.
    assert found["Gather"] > 1


@pytest.mark.slow
def test_a_slow_product_is_computed_in_float_from_codes_and_the_table_that_then_loses_is_float() -> None:
    found = kernels(lambda signature: 1e-3 if _integers(signature) else 1e-6)
    assert found["MatMulInteger"] == found["DynamicQuantizeLinear"] == 0 and found["MatMul"] == 2
    assert found["Gather"] == 1
    # What decodes the codes of both weights when the file is loaded.
    assert found["Cast"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "has_codes"), [(3e-6, True), (3e-5, False)])
def test_a_table_that_loses_no_more_than_measurements_differ_by_stays_small(seconds: float, has_codes: bool) -> None:
    """Products take 1 ms each, however they are computed, and each other kernel a share of that."""
    found = kernels(lambda signature: 1e-3 if "MatMul" in signature else seconds)
    assert (found["Gather"] > 1) == has_codes


@pytest.mark.slow
def test_one_slow_product_of_two() -> None:
    """The second has 48 channels before it, and 40 behind it."""

    def seconds(signature: str) -> float:
        if not _integers(signature):
            return 1e-3
        return 1e-2 if "48" in signature and "40" in signature else 1e-6

    found = kernels(seconds)
    assert found["MatMulInteger"] == 1 and found["MatMul"] == 1


@pytest.mark.slow
def test_where_all_is_slower_nothing_is_written() -> None:
    model = load(model_of_words(columns=()))
    settings = prepare(model, ModelQuantizer("INT8_CPU_DYNAMIC").settings)
    with pytest.raises(SlowerThanFloatError, match=r"No integers are as fast as float .* noise of words \[1, 128\]"):
        leave_slower_in_float(Prepared(model), settings, clock(lambda _: 1e-6))


def test_noise_has_the_first_size_that_a_model_runs_with() -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = numpy_helper.from_array(np.array([4, 3, 48 * 12]), "shape")
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph([node], "image", values[:1], values[1:], [shape])
    found = noise_sample(load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)))
    assert found is not None
    feed, words, _ = found
    assert feed["x"].shape == (1, 3, 48, 48) and words == "noise of x [1, 3, 48, 48]"


def test_axes_of_the_name_of_a_first_one_have_its_size() -> None:
    """As the states of two layers, which come layer by layer."""
    node = helper.make_node("MatMul", ["x", "state"], ["y"])
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "steps"]),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [2, "steps", "batch"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph([node], "states", values[:2], values[2:])
    found = noise_sample(load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)))
    assert found is not None and found[1] == "noise of x [1, 128], state [2, 128, 1]"


def test_a_model_that_runs_with_no_size_has_no_noise() -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = numpy_helper.from_array(np.array([7]), "shape")
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "h"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph([node], "seven", values[:1], values[1:], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert noise_sample(load(model)) is None
