"""Bodies of If, Loop and Scan are quantized as the same nodes are outside of them; what never runs stays in float."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.core.metrics import sqnr
from quark.errors import ConfigError, NothingToQuantizeError
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.calibration.prepared import Prepared
from quark.onnx.flow.prepare import prepare
from quark.onnx.graph.model_file import load, to_proto
from quark.onnx.search.settle import convert
from tests.models.onnx_bodies import BODIES, identity_if, in_branches, rows, sums
from tests.models.onnx_zoo import Array, Builder, Reader, branches, cnn, images, mlp, run, vectors

PRESETS = ("A8W8", "XINT8", "U8S8_AAWS", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "BF16")
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "MatMulNBits", "MatMulInteger", "ExtendedQuantizeLinear")


def quantized(
    model: onnx.ModelProto, feeds: list[dict[str, Array]] | None, preset: str = "A8W8", **options: Any
) -> onnx.ModelProto:
    config = get_default_config(preset)
    config.include_cle = False  # is decided by the outputs of the main graph
    config.extra_options.update(options)
    reader = None if feeds is None else Reader(feeds)
    result = ModelQuantizer(Config(config)).quantize_model(model, None, reader)
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    require_own_names(result)
    return result


def graphs(graph: onnx.GraphProto, where: str = "") -> dict[str, onnx.GraphProto]:
    """Each graph by the name of the node that holds it and of its attribute; that of the model by ""."""
    found = {where: graph}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= graphs(attribute.g, f"{node.name}.{attribute.name}")
    return found


def require_own_names(model: onnx.ModelProto) -> None:
    """No tensor and no node of a body has a name of the graphs around it."""
    parts = list(graphs(model.graph).values())
    outer = {name for node in model.graph.node for name in node.output} | {i.name for i in model.graph.initializer}
    inner = {name for part in parts[1:] for node in part.node for name in node.output}
    assert not outer & (inner | {entry.name for part in parts[1:] for entry in part.initializer})
    nodes = [node.name for part in parts for node in part.node]
    assert len(nodes) == len(set(nodes))


def counts(model: onnx.ModelProto) -> dict[str, int]:
    """Nodes that quantization wrote, in each graph."""
    return {
        where: sum(node.op_type in QUANTIZED for node in graph.node) for where, graph in graphs(model.graph).items()
    }


def arrays(graph: onnx.GraphProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def with_flags(feeds: list[dict[str, Array]], **flags: bool) -> list[dict[str, Array]]:
    return [{**feed, **{name: np.array(value) for name, value in flags.items()}} for feed in feeds]


# The same as without a body. ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_branches_are_quantized_as_a_model_of_what_they_hold(preset: str, levels: int) -> None:
    """A model that is one If has nothing to quantize outside: its bodies are quantized on their own."""
    flat, feeds = mlp(), vectors()
    model = in_branches(flat, levels)
    outer = {"outer": True} if levels > 1 else {}
    data = [*with_flags(feeds[:2], yes=True, **outer), *with_flags(feeds[2:], yes=False, **outer)]
    result = quantized(model, data, preset)
    for yes, part in ((True, feeds[:2]), (False, feeds[2:])):
        expected = run(quantized(flat, part, preset), feeds[0])
        found = run(result, with_flags(feeds[:1], yes=yes, **outer)[0])
        assert np.array_equal(found, expected)
        assert not np.array_equal(found, run(flat, feeds[0]))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_a_convolutional_branch_is_too(preset: str) -> None:
    """Passes run in the branch: BatchNormalization is folded there."""
    flat, feeds = cnn(), images()
    result = quantized(in_branches(flat), with_flags(feeds, yes=True), preset)
    kinds = {node.op_type for node in graphs(result.graph)["choice.then_branch"].node}
    assert "Conv" in kinds and "BatchNormalization" not in kinds
    expected = run(quantized(flat, feeds, preset), feeds[0])
    assert np.array_equal(run(result, with_flags(feeds[:1], yes=True)[0]), expected)


@pytest.mark.parametrize("op_type", ["Loop", "Scan"])
def test_the_range_of_a_state_is_that_of_all_steps(op_type: str) -> None:
    """The largest magnitude that any step reads is code 127, as symmetric int8 has it."""
    model, feeds = sums(op_type), rows()
    result = quantized(model, feeds, EnableSubgraph=True)
    steps = graphs(result.graph)["steps.body"]
    states = [run(model, feed) for feed in feeds]
    step_of_state = arrays(steps)["s_scale"]
    # As in test_body_feeds: the states may differ by a few roundings of float32.
    np.testing.assert_allclose(step_of_state, np.abs(states).max() / 127, rtol=1e-6)
    assert counts(result)["steps.body"] >= 8
    expected = np.concatenate(states)
    error = np.concatenate([run(result, feed) for feed in feeds]) - expected
    # Steps of scale/2 at the state, its sum, its tanh and the product, times a weight of norm below 2, 6 steps long.
    assert 0 < np.abs(error).max() < 6 * 4 * step_of_state


def test_a_captured_tensor_has_the_range_of_the_samples_that_run_the_branch() -> None:
    model = branches()
    feeds = [{"x": np.random.default_rng(seed).normal(mean, 1, (3, 8)).astype(np.float32)} for seed, mean in
             enumerate((0.8, -2.0, 0.9, -2.5))]  # fmt: skip
    result = quantized(model, feeds, EnableSubgraph=True)
    inner = graphs(result.graph)
    weight = arrays(model.graph)["w"]
    for name, part in (("then_branch", feeds[::2]), ("else_branch", feeds[1::2])):
        hidden = np.abs([feed["x"] @ weight for feed in part]).max()
        constants = arrays(inner[f"chosen_node.{name}"])
        scales = [array for key, array in constants.items() if key.startswith("product_scale")]
        assert any(array.shape == () and np.isclose(array, hidden / 127, rtol=1e-6) for array in scales)
    # The weight that only is read as codes is there once for each graph, and nowhere as floats.
    floats = [array for graph in inner.values() for array in arrays(graph).values() if array.dtype == np.float32]
    assert not any(array.shape == (8, 8) for array in floats)


# What stays in float. -------------------------------------------------------------------------------------------------


def test_bodies_stay_in_float_where_there_is_more_to_quantize() -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]
    plain = counts(quantized(branches(), feeds))
    assert plain[""] and not plain["chosen_node.then_branch"] and not plain["chosen_node.else_branch"]


def test_a_branch_that_no_sample_runs_stays_in_float(capsys: pytest.CaptureFixture[str]) -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, 2)]
    found = counts(quantized(branches(), feeds, EnableSubgraph=True))
    assert found[""] and found["chosen_node.then_branch"] and not found["chosen_node.else_branch"]
    assert "chosen_node.else_branch stays in float: no calibration sample runs it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "options"), [("UINT8_DYNAMIC_QUANT", {}), ("INT8_CPU_DYNAMIC", {}), ("U8S8_AAWS", {"WeightsOnly": True})]
)
def test_where_no_range_is_needed_bodies_are_quantized_unless_the_option_says_no(
    preset: str, options: dict[str, Any]
) -> None:
    """What runs does not matter then, and a branch may hold most of the weights."""
    model, feeds = branches(), [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]
    result = quantized(model, None, preset, **options)
    assert all(counts(result).values())
    for feed in feeds:
        assert sqnr(run(model, feed), run(result, feed)) > 20  # dB: 3 products in series, each of 8 bits, and margin
    without = counts(quantized(model, None, preset, EnableSubgraph=False, **options))
    assert without[""] and not without["chosen_node.then_branch"] and not without["chosen_node.else_branch"]


def test_a_branch_that_reads_only_zeros_stays_in_float(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of the state of a recurrent model does, where every sample is a first step."""
    b, rng = Builder(), np.random.default_rng(0)
    b.node("MatMul", ["x", b.constant("w", b.random.normal(0, 0.5, (8, 8)))], "y")
    identity_if(b, "state", "passed")
    model = b.model({"x": ["n", 8], "state": ["n", 8]}, {"y": ["n", 8], "passed": ["n", 8]})
    feeds = [{"x": rng.normal(1, 0.1, (1, 8)), "state": np.zeros((1, 8))} for _ in range(2)]
    samples = [{name: array.astype(np.float32) for name, array in feed.items()} for feed in feeds]
    options: dict[str, Any] = {"EnableSubgraph": True, "ForceQuantizeNoInputCheck": True}
    (holder,) = (node.name for node in model.graph.node if node.op_type == "If")
    found = counts(quantized(model, samples, **options))
    assert found[""] and not found[f"{holder}.then_branch"]
    assert f"{holder}.then_branch stays in float: all that it reads is zero" in capsys.readouterr().err
    samples[1]["state"][0, 3] = 1
    assert counts(quantized(model, samples, **options))[f"{holder}.then_branch"]


def test_nodes_of_bodies_are_chosen_and_left_out_by_name() -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]

    def found(**options: Any) -> dict[str, int]:
        config = get_default_config("A8W8")
        config.extra_options["EnableSubgraph"] = True
        for name, value in options.items():
            setattr(config, name, value)
        result = ModelQuantizer(Config(config)).quantize(branches(), None, Reader(feeds))
        assert result is not None
        return {where.removeprefix("chosen_node."): count for where, count in counts(result).items()}

    every = found()
    assert not found(nodes_to_exclude=["then_branch_matmul", "then_branch_last"])["then_branch"]
    assert 0 < found(nodes_to_exclude=["then_branch_last"])["then_branch"] < every["then_branch"]
    without = found(nodes_to_exclude=["chosen_node"])
    assert without[""] and not without["then_branch"] and not without["else_branch"]
    only = found(nodes_to_quantize=["else_branch_matmul"])
    assert only["else_branch"] and not only[""] and not only["then_branch"]
    with pytest.raises(ConfigError, match="then_branch_matmul"):
        found(nodes_to_exclude=["then_branch_matmull"])


def test_names_that_a_search_adds_for_the_graph_around_are_none_of_a_body() -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]
    settings = prepare(model := load(branches()), ModelQuantizer("A8W8").settings)
    around = tuple(node.name for node in model.graph if node.op_type != "If")
    settings = replace(settings, specs=replace(settings.specs, bodies=True, exclude=around))
    found = counts(to_proto(convert(Prepared(model, feeds), settings)))
    assert not found[""] and found["chosen_node.then_branch"]


def test_inner_tensors_have_overrides_too() -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]
    given = {"then_branch_again": [{"scale": 0.25, "zero_point": 0}]}
    result = quantized(branches(), feeds, EnableSubgraph=True, TensorQuantOverrides=given)
    inner = arrays(graphs(result.graph)["chosen_node.then_branch"])
    assert inner["then_branch_again_scale"] == 0.25
    with pytest.raises(ConfigError, match="'then_branch_agin'.*then_branch_again"):
        wrong = {"then_branch_agin": given["then_branch_again"]}
        quantized(branches(), feeds, EnableSubgraph=True, TensorQuantOverrides=wrong)


def test_a_model_with_nothing_in_its_bodies_either_is_refused() -> None:
    model = in_branches(mlp())
    with pytest.raises(NothingToQuantizeError, match="the model has If"):
        quantized(model, with_flags(vectors(2), yes=True), OpTypesToQuantize=["Conv"])


# Files. ---------------------------------------------------------------------------------------------------------------


def test_statistics_and_ranges_of_each_body_are_kept(tmp_path: Path) -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2, 0.5)]
    statistics: dict[str, Any] = {"EnableSubgraph": True, "Statistics": str(tmp_path / "seen.npz")}
    first = quantized(branches(), feeds, **statistics)
    names = {"seen.npz", "seen.chosen_node.then_branch.npz", "seen.chosen_node.else_branch.npz"}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert quantized(branches(), None, **statistics) == first
    ranges: dict[str, Any] = {"EnableSubgraph": True, "SaveAndRestore": str(tmp_path / "ranges.json")}
    assert quantized(branches(), feeds, **ranges) == first
    assert quantized(branches(), feeds[:1], **ranges) == first
    assert (tmp_path / "ranges.chosen_node.then_branch.json").exists()


def test_statistics_without_a_branch_leave_it_in_float_again(tmp_path: Path) -> None:
    feeds = [{"x": np.full((1, 8), value, np.float32)} for value in (1, 2)]
    options: dict[str, Any] = {"EnableSubgraph": True, "Statistics": str(tmp_path / "seen.npz")}
    first = quantized(branches(), feeds, **options)
    assert not counts(first)["chosen_node.else_branch"]
    assert quantized(branches(), None, **options) == first


def test_the_result_runs_without_optimisation_too() -> None:
    """The names and types of the bodies are right by themselves, not only once the runtime has inlined them."""
    model, feeds = branches(), [{"x": np.full((1, 8), value, np.float32)} for value in (1, -2)]
    result = quantized(model, feeds, EnableSubgraph=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(result.SerializeToString(), options, ["CPUExecutionProvider"])
    for feed in feeds:
        # Integer kernels round once more, by one code of the output at most.
        step = arrays(result.graph)["y_scale"]
        np.testing.assert_allclose(session.run(None, feed)[0], run(result, feed), rtol=0, atol=float(1.001 * step))


def test_what_only_a_body_read_goes_when_the_body_has_folded_it() -> None:
    """A body joins halves of a constant around it and quantizes the result: the constant is stored once, as codes."""
    b, size = Builder(), 64
    b.node("MatMul", ["x", b.constant("v", b.random.normal(0, 1, (size, size)))], "h")
    b.constant("w", b.random.normal(0, 1, (size, size)))
    for name, cut in {"start": 0, "middle": size // 2, "stop": size}.items():
        b.integers(name, [cut])
    branches = {}
    for name in BODIES:
        info = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [None, size])
        nodes = [
            helper.make_node("Slice", ["w", "middle", "stop"], [f"{name}_low"]),
            helper.make_node("Slice", ["w", "start", "middle"], [f"{name}_high"]),
            helper.make_node("Concat", [f"{name}_low", f"{name}_high"], [f"{name}_turned"], axis=0),
            helper.make_node("MatMul", ["h", f"{name}_turned"], [f"{name}_y"]),
        ]
        branches[name] = helper.make_graph(nodes, name, [], [info])
    b.node("Greater", [b.node("ReduceMean", ["x"], "mean", keepdims=0), b.constant("zero", np.array(0.0))], "yes")
    model = b.model({"x": ["n", size]}, {b.node("If", ["yes"], "y", **branches): ["n", size]})
    made = quantized(model, None, "INT8_CPU_WEIGHTS")
    # Two matrices of codes, and their scales; without it a third of float16.
    assert sum(entry.ByteSize() for part in graphs(made.graph).values() for entry in part.initializer) < 2.5 * size**2
    feed = {"x": np.random.default_rng(1).normal(size=(3, size)).astype(np.float32)}
    assert sqnr(run(model, feed), run(made, feed)) > 40
