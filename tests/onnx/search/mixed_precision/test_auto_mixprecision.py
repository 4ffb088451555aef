"""Mixed precision by search: scores against models quantized one by one, choices against all subsets."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quark.errors import CalibrationError, ConfigError, FormatError
from quark.onnx import (
    AutoMixprecisionConfig,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
)
from quark.onnx.config import tensor_specs as specs
from quark.onnx.config.config import Config
from quark.onnx.config.presets import get_default_config
from tests.models.onnx_zoo import Builder, Reader, cnn, images, run
from tests.onnx.placement.test_dual_pairs import steps

INT16 = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
INT8 = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
LAYERS = ["one", "two", "three", "four"]


def chain() -> onnx.ModelProto:
    """Four MatMuls with a Relu between, of which some have outliers; input x (n, 16), output four (n, 8)."""
    b = Builder()
    x = "x"
    for index, (name, outlier) in enumerate(zip(LAYERS, (1, 12, 3, 6), strict=True)):
        weight = b.random.normal(0, 0.25, (16, 8 if name == "four" else 16))
        weight[index, index] *= outlier * 5
        x = b.node(
            "MatMul", [x if x == "x" else b.node("Relu", [x], f"r_{name}"), b.constant(f"w_{name}", weight)], name
        )
        b.nodes[-1].name = name
    return b.model({"x": ["n", 16]}, {"four": ["n", 8]}, 21)


def batches(count: int = 3, seed: int = 1) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(64, 16)).astype(np.float32)} for _ in range(count)]


def mixed(
    model: onnx.ModelProto | None = None,
    base: QLayerConfig = INT16,
    data: Any = None,
    target: Any = INT8,
    **parameters: Any,
) -> onnx.ModelProto:
    config = QConfig(base, algo_config=[AutoMixprecisionConfig(target, **parameters)], UseQDQContribOps=False)
    made = ModelQuantizer(config).quantize(model or chain(), None, Reader(data or batches()))
    assert made is not None
    return made


def by_hand(layers: Any, own: QLayerConfig = INT8, base: QLayerConfig = INT16) -> onnx.ModelProto:
    config = QConfig(base, specific_layer_config={own: list(layers)} if layers else {}, UseQDQContribOps=False)
    made = ModelQuantizer(config).quantize_model(chain(), None, Reader(batches()))
    assert made is not None
    return made


def l2(model: onnx.ModelProto, data: Any = None) -> float:
    """Mean over samples of the Euclidean distance of the outputs."""
    pairs = [(run(chain(), feed), run(model, feed, optimise=False)) for feed in data or batches()]
    return float(np.mean([np.sqrt(np.square(x.astype(np.float64) - y).sum()) for x, y in pairs]))


def kinds(model: onnx.ModelProto) -> dict[str, str]:
    """The type of the weight of each layer."""
    made = {name: node for node in model.graph.node for name in node.output}
    tensors = {i.name: i for i in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in ("MatMul", "Conv", "Gemm")]
    return {n.name: str(numpy_helper.to_array(tensors[made[n.input[1]].input[0]]).dtype) for n in layers}


def changed(model: onnx.ModelProto, kind: str = "int8") -> set[str]:
    return {name for name, found in kinds(model).items() if found == kind}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quark").addHandler(handler)
    yield found
    logging.getLogger("quark").removeHandler(handler)


def ranking(lines: list[str]) -> dict[str, float]:
    """The logged table: layer -> distance, in its order."""
    text = next(line for line in lines if line.startswith("Distance"))
    return {row.split()[1]: float(row.split()[2]) for row in text.splitlines()[2:]}


def extremes(lines: list[str]) -> tuple[float, float]:
    """The logged distances with no layer and with all of them changed."""
    text = next(line for line in lines if line.startswith("Distance"))
    none, every = re.findall(r"changed: ([\d.e-]+); with all of them: ([\d.e-]+)\.$", text.splitlines()[0])[0]
    return float(none), float(every)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], float]:
    """The distance with each subset of the layers at int8."""
    subsets = [subset for size in range(5) for subset in itertools.combinations(LAYERS, size)]
    return {subset: l2(by_hand(subset)) for subset in subsets}


@pytest.mark.slow
def test_the_table_holds_what_each_layer_costs_alone(lines: list[str], alone: dict[tuple[str, ...], float]) -> None:
    made = mixed(metric_threshold=None)
    assert made == by_hand(())
    found = ranking(lines)
    assert list(found.values()) == sorted(found.values()) and len(found) == 4
    for name, distance in found.items():
        assert distance == pytest.approx(alone[(name,)], rel=1e-3)
    assert extremes(lines) == pytest.approx((alone[()], alone[tuple(LAYERS)]), rel=1e-3)


@pytest.mark.slow
def test_speed_changes_as_many_layers_as_the_threshold_allows(alone: dict[tuple[str, ...], float]) -> None:
    """Against the largest of all subsets within it."""
    for size in (1, 2, 3):
        least = min(distance for subset, distance in alone.items() if len(subset) == size)
        more = min(distance for subset, distance in alone.items() if len(subset) == size + 1)
        threshold = (least + more) / 2
        fits = [subset for subset, distance in alone.items() if len(subset) == size and distance <= threshold]
        assert tuple(sorted(changed(mixed(metric_threshold=threshold)))) in {tuple(sorted(s)) for s in fits}


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["speed", "quality"])
def test_the_end_of_the_order_takes_few_trials(wanted: str, lines: list[str]) -> None:
    """Twelve candidates; none, all and each alone are fourteen trials, and the end takes four at most, not twelve.

    Four exchanges follow: as many change as in the best prefix at least, where many are wanted, or at most.
    """
    b = Builder()
    x = "x"
    names = [f"layer_{index}" for index in range(12)]
    for name in names:
        x = b.node("MatMul", [x, b.constant(f"w_{name}", b.random.normal(0, 0.25, (16, 16)))], name)
        b.nodes[-1].name = name
    model = b.model({"x": ["n", 16]}, {names[-1]: ["n", 16]}, 21)
    calls, distance = counting()
    base, target = (INT16, INT8) if wanted == "speed" else (INT8, INT16)
    options: dict[str, Any] = {"base": base, "target": target, "metric_optimize_object": wanted}
    mixed(model, metric_distance_fn=distance, metric_threshold=None, **options)
    order, (none, every) = list(ranking(lines)), extremes(lines)
    assert len(calls) == 14
    calls.clear()
    threshold = (none + every) / 2
    made = mixed(model, metric_distance_fn=distance, metric_threshold=threshold, **options)
    assert len(calls) <= 14 + 4 + 4
    found = changed(made, "int8" if wanted == "speed" else "int16")

    def of(layers: Any) -> float:
        config = QConfig(base, specific_layer_config={target: list(layers)}, UseQDQContribOps=False)
        one = ModelQuantizer(config).quantize_model(model, None, Reader(batches()))
        assert one is not None
        pairs = [(run(model, feed), run(one, feed, optimise=False)) for feed in batches()]
        return float(np.mean([np.linalg.norm(x - y) for x, y in pairs]))

    assert of(found) <= threshold
    if wanted == "speed":
        assert threshold < of(order[: len(found) + 1])
    else:
        assert threshold < of(order[: len(found) - 1])


@pytest.mark.slow
def test_an_order_is_found_with_few_samples_and_every_choice_measured_on_all(lines: list[str]) -> None:
    """Two samples rank, whose scores are those of these alone; the threshold holds on all six."""
    data = [*batches(2), *({"x": 3 * feed["x"]} for feed in batches(4, seed=2))]
    threshold = 3.0
    made = mixed(data=data, metric_threshold=threshold)
    for name, distance in ranking(lines).items():
        config = QConfig(INT16, specific_layer_config={INT8: [name]}, UseQDQContribOps=False)
        one = ModelQuantizer(config).quantize_model(chain(), None, Reader(data))
        assert one is not None
        assert distance == pytest.approx(l2(one, data[:2]), rel=1e-3)
    assert changed(made) and l2(made, data) <= threshold


@pytest.mark.slow
def test_quality_raises_as_few_layers_as_reach_the_threshold() -> None:
    subsets = [subset for size in range(5) for subset in itertools.combinations(LAYERS, size)]
    distances = {subset: l2(by_hand(subset, INT16, INT8)) for subset in subsets}
    threshold = 1.01 * min(distance for subset, distance in distances.items() if len(subset) == 2)
    made = mixed(base=INT8, target=INT16, metric_threshold=threshold, metric_optimize_object="quality")
    assert distances[tuple(name for name in LAYERS if name in changed(made, "int16"))] <= threshold
    assert len(changed(made, "int16")) == 2
    assert made == by_hand(changed(made, "int16"), INT16, INT8)


@pytest.mark.slow
def test_threshold_0_changes_all() -> None:
    assert mixed() == by_hand(LAYERS)


@pytest.mark.slow
def test_size_budget(alone: dict[tuple[str, ...], float]) -> None:
    """Against all subsets. Three matrices of 16 x 16 and one of 16 x 8, two bytes or one each."""

    def size(subset: tuple[str, ...]) -> int:
        return 1792 - sum(128 if name == "four" else 256 for name in subset)

    for budget in (1664, 1536, 1400, 1200, 1024, 900):
        best = min((subset for subset in alone if size(subset) <= budget), key=lambda subset: alone[subset])
        assert changed(mixed(size_budget=budget)) == set(best)
        assert changed(mixed(size_budget=budget / 3584)) == set(best)
    with pytest.raises(ConfigError, match=r"size_budget=800.* 896 bytes of weights, not 800, with 4 candidates"):
        mixed(size_budget=800)
    with pytest.raises(ConfigError, match="no layer changes"):
        mixed(size_budget=10**6)
    grown = changed(mixed(base=INT8, target=INT16, size_budget=896 + 256 + 128), "int16")
    assert "four" in grown and len(grown) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits"), [("BFP16", 9), ("MXInt8", 8.25), ("MX6", 6), ("MXFP4E2M1", 4.25), ("Int4", 4)]
)
def test_bytes_of_weights(name: str, bits: float, lines: list[str]) -> None:
    """896 weights; a block of 8 (BFP16), 32 (MX) or 16 (MX6, whose pairs have another bit) shares 8 bits."""
    mixed(target=QLayerConfig(weight=getattr(specs, f"{name}Spec")()))
    assert f"; {896 * bits / 8:.0f} bytes of weights, of {896 * 4} in float." in next(
        line for line in lines if line.startswith("Mixed precision")
    )


@pytest.mark.slow
def test_size_and_threshold_hold_together(alone: dict[tuple[str, ...], float]) -> None:
    with pytest.raises(ConfigError, match="size_budget=900"):
        mixed(size_budget=900, metric_threshold=1.01 * min(alone[(name,)] for name in LAYERS))


@pytest.mark.slow
def test_limits_out_of_reach(alone: dict[tuple[str, ...], float]) -> None:
    with pytest.raises(ConfigError, match="no layer changes: the distance is .* the least sensitive"):
        mixed(metric_threshold=(alone[()] + min(alone[(name,)] for name in LAYERS)) / 2)
    with pytest.raises(ConfigError, match="is not reached: the distance is .* with 0 candidates"):
        mixed(metric_threshold=alone[()] / 2)
    with pytest.raises(ConfigError, match="is not reached: the distance is .* with 4 candidates"):
        mixed(base=INT8, target=INT16, metric_threshold=1e-9, metric_optimize_object="quality")
    with pytest.raises(ConfigError, match="no layer changes"):
        mixed(base=INT8, target=INT16, metric_threshold=1e9, metric_optimize_object="quality")


@pytest.mark.slow
def test_targets_by_name(lines: list[str]) -> None:
    weights4 = QLayerConfig(weight=Int4Spec())
    found = kinds(mixed(target={INT8: ["one", "four"], weights4: []}))
    assert (found["one"], found["four"]) == ("int8", "int8") and found["two"] == found["three"] == "int4"
    lines.clear()
    assert changed(mixed(target={INT8: ["two"]})) == {"two"}
    assert ranking(lines).keys() == {"two"}
    with pytest.raises(ConfigError, match=r"target_layer_config: 'tow' is no node of the model. Did you mean 'two'"):
        mixed(target={INT8: ["tow"]})
    with pytest.raises(ConfigError, match="'r_two_node' is a Relu that takes no part"):
        mixed(target={INT8: ["r_two_node"]})


@pytest.mark.slow
def test_of_a_list_each_layer_takes_the_target_that_costs_least(lines: list[str]) -> None:
    weights4 = QLayerConfig(weight=Int4Spec())
    assert set(kinds(mixed(data=batches(2), target=[weights4, INT8])).values()) == {"int8"}
    both = ranking(lines)
    lines.clear()
    mixed(data=batches(2), metric_threshold=None)
    assert both == ranking(lines)


@pytest.mark.parametrize("target", [None, [], {}, "int8", {INT8: ["one"], INT16: ["one"]}, {INT8: [], INT16: []}])
def test_wrong_targets(target: Any) -> None:
    with pytest.raises(ConfigError, match="target_layer_config"):
        mixed(target=target)


@pytest.mark.slow
def test_which_layers_take_part(caplog: pytest.LogCaptureFixture) -> None:
    assert changed(mixed(include_layers=["one", "^t.*"])) == {"one", "two", "three"}
    assert changed(mixed(exclude_layers=["two"])) == {"one", "three", "four"}
    with pytest.raises(ConfigError, match=r"include_layers.*Did you mean 'three'"):
        mixed(include_layers=["thre"])
    with pytest.raises(ConfigError, match=r"exclude_layers.*Did you mean 'three'"):
        mixed(exclude_layers=["threee"])
    with pytest.raises(ConfigError, match="include_layers: 'one' is a MatMul that takes no part"):
        mixed(include_layers=["one"], exclude_layers=["one"])
    assert changed(mixed(target_op_type=["Conv"])) == set()
    assert "no layer qualifies: no quantized Conv" in caplog.text
    assert changed(mixed(cnn(21), data=images(1), target_op_type=["Gemm"])) == {"y_node"}


def test_layers_with_specs_of_their_own_keep_them() -> None:
    config = QConfig(
        INT16,
        specific_layer_config={INT8: ["one"]},
        algo_config=[AutoMixprecisionConfig(QLayerConfig(weight=Int4Spec()))],
    )
    made = ModelQuantizer(config).quantize_model(chain(), None, Reader(batches()))
    assert made is not None
    assert kinds(made) == {"one": "int8", "two": "int4", "three": "int4", "four": "int4"}


@pytest.mark.slow
def test_layers_whose_input_others_read() -> None:
    """The outputs of stem and depth are read twice; no_input_qdq_shared leaves a_conv and point_conv alone."""
    convs = changed(mixed(cnn(21), data=images(1), target_op_type=["Conv"]))
    left = changed(mixed(cnn(21), data=images(1), target_op_type=["Conv"], no_input_qdq_shared=True))
    assert convs - left == {"a_conv_node", "point_conv_node"} and len(left) == 4


@pytest.mark.slow
def test_pairs_where_precisions_meet_and_shared_scales() -> None:
    """last_conv reads what MaxPool moves from a Concat, and nothing else shares that scale."""
    made = {
        mode: mixed(cnn(21), data=images(1), include_layers=["last_conv_node"], shared_param_mode=mode)
        for mode in ("propagate", "unshare")
    }
    assert [steps(made["propagate"], name) for name in ("pooled_node", "last_conv_node")] == [["int8"], ["int8"]]
    assert [steps(made["unshare"], name) for name in ("pooled_node", "last_conv_node")] == [["int16"], ["int8"]]
    dual = mixed(cnn(21), data=images(1), include_layers=["last_conv_node"], dual_quant_nodes=True)
    assert steps(dual, "last_conv_node") == ["int16", "int8"] and steps(dual, "pooled_node") == ["int16"]


def subgraphs(path: Path, *groups: tuple[str, list[str], list[str]], **more: Any) -> str:
    entries = [{"name": n, "description": "", "start_nodes": start, "end_nodes": end} for n, start, end in groups]
    path.write_text(json.dumps({"quantized": False, "num_subgraphs": len(entries), "subgraphs": entries, **more}))
    return str(path)


@pytest.mark.slow
def test_subgraphs_change_as_a_whole(tmp_path: Path, lines: list[str], alone: dict[tuple[str, ...], float]) -> None:
    file = subgraphs(tmp_path / "groups.json", ("middle", ["two"], ["three"]))
    mixed(metric_threshold=None, subgraph_json=Path(file))
    found = ranking(lines)
    assert found["middle"] == pytest.approx(alone["two", "three"], rel=1e-3)
    assert found["__ungrouped__"] == pytest.approx(alone["one", "four"], rel=1e-3)
    first = {"middle": {"two", "three"}, "__ungrouped__": {"one", "four"}}[next(iter(found))]
    assert changed(mixed(metric_threshold=1.01 * min(found.values()), subgraph_json=file)) == first
    both = {INT8: ["one"], QLayerConfig(weight=Int4Spec()): []}
    assert kinds(mixed(target=both, subgraph_json=file))["two"] == "int4"


def test_files_of_subgraphs_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    overlapping = subgraphs(file, ("a", ["one"], ["two"]), ("b", ["two"], ["three"]))
    with pytest.raises(ConfigError, match="two lies in two subgraphs, a and b"):
        mixed(subgraph_json=overlapping)
    with pytest.raises(ConfigError, match=r"b: .*Did you mean 'three'"):
        mixed(subgraph_json=subgraphs(file, ("b", ["two"], ["thre"])))
    with pytest.raises(FormatError, match="declares 3 subgraphs and holds b"):
        mixed(subgraph_json=subgraphs(file, ("b", ["two"], ["three"]), num_subgraphs=3))
    for text in ("[]", "{", '{"subgraphs": [{"name": "a"}]}'):
        file.write_text(text)
        with pytest.raises(FormatError, match=r"groups\.json is no file of subgraphs"):
            mixed(subgraph_json=str(file))


def _softmax(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


METRICS: dict[str, Callable[[Any, Any], float]] = {
    "l2": lambda x, y: float(np.linalg.norm(x - y)),
    "cosine": lambda x, y: 1 - float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)),
    "sqnr": lambda x, y: -10 * math.log10((x**2).sum() / ((x - y) ** 2).sum()),
    "psnr": lambda x, y: -10 * math.log10(np.abs(x).max() ** 2 / ((x - y) ** 2).mean()),
    "kl": lambda x, y: float((_softmax(x) * np.log(_softmax(x) / _softmax(y))).sum(-1).mean()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str, lines: list[str]) -> None:
    mixed(metric_default=name, metric_threshold=None, include_layers=["two"])
    pairs = [(run(chain(), feed), run(by_hand(["two"]), feed, optimise=False)) for feed in batches()]
    expected = np.mean([METRICS[name](x.astype(np.float64), y.astype(np.float64)) for x, y in pairs])
    assert ranking(lines)["two"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_distance_in_decibels_stops_where_the_quality_is_too_low(lines: list[str]) -> None:
    mixed(metric_default="sqnr", metric_threshold=None)
    two = list(ranking(lines).values())[1]
    assert len(changed(mixed(metric_default="sqnr", metric_threshold=two))) == 1


@pytest.mark.slow
def test_functions_of_the_user(lines: list[str]) -> None:
    """They see the outputs of `data_size` samples, each a list of the one output."""
    shapes = set()

    def distance(before: Any, after: Any) -> float:
        shapes.add((len(before), len(before[0]), before[0][0].shape, len(after), after[1][0].shape))
        return float(sum(np.abs(x - y).max() for (x,), (y,) in zip(before, after, strict=True)))

    mixed(metric_distance_fn=distance, data_size=2, metric_threshold=None, include_layers=["two"])
    assert shapes == {(2, 1, (64, 8), 2, (64, 8))}
    two = by_hand(["two"])
    expected = sum(np.abs(run(chain(), f) - run(two, f, optimise=False)).max() for f in batches()[:2])
    assert ranking(lines)["two"] == pytest.approx(expected, rel=1e-3)
    lines.clear()
    mixed(metric_evaluate_fn=lambda out: -distance(out, out) - float(out[0][0].mean()), metric_threshold=None)
    assert len(ranking(lines)) == 4
    with pytest.raises(ConfigError, match="gave 'far', and must give one number"):
        mixed(metric_distance_fn=lambda before, after: "far")
    with pytest.raises(ConfigError, match="metric_distance_fn or metric_evaluate_fn, not both"):
        mixed(metric_distance_fn=distance, metric_evaluate_fn=distance)


def test_which_output_is_compared(lines: list[str]) -> None:
    """The second output lies before the last layer, to which it is blind."""
    model = chain()
    model.graph.output.append(onnx.helper.make_tensor_value_info("three", onnx.TensorProto.FLOAT, ["n", 16]))
    mixed(model, metric_output_index=1, metric_threshold=None, metric_default="cosine")
    found = ranking(lines)
    assert found["four"] == min(found.values()) and found["two"] > 2 * found["four"]
    with pytest.raises(ConfigError, match="metric_output_index=2: the model has 2 outputs: four, three"):
        mixed(model, metric_output_index=2)


class Killed(Exception):
    """The end of a run."""


def counting(limit: int = 10**6) -> tuple[list[int], Callable[[Any, Any], float]]:
    """A distance that counts its calls, and ends the run after some of them."""
    calls: list[int] = []

    def distance(before: Any, after: Any) -> float:
        if len(calls) == limit:
            raise Killed
        calls.append(1)
        return float(np.mean([np.linalg.norm(x - y) for (x,), (y,) in zip(before, after, strict=True)]))

    return calls, distance


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Two calls are for none and all of the layers, which are the result too, and one for each."""
    file = tmp_path / "sensitivity.json"
    _, killed = counting(2 + 3)
    with pytest.raises(Killed):
        mixed(metric_distance_fn=killed, sensitivity_cache_file=file)
    assert len(json.loads(file.read_text())["results"]) == 3 and list(tmp_path.iterdir()) == [file]
    calls, whole = counting()
    made = mixed(metric_distance_fn=whole, sensitivity_cache_file=str(file))
    assert len(calls) == 2 + 1 and made == mixed()
    calls, whole = counting()
    mixed(metric_distance_fn=whole, sensitivity_cache_file=str(file), metric_threshold=None)
    assert len(calls) == 2 and len(json.loads(file.read_text())["results"]) == 4


@pytest.mark.slow
def test_the_file_serves_what_it_was_measured_on(tmp_path: Path) -> None:
    file = str(tmp_path / "sensitivity.json")
    mixed(sensitivity_cache_file=file)
    mixed(sensitivity_cache_file=file, metric_threshold=1e9, worker_num=2)
    for other in (
        {"data": batches(seed=2)},
        {"target": QLayerConfig(weight=Int4Spec())},
        {"base": QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())},
        {"metric_default": "kl"},
        {"data_size": 1},
        {"metric_distance_fn": counting()[1]},
    ):
        with pytest.raises(ConfigError, match=r"sensitivity\.json was measured on another model"):
            mixed(sensitivity_cache_file=file, **other)
    Path(file).write_text("{}")
    with pytest.raises(FormatError, match="sensitivity_cache_file"):
        mixed(sensitivity_cache_file=file)


@pytest.mark.slow
def test_layers_that_the_file_disables_stay(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "sensitivity.json"
    mixed(sensitivity_cache_file=str(file), metric_threshold=None)
    data = json.loads(file.read_text())
    for entry in data["results"]:
        entry["enabled"] = entry["name"] != "three"
    file.write_text(json.dumps(data))
    assert changed(mixed(sensitivity_cache_file=str(file))) == {"one", "two", "four"}
    assert any("three" in row and "(disabled)" in row for row in "\n".join(lines).splitlines())


@pytest.mark.slow
def test_workers_find_the_same(tmp_path: Path) -> None:
    results = []
    for workers in (1, 3):
        file = tmp_path / f"{workers}.json"
        mixed(sensitivity_cache_file=file, metric_threshold=None, worker_num=workers)
        results.append(sorted(json.loads(file.read_text())["results"], key=lambda entry: str(entry["name"])))
    assert results[0] == results[1]


def test_it_needs_samples() -> None:
    config = QConfig(INT16, algo_config=[AutoMixprecisionConfig(INT8)])
    for data in (None, Reader([])):
        with pytest.raises(CalibrationError, match="AutoMixprecisionConfig needs calibration data"):
            ModelQuantizer(config).quantize_model(chain(), None, data)


@pytest.mark.parametrize(
    "values", [{"data_size": -1}, {"worker_num": 0}, {"metric_output_index": -1}, {"size_budget": 0}]
)
def test_numbers_that_have_no_meaning(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        AutoMixprecisionConfig(INT8, **values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not together with metric_threshold=None"):
        AutoMixprecisionConfig(INT8, metric_threshold=None, size_budget=100)


@pytest.mark.slow
def test_the_legacy_flag_the_option_and_the_argument_say_the_same() -> None:
    entries = {"TargetLayerConfig": INT8, "IncludeLayers": ["two"]}
    algorithm = AutoMixprecisionConfig(INT8, include_layers=["two"])
    by_option = ModelQuantizer(QConfig(INT16, UseQDQContribOps=False, AutoMixprecision=entries))
    plain = ModelQuantizer(QConfig(INT16, UseQDQContribOps=False))
    expected = mixed(include_layers=["two"])
    assert by_option.quantize_model(chain(), None, Reader(batches())) == expected
    assert plain.quantize_model(chain(), None, Reader(batches()), algorithms=[algorithm]) == expected
    legacy = QuantizationConfig(include_auto_mp=True, extra_options={"AutoMixprecision": entries})
    assert [type(a) for a in ModelQuantizer(Config(legacy)).settings.algorithms] == [AutoMixprecisionConfig]
    with pytest.raises(ConfigError, match="Did you mean 'DataSize'"):
        ModelQuantizer(QConfig(INT16, AutoMixprecision={**entries, "DataSise": 3}))
    with pytest.raises(ConfigError, match="target_layer_config is required"):
        ModelQuantizer(Config(QuantizationConfig(include_auto_mp=True)))


def test_configs_that_went_through_json() -> None:
    entries = {"TargetLayerConfig": INT8, "IncludeLayers": ["two"]}
    config = QConfig(INT16, UseQDQContribOps=False, AutoMixprecision=entries)
    again = QConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert ModelQuantizer(again).settings.specs.mixed == ModelQuantizer(config).settings.specs.mixed != ()


@pytest.mark.slow
def test_biases_are_learned_under_the_scales_of_the_mixture() -> None:
    """AdaQuant after mixed precision: the layers have the types that were chosen."""
    config = get_default_config("BF16_MIXED_BFP16_ADAQUANT")
    config.extra_options["FastFinetune"] |= {"NumIterations": 2, "DataSize": 1}
    config.extra_options["AutoMixprecision"]["IncludeLayers"] = ["one"]
    made = ModelQuantizer(Config(config)).quantize_model(chain(), None, Reader(batches(1)))
    assert made is not None
    made_by = {node.output[0]: node.op_type for node in made.graph.node}
    found = {node.name: made_by[node.input[1]] for node in made.graph.node if node.op_type == "MatMul"}
    assert found == {"one": "BFPQuantizeDequantize", **dict.fromkeys(LAYERS[1:], "ExtendedDequantizeLinear")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["S16S16_MIXED_S8S8", "BF16_MIXED_BFP16", "BF16_MIXED_MXINT8"])
def test_presets(name: str, lines: list[str]) -> None:
    """All seven layers take the target; under a threshold the most sensitive is spared, and the outputs are closer."""

    def quantized(threshold: float) -> float:
        config = get_default_config(name)
        config.extra_options["AutoMixprecision"]["MetricThreshold"] = threshold
        made = ModelQuantizer(Config(config)).quantize_model(cnn(21), None, Reader(images(1)))
        assert made is not None
        onnx.checker.check_model(made, full_check=True)
        return float(np.linalg.norm(run(made, images(1)[0], optimise=False) - run(cnn(21), images(1)[0])))

    every = quantized(0)
    assert every == pytest.approx(extremes(lines)[1], rel=1e-3) and len(ranking(lines)) == 7
    assert quantized(0.95 * every) < 0.95 * every
    assert any(line.startswith("Mixed precision: 6 of 7 change") for line in lines)
