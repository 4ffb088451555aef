"""The model card (README.md) of a quantized folder: what it is, what it was made of, how to load and serve it.

The front matter is what hubs read. The README of the source describes the float model: of its front matter the card
takes over what holds for both, such as the license; the text travels as `README_base.md`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from quark.base.files import atomic_file
from quark.base.libraries.diffusers import is_network
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.errors import FormatError
from quark.goals import GOALS, RuntimeGoal
from quark.goals.goal import WITHOUT_TOKENIZER, GoalDefaults
from quark.torch.calibration.synthetic_data import writes_text
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import cache_spec
from quark.torch.config.selectors import output_head
from quark.torch.formats.readers import TRANSFORMERS
from quark.torch.layers.base import ROLES
from quark.torch.model.folder_files import MODULES, PIPELINE, file_of, has_tokenizer, lists_modules

CARD, BASE_CARD = "README.md", "README_base.md"
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "thumbnail")
"""Keys of a float model's front matter that hold for the quantized one; its tags do, too."""
FIGURES = "## Measured on held-out data"
"""Begins what `add_figures` writes."""
COLUMNS = "| data | | |\n| --- | --- | --- |\n"
CACHE = re.compile(r"models--([\w.-]+)--([\w.-]+)")
"""A folder of huggingface's cache, which says the name on the hub."""
NAME = re.compile(r"[\w][\w.-]{0,95}")
"""The names that a hub takes; any other stays out of the card."""
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


@dataclass(frozen=True)
class Figures:
    """Results of a measurement of a quantized model on held-out data.

    Attributes:
        data: Name of the data.
        kind: Their type, as hubs call it: "text", "json" ...
        arguments: How they were read, such as the number of windows.
        task: As hubs call it; None: that of the card.
        metrics: Type of each metric, as hubs call it, its name and its value.
        lines: What a reader sees -> the value in words.
    """

    data: str
    kind: str
    arguments: Mapping[str, int]
    task: str | None
    metrics: Sequence[tuple[str, str, float]]
    lines: Mapping[str, str]


def write_card(
    model: Any, layers: Mapping[str, LayerSpec], config: QConfig, source: Path | None, folder: Path, goal: str | None
) -> None:
    """Write README.md into a new folder, whose config.json, tokenizer and weights are there.

    Args:
        model: A transformers model, be it without weights.
        layers: What was quantized, and how.
        config: What was asked for.
        source: The folder that it was made of; None: not known.
        folder: Where.
        goal: The program that it was made for, one of GOALS; None: none in particular.
    """
    from huggingface_hub import ModelCardData  # slow, and needed only here

    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    form, float_card = str(stored["quant_method"]), _front_matter(source)
    base, carried = _base_of_card(float_card) or base_model(source), _carried(float_card)
    model_type = str(getattr(model.config, "model_type", ""))
    # What is listed in the folder itself: of the model inside a larger one, the card is of transformers.
    sentences = form == "quark" and lists_modules(folder)
    library = "sentence-transformers" if sentences else "transformers"
    named = dict.fromkeys((*carried.pop("tags"), "quark", "quantized", form, model_type))
    data = ModelCardData(
        **carried,
        library_name="diffusers" if is_network(model) else library,
        base_model=base,
        base_model_relation="quantized" if base else None,
        tags=[each for each in named if each],
    )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    text = _body(type(model).__name__, _loading(model, form, sentences), layers, form, base, size)
    text += _running(model, layers, config, stored, folder, goal)
    text = f"---\n{data.to_yaml().rstrip()}\n---\n\n{text}"
    # Of a folder that quark made, the description of its own source has come along already.
    if not (folder / BASE_CARD).exists() and source is not None and (source / CARD).is_file():
        shutil.copyfile(file_of(source, CARD), folder / BASE_CARD)
    if (folder / BASE_CARD).exists():
        text += f"\n{BASE_CARD} is the description of the model that this was made of.\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def base_model(source: Path | None) -> str | None:
    """How a hub calls the model of a folder: its name in huggingface's cache, else that of the folder.

    A part of a pipeline, or of a sentence encoder, has the name of the whole.
    """
    if source is None:
        return None
    path = source.resolve()
    if any((path.parent / name).is_file() for name in (PIPELINE, MODULES)):
        path = path.parent
    cached = next((found for part in path.parts if (found := CACHE.fullmatch(part))), None)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return path.name if NAME.fullmatch(path.name) else None


def read_card(folder: Path) -> Any:
    """The card of a folder, a ModelCard. Raises FormatError where there is none whose front matter can be read."""
    from huggingface_hub import ModelCard

    path = file_of(folder, CARD)
    try:
        return ModelCard.load(path)
    except Exception as error:  # noqa: BLE001 - of YAML, of UTF-8, of a model-index: somebody else may have edited it
        raise FormatError(f"{path} has a front matter that cannot be read: {error!r:.120}.") from None


def add_figures(folder: Path, figures: Figures) -> None:
    """Write figures into the model-index and at the end of a card, in the place of those on the same data.

    Args:
        folder: Of the card.
        figures: What was measured.

    Raises:
        FormatError: As `read_card` does.
    """
    from huggingface_hub import EvalResult

    path, card = folder / CARD, read_card(folder)
    task = figures.task or card.data.pipeline_tag
    made = [
        EvalResult(
            task_type=task, dataset_type=figures.kind, dataset_name=figures.data, metric_type=kind, metric_name=name,
            metric_value=value, dataset_args=dict(figures.arguments),
            dataset_config=figures.data,  # without it the client takes all data of a type for one
        )
        for kind, name, value in figures.metrics
        if task is not None
    ]  # fmt: skip
    replaced = {(figures.data, kind) for kind, _, _ in figures.metrics}
    results = card.data.eval_results or ()
    kept = [each for each in results if (each.dataset_name, each.metric_type) not in replaced]
    card.data.eval_results = [*kept, *made] or None
    card.data.model_name = getattr(card.data, "model_name", None) or folder.resolve().name
    body = _FRONT.sub("", path.read_text(encoding="utf-8"), count=1)
    text, _, table = body.partition(f"\n{FIGURES}\n\n{COLUMNS}")
    rows = [row for row in table.splitlines() if row and not row.startswith(f"| {_cell(figures.data)} |")]
    rows += [f"| {_cell(figures.data)} | {_cell(name)} | {_cell(value)} |" for name, value in figures.lines.items()]
    with atomic_file(path) as temporary:
        temporary.write_text(
            f"---\n{card.data.to_yaml().rstrip()}\n---\n{text}\n{FIGURES}\n\n{COLUMNS}" + "\n".join(rows) + "\n",
            encoding="utf-8",
        )


def _cell(text: str) -> str:
    """A text as a cell of a table: a name of a file may have a bar, or a break."""
    return " ".join(text.replace("|", "\\|").split())


def _front_matter(source: Path | None) -> dict[str, Any]:
    """The front matter of the README of the model that a folder is made of; empty where there is none to be read."""
    from huggingface_hub import metadata_load

    if source is None or not (source / CARD).is_file():
        return {}
    try:
        found = metadata_load(file_of(source, CARD))
    except FormatError:
        raise
    except Exception:  # noqa: BLE001 - of YAML, of UTF-8: a README that nobody checked, and that travels whole
        return {}
    return found if isinstance(found, dict) else {}


def _base_of_card(card: Mapping[str, Any]) -> str | None:
    """The float model by the card of a quantized folder, which is converted, or quantized again; None of any other."""
    if card.get("base_model_relation") != "quantized":
        return None
    named = card.get("base_model")
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    return named if isinstance(named, str) else None


def _carried(card: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a front matter that hold for the quantized model too, its tags as a list."""
    found = {key: card[key] for key in (*_CARRIED, "tags") if key in card}
    # Texts and lists of texts: what else YAML can hold, also a list that holds itself, is left out.
    found = {
        key: value
        for key, value in found.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }
    tags = found.pop("tags", [])
    return {**found, "tags": [tags] if isinstance(tags, str) else tags}


def _loading(model: Any, form: str, sentences: bool) -> str:
    """The lines that load the folder."""
    kind = type(model).__name__
    if is_network(model):
        # Not from its module: the top of diffusers names all networks.
        lines = f"import quark  # pip install 'openquark[torch,diffusers]'\nfrom diffusers import {kind}\n\n"
        return f'{lines}model = {kind}.from_pretrained("FOLDER")'
    if sentences:
        lines = (
            "import quark  # pip install 'openquark[torch]'\nfrom sentence_transformers import SentenceTransformer\n\n"
        )
        return f'{lines}model = SentenceTransformer("FOLDER")'
    auto = "AutoModelForCausalLM" if kind.endswith("ForCausalLM") else kind
    needs = "  # needs: pip install 'openquark[torch]'" if form == "quark" else ""
    return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER").eval(){needs}'


def _running(
    model: Any,
    layers: Mapping[str, LayerSpec],
    config: QConfig,
    stored: Mapping[str, Any],
    folder: Path,
    goal: str | None,
) -> str:
    """The section with the commands that run the folder, those that the terminal prints; empty where none is known."""
    asked = None if goal is None else GOALS[goal]
    programs = [] if asked is None else [asked]
    if asked is None or asked.reader == TRANSFORMERS:
        real = stored.get("export", {}).get("weight_format", "real_quantized") == "real_quantized"
        programs += [server for server in _servers(model, layers, str(stored["quant_method"])) if real]
    cache, tokenizer = bool(config.kv_cache_quant_config), has_tokenizer(folder)
    rows = {each.program: _defaults(model, each.folder, folder) for each in programs if each.folder is not None}
    commands = {program: row.command("FOLDER", cache, tokenizer) for program, row in rows.items()}
    if not commands:
        return ""
    lines = "".join(f"\nWith {program}:\n\n```sh\n{command}\n```\n" for program, command in commands.items())
    unnamed = any(row.serve_tokenizer for row in rows.values()) and not tokenizer
    note = "" if not unnamed else f"\n{WITHOUT_TOKENIZER.format(out='FOLDER')}\n"
    return f"\n## Run\n{lines}{note}"


def _defaults(model: Any, defaults: GoalDefaults, folder: Path) -> GoalDefaults:
    """The defaults of a program, whose command is that for the kind of model."""
    if is_network(model) or writes_text(model):
        return defaults
    return defaults.of_other_model(type(model).__name__, lists_modules(folder))


def _servers(model: Any, layers: Mapping[str, LayerSpec], form: str) -> Iterator[RuntimeGoal]:
    """The servers that are known to load a folder that was made for no program in particular.

    Only of language models whose linear layers, but the output head, all get one scheme: a server refuses some of the
    others, which `--for` finds.
    """
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    specs = {described(replace(spec, output=None)) for spec in layers.values()}
    whole = linear - output_head(model) == layers.keys()
    if not whole or len(specs) != 1 or not type(model).__name__.endswith("ForCausalLM"):
        return
    schemes = {name for name, row in SCHEMES.items() if described(row) in specs}
    for server in GOALS.values():
        loaded = any(fact.form == form and fact.scheme in schemes for fact in server.loaded(onnx=False))
        if server.reader != TRANSFORMERS and loaded and _reads_cache(server, layers, form):
            yield server


def _body(architecture: str, load: str, layers: Mapping[str, LayerSpec], form: str, base: str | None, size: int) -> str:
    counts = Counter(described(spec) for spec in layers.values())
    schemes = "".join(f"- {count} layers: {scheme}\n" for scheme, count in counts.most_common())
    name = base or "a float model"
    return f"""# {name}, quantized

`{architecture}` of {name}, quantized by quark in the format `{form}`.
{size / 1e6:.2f} MB of weights.

{schemes}
## Load

```python
{load}
```
"""


def described(spec: LayerSpec) -> str:
    """Return the specs of a layer in words."""
    roles = {role: getattr(spec, role) for role in ROLES}
    return ", ".join(f"{role} {found}" for role, found in roles.items() if found is not None)


def _reads_cache(server: RuntimeGoal, layers: Mapping[str, LayerSpec], form: str) -> bool:
    """Compare the caches of keys and values that layers feed with those that a server reads; True where it reads all.

    Args:
        server: The program.
        layers: Name -> spec; the output of one that feeds a quantized cache is quantized.
        form: The format of the folder.
    """
    fed = {name.rpartition(".")[2]: spec.output for name, spec in layers.items() if spec.output is not None}
    caches, leaves = [cache_spec(name) for name in server.cache], server.cache_layers.get(form, fed)
    return all(cache in caches and leaf in leaves for leaf, cache in fed.items())
