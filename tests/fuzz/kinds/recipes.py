"""Recipes: values of other types, numbers that readers differ in, and bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, damage_json, odd_file
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown

LINES = (
    *("samples: 010", "samples: 1:30", "samples: 0x10", "samples: .inf", "dtype: no", "stream: yes"),
    *("exclude: &a [*a]", "alias: &b [x]\nother: *b", "? [1]\n: 2", "scheme: !!python/name:os.system"),
    *("exclude: ['re:(a+)+b']", "exclude: ['re:(']", "---", "<<: {scheme: fp8}", "\t- x", "scheme: |\n  int8"),
)


def make(random: Random, place: Place) -> Case:
    import yaml

    source, output = place.bases.get("llama"), place.outputs / "result"
    content: Any = {
        "recipe": 1,
        "model": str(source),
        "scheme": "uint4_wo_32",
        "exclude": ["lm_head"],
        "dtype": "float32",
    }
    file, said, sound = place.inputs / "recipe.yaml", "undamaged", random.random() < SOUND
    how = pick(random, ("value", "value", "line", "bytes", "file"))
    if not sound and how == "value":
        content, said = damage_json(random, content)
    text = yaml.safe_dump(content)
    if not sound and how == "line":
        said = pick(random, LINES)
        text += said + "\n"
    file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    if not sound and how == "bytes":
        changed, said = damage_bytes(random, file.read_bytes())
        file.write_bytes(changed)
    if not sound and how == "file":
        said = odd_file(random, file)
    command = ("run", file, "-o", output)
    return Case(
        f"{said!r:.100}: {shown(*command)}", partial(quark, *command), partial(_judge, Path(source), output), (output,),
        margin=None, sound=sound,
    )  # fmt: skip


def _judge(source: Path, output: Path) -> float:
    return judge_folder(source, output)
