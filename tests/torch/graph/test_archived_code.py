"""Files of graph mode that would run code are refused before anything of them is run."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.core.spec import LayerSpec, spec
from quark.errors import FormatError, NotSupportedError
from quark.torch import load_params, save_params
from quark.torch.graph import archived_operators
from tests.models.graphs import FX, exported, quantize

pytestmark = pytest.mark.slow  # the fixture exports a model

INT8 = LayerSpec(weight=spec("int8"))
MODEL = "archive/models/model.json"
WEIGHTS = "archive/data/weights/model_weights_config.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"
INPUTS = "archive/data/sample_inputs/model.pt"
Entries = dict[str, bytes]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """A file of a graph with a dynamic size: its entries."""
    torch.manual_seed(0)
    graph = quantize(exported(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)), INT8)
    path = save_params(graph, "net", (torch.randn(4, 8),), None, tmp_path_factory.mktemp("graph"), FX)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(entries: Entries, path: Path) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return str(path)


class Command:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Command(marker), buffer)
    return buffer.getvalue()


def edited(entries: Entries, name: str, change: Callable[[Any], None]) -> Entries:
    content = json.loads(entries[name])
    change(content)
    return {**entries, name: json.dumps(content).encode()}


def python(marker: Path) -> str:
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"


def pickled_weight(entries: Entries, marker: Path) -> Entries:
    changed = edited(entries, WEIGHTS, lambda table: next(iter(table["config"].values())).update(use_pickle=True))
    return {**changed, "archive/data/weights/weight_0": pickled(marker)}


def pickled_constant(entries: Entries, marker: Path) -> Entries:
    row = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    changed = edited(entries, CONSTANTS, lambda table: table["config"].update(c=row))
    return {**changed, "archive/data/constants/tensor_0": pickled(marker)}


def opaque_object(entries: Entries, marker: Path) -> Entries:
    row = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
    return edited(entries, CONSTANTS, lambda table: table["config"].update(c=row))


def legacy_weights(entries: Entries, marker: Path) -> Entries:
    return {**entries, "archive/data/weights/model.pt": pickled(marker)}


def library(entries: Entries, marker: Path) -> Entries:
    return {**entries, "archive/data/aotinductor/model/model.so": b""}


def pickled_inputs(entries: Entries, marker: Path) -> Entries:
    return {**entries, INPUTS: pickled(marker)}


def guard(entries: Entries, marker: Path) -> Entries:
    return edited(entries, MODEL, lambda model: model["guards_code"].append(python(marker)))


def size(entries: Entries, marker: Path) -> Entries:
    return {**entries, MODEL: entries[MODEL].replace(b"Symbol('s", f"Max({python(marker)}, 1)+Symbol('s".encode())}


def argument_name(entries: Entries, marker: Path) -> Entries:
    return {**entries, MODEL: entries[MODEL].replace(b'"name": "input"', f'"name": "x={python(marker)}"'.encode())}


def function(entries: Entries, marker: Path) -> Entries:
    return edited(entries, MODEL, lambda model: nodes_of(model)[0].update(target="torch.os.system"))


def class_of_keys(entries: Entries, marker: Path) -> Entries:
    return {**entries, MODEL: entries[MODEL].replace(b"builtins.tuple", b"collections.defaultdict")}


def nodes_of(model: Any) -> Any:
    return model["graph_module"]["graph"]["nodes"]


def huge_power(entries: Entries, marker: Path) -> Entries:
    return edited(entries, MODEL, lambda model: model["guards_code"].append("L['input'].size()[0] <= 9 ** 9 ** 9"))


def unknown_class(entries: Entries, marker: Path) -> Entries:
    return {**entries, MODEL: entries[MODEL].replace(b"Symbol('s", b"Lambda(Symbol('x'), 1)+Symbol('s")}


ATTACKS = [
    huge_power,
    unknown_class,
    pickled_weight,
    pickled_constant,
    opaque_object,
    legacy_weights,
    library,
    pickled_inputs,
    guard,
    size,
]
ATTACKS += [argument_name, function, class_of_keys]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_file_that_would_run_code_is_refused_and_runs_none(
    attack: Callable[[Entries, Path], Entries], entries: Entries, tmp_path: Path
) -> None:
    marker, changed = tmp_path / "ran", attack(entries, tmp_path / "ran")
    assert changed != entries
    refusal = r"net\.pth is not a file of save_params .* (which torch would run as code|its graph calls)"
    with pytest.raises(FormatError, match=refusal):
        load_params(pth_path=write(changed, tmp_path / "net.pth"), quant_mode=FX)
    assert not marker.exists()


def test_a_file_that_was_packed_anew_is_loaded(entries: Entries, tmp_path: Path) -> None:
    loaded = load_params(pth_path=write(entries, tmp_path / "net.pth"), quant_mode=FX)
    assert loaded(torch.randn(9, 8)).shape == (9, 8)


def argument(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "arg": {kind: value}, "kind": 1}


def test_a_graph_that_writes_into_a_file_of_the_user_is_refused(entries: Entries, tmp_path: Path) -> None:
    """torch maps a file into memory where a graph says so; what is copied there is in the file."""
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(b"ten years of work" * 4)

    def write_to_it(model: Any) -> None:
        nodes = nodes_of(model)
        values = model["graph_module"]["graph"]["tensor_values"]
        last = nodes[-1]["outputs"][0]["as_tensor"]["name"]
        opened = copy.deepcopy(nodes[-1])
        opened.update(name="opened", target="torch.ops.aten.from_file.default")
        opened["inputs"] = [
            argument("filename", "as_string", str(victim)),
            argument("shared", "as_bool", True),
            argument("size", "as_int", 8),
        ]
        opened["outputs"] = [{"as_tensor": {"name": "opened"}}]
        copied = copy.deepcopy(opened)
        copied.update(name="copied", target="torch.ops.aten.zero_.default")
        copied["inputs"] = [argument("self", "as_tensor", {"name": "opened"})]
        copied["outputs"] = [{"as_tensor": {"name": "copied"}}]
        values["opened"] = values["copied"] = {
            **values[last], "sizes": [{"as_int": 8}], "strides": [{"as_int": 1}], "dtype": 7
        }  # fmt: skip
        nodes += [opened, copied]

    changed = edited(entries, MODEL, write_to_it)
    with pytest.raises(FormatError, match=r"its graph calls 'torch\.ops\.aten\.from_file\.default', which is none of"):
        load_params(pth_path=write(changed, tmp_path / "net.pth"), quant_mode=FX)(torch.randn(4, 8))
    assert victim.read_bytes() == b"ten years of work" * 4


def test_what_is_compressed_is_refused(entries: Entries, tmp_path: Path) -> None:
    """A few kB of a file could become as many GB in memory."""
    path = tmp_path / "net.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(FormatError, match="is compressed, and could be unpacked to any size"):
        load_params(pth_path=str(path), quant_mode=FX)


def test_graphs_with_operators_that_a_file_may_not_call_are_not_saved(tmp_path: Path) -> None:
    library = torch.library.Library("strange", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            twice: torch.Tensor = torch.ops.strange.twice(self.linear(x))
            return twice

    graph = quantize(exported(Strange(), torch.randn(4, 8), dynamic=False), INT8)
    with pytest.raises(NotSupportedError, match=r"load_params would refuse it: .*torch\.ops\.strange\.twice"):
        save_params(graph, "net", (torch.randn(4, 8),), None, tmp_path, FX)
    assert not any(tmp_path.glob("*.pth"))


def test_the_operators_take_no_files_and_their_overloads_write_into_no_argument() -> None:
    """Every overload of every name; a text that one takes is one of few words."""
    words = {"reduce", "approximate", "rounding_mode", "mode", "padding", "norm", "indexing", "interpolation", "ord"}
    words |= {"equation", "UPLO", "driver", "side", "padding_side", "pad_mode", "assert_msg", "p"}
    known = set(torch._C._dispatch_get_all_op_names())  # others are of TorchScript
    for name in archived_operators.ATEN:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if getattr(packet, overload)._name not in known:
                continue
            allowed = archived_operators.is_allowed(f"torch.ops.aten.{name}.{overload}")
            arguments = getattr(packet, overload)._schema.arguments
            assert allowed != any(argument.is_out for argument in arguments), (name, overload)
            assert all("str" not in str(a.type) or a.name in words for a in arguments), (name, overload)
    for target in ("torch.ops.aten.from_file.default", "torch.ops.aten.set_.source_Storage", "torch.load", "math.pow"):
        assert not archived_operators.is_allowed(target)
    for target in ("torch.ops.aten.resize_.default", "torch.ops.higher_order.while_loop", "torch.ops.c10d.send"):
        assert not archived_operators.is_allowed(target)
