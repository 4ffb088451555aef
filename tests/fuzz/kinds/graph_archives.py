"""Files of graph mode: other operators, texts, entries and bytes. None may touch a file, when it is loaded or used."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.bounds import rounded_rows
from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, damage_json, hostile_pickle
from tests.fuzz.oracles import sqnr

MODEL = "models/model.json"
TARGETS = (
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.set_.source_Storage",
    "torch.ops.aten.resize_.default",
    "torch.load",
    "torch.ops.aten.relu.default",
    "torch.ops.aten.neg.default",
    "torch.ops.c10d.send.default",
    "math.factorial",
    "os.system",
    "torch.ops.higher_order.while_loop",
    "torch.ops.aten.add.out",
    "torch.ops.profiler._record_function_enter",
    "builtins.eval",
)
TEXTS = (
    "9 ** 9 ** 9",
    "__import__('os')",
    "L['input'].size()[0] <= 1024",
    "Lambda(x, 1)",
    "(" * 3000,
    "PowByNatural(9, PowByNatural(9, 9))",
)
NAMES = (
    "data/weights/model.pt",
    "data/aotinductor/model/model.so",
    "../../up",
    "models/other.json",
    "data/constants/opaque_obj_0",
)


def _net() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def make_base(file: Path) -> None:
    import torch

    from quark.core.spec import LayerSpec, spec
    from quark.torch import save_params
    from tests.models.graphs import FX, exported, quantize

    net, inputs = _net(), torch.randn(4, 8)
    graph = quantize(exported(net, inputs), LayerSpec(weight=spec("int8")))
    Path(save_params(graph, "net", (inputs,), None, file.parent / "graphs", FX)).rename(file)


def _expect(found: Path) -> None:
    """What the net computes whose weights NumPy rounds to 8 bits, with one scale."""
    import numpy as np

    layer = _net()[0]
    weight, bias = (x.detach().numpy() for x in (layer.weight, layer.bias))
    x = _inputs().numpy()
    np.save(found, np.maximum(x @ rounded_rows(weight.reshape(1, -1)).reshape(weight.shape).T + bias, 0))


def _inputs() -> Any:
    import torch

    return torch.linspace(-1, 1, 32).reshape(4, 8)


def _run(file: Path, found: Path) -> None:
    import numpy as np

    from quark.errors import FormatError
    from quark.torch import load_params
    from tests.models.graphs import FX

    loaded = load_params(pth_path=str(file), quant_mode=FX)
    try:
        np.save(found, loaded(_inputs()).detach().numpy())
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        NameError,
    ) as error:
        raise FormatError("what it computes cannot be computed: " + type(error).__name__) from None


def _judge(expected: Path, found: Path) -> float:
    import numpy as np

    return sqnr([np.load(expected)], [np.load(found)])


def _damage(random: Random, entries: dict[str, bytes], marker: Path) -> str:
    name = next(name for name in entries if name.endswith(MODEL))
    model: Any = json.loads(entries[name])
    how = pick(random, ("target", "target", "text", "json", "entry", "bytes", "pickle"))
    if how == "target":
        node = pick(random, model["graph_module"]["graph"]["nodes"])
        node["target"] = said = pick(random, TARGETS)
    elif how == "text":
        said = pick(random, TEXTS)
        model["guards_code"].append(said)
    elif how == "json":
        model, said = damage_json(random, model)
    elif how == "entry":
        said = pick(random, NAMES)
        entries[f"{name.partition('/')[0]}/{said}"] = hostile_pickle(marker)
    else:
        other = pick(random, entries)
        entries[other], said = (
            (hostile_pickle(marker), "a pickle") if how == "pickle" else damage_bytes(random, entries[other])
        )
        return f"{other}: {said}"
    entries[name] = json.dumps(model).encode()
    return f"{how}: {said!r:.80}"


def make(random: Random, place: Place) -> Case:
    base = place.bases.made("net.pth", make_base)
    with zipfile.ZipFile(base) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    sound = random.random() < SOUND
    said = "undamaged" if sound else _damage(random, entries, place.marker)
    packed = zipfile.ZIP_STORED if sound or random.random() < 0.9 else zipfile.ZIP_DEFLATED
    file, found = place.inputs / "net.pth", place.outputs / "found.npy"
    with zipfile.ZipFile(file, "w", packed) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    expected = place.bases.made("net.npy", _expect)
    return Case(
        said, partial(_run, file, found), partial(_judge, expected, found), (found,),
        margin=-40.0 if sound else None, sound=sound,
    )  # fmt: skip
