"""Folders of sentence-transformers, a list of modules: the list, what is beside the model, and the model."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.bounds import folder_bound
from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, pick
from tests.fuzz.damage import damage_json
from tests.fuzz.kinds.model_folders import any_config, change_json, files, tensors, text_bytes, weight_bytes
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown

MODULES, MODEL = "modules.json", "0_Transformer"
PATHS = ("..", "../outputs", "/etc", "1_Pooling", "", "0_Transformer/../1_Pooling", "a\0b", "./0_Transformer")


def _make_base(folder: Path, source: Path) -> None:
    shutil.copytree(source, folder / MODEL)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = (MODEL, "1_Pooling")
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{path[2:]}"}
        for index, path in enumerate(kinds)
    ]
    (folder / MODULES).write_text(json.dumps(listed))


def _list(random: Random, folder: Path, marker: Path) -> str:
    def change(listed: Any) -> tuple[Any, str]:
        entry = pick(random, listed)
        entry["path"] = pick(random, PATHS)
        return listed, f"path = {entry['path']!r}"

    return change_json(folder, change if random.random() < 0.5 else partial(damage_json, random), MODULES)


def _beside(random: Random, folder: Path, marker: Path) -> str:
    return pick(random, (any_config, files, text_bytes))(random, folder / "1_Pooling", marker)


def _model(random: Random, folder: Path, marker: Path) -> str:
    return pick(random, (any_config, tensors, weight_bytes, files))(random, folder / MODEL, marker)


DAMAGES = (_list, _list, _beside, _model, text_bytes, files)


def _judge(source: Path, result: Path) -> float:
    """Of the model; all else has to be there byte for byte."""
    listed = json.loads((source / MODULES).read_text(encoding="utf-8"))
    inner = next(entry["path"] for entry in listed if str(entry["type"]).endswith("Transformer"))
    for path in source.rglob("*"):
        name = path.relative_to(source)
        carried = path.is_file() and (source / inner) not in path.parents and not name.parts[0].startswith(".")
        if carried and (result / name).read_bytes() != path.read_bytes():
            raise WrongError(f"{name} is another file in the result")
    return judge_folder(source / inner, result / inner)


def make(random: Random, place: Place) -> Case:
    bert = place.bases.get("bert")
    base = place.bases.made("encoder", partial(_make_base, source=bert))
    source, output = Path(shutil.copytree(base, place.inputs / "encoder")), place.outputs / "result"
    damage = None if random.random() < SOUND else pick(random, DAMAGES)
    said = damage(random, source, place.marker) if damage else "undamaged"
    command = ("quantize", source, "--scheme", "int8_wo", "-o", output)
    return Case(
        f"{said}: {shown(*command)}", partial(quark, *command), partial(_judge, source, output), (output,),
        like="bert", bound=partial(folder_bound, bert), sound=damage is None,
    )  # fmt: skip
