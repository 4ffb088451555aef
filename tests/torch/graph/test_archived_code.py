"""Files of graph mode that would run code are refused before anything of them is run."""

from __future__ import annotations

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
from quark.errors import FormatError
from quark.torch import load_params, save_params
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
    nodes = "graph_module", "graph", "nodes"
    return edited(entries, MODEL, lambda model: model[nodes[0]][nodes[1]][nodes[2]][0].update(target="torch.os.system"))


def class_of_keys(entries: Entries, marker: Path) -> Entries:
    return {**entries, MODEL: entries[MODEL].replace(b"builtins.tuple", b"collections.defaultdict")}


ATTACKS = [pickled_weight, pickled_constant, opaque_object, legacy_weights, library, pickled_inputs, guard, size]
ATTACKS += [argument_name, function, class_of_keys]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_file_that_would_run_code_is_refused_and_runs_none(
    attack: Callable[[Entries, Path], Entries], entries: Entries, tmp_path: Path
) -> None:
    marker, changed = tmp_path / "ran", attack(entries, tmp_path / "ran")
    assert changed != entries
    with pytest.raises(FormatError, match=r"net\.pth is not a file of save_params .* which torch would run as code"):
        load_params(pth_path=write(changed, tmp_path / "net.pth"), quant_mode=FX)
    assert not marker.exists()


def test_a_file_that_was_packed_anew_is_loaded(entries: Entries, tmp_path: Path) -> None:
    loaded = load_params(pth_path=write(entries, tmp_path / "net.pth"), quant_mode=FX)
    assert loaded(torch.randn(9, 8)).shape == (9, 8)
