"""The model card (README.md) of a quantized folder: what it is, what it was made of, how to load and serve it.

The front matter is what hubs read. The README of the source describes the float model: of its front matter the card
takes over what holds for both, such as the license; the text travels as `README_base.md`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.base.files import atomic_file
from quark.base.libraries.diffusers import is_network
from quark.core.spec import LayerSpec
from quark.goals import GOALS
from quark.torch.layers.base import ROLES
from quark.torch.model.folder_files import file_of

CARD, BASE_CARD = "README.md", "README_base.md"
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "thumbnail")
"""What of a float model's front matter holds for the quantized one."""
FIGURES = "## Measured"
"""Begins what `add_figures` writes."""
CACHE = re.compile(r"models--([\w.-]+)--([\w.-]+)")
"""A folder of huggingface's cache, which says the name on the hub."""
NAME = re.compile(r"[\w][\w.-]{0,95}")
"""What a hub takes for a name; any other stays out of the card."""
SERVED = {
    "quark": "vLLM and SGLang, where they have kernels for the scheme",
    "awq": "vLLM and SGLang",
    "fp8": "vLLM and SGLang",
    "compressed-tensors": "vLLM",
}


def write_card(model: Any, layers: Mapping[str, LayerSpec], source: Path | None, folder: Path) -> None:
    """Write README.md into a new folder, whose config.json and weights are there.

    Args:
        model: A transformers model, be it without weights.
        layers: What was quantized, and how.
        source: The folder that it was made of; None: not known.
        folder: Where.
    """
    from huggingface_hub import ModelCardData  # slow, and needed only here

    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    form, base = str(stored["quant_method"]), base_model(source)
    data = ModelCardData(
        **_carried(source, folder),
        library_name="diffusers" if is_network(model) else "transformers",
        base_model=base,
        base_model_relation="quantized" if base else None,
        tags=[each for each in dict.fromkeys(("quark", "quantized", form, _model_type(model))) if each],
    )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    text = _body(type(model).__name__, _loading(model, form), layers, form, base, size)
    text = f"---\n{data.to_yaml().rstrip()}\n---\n\n{text}"
    if (folder / BASE_CARD).exists():
        text += f"\n{BASE_CARD} is the description of the float model.\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def base_model(source: Path | None) -> str | None:
    """How a hub calls the model of a folder: its name in huggingface's cache, else that of the folder."""
    if source is None:
        return None
    path = source.resolve()
    cached = next((found for part in path.parts if (found := CACHE.fullmatch(part))), None)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return path.name if NAME.fullmatch(path.name) else None


def add_figures(folder: Path, lines: Mapping[str, str]) -> None:
    """Write figures at the end of a card that quark wrote, in the place of those that are there.

    Args:
        folder: Of the card; one without is left as it is.
        lines: What was measured -> its value.
    """
    card = folder / CARD
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8").split(f"\n{FIGURES}\n")[0]
    rows = "".join(f"| {name} | {value} |\n" for name, value in lines.items())
    with atomic_file(card) as temporary:
        temporary.write_text(f"{text}\n{FIGURES}\n\n| | |\n| --- | --- |\n{rows}", encoding="utf-8")


def _carried(source: Path | None, folder: Path) -> dict[str, Any]:
    """What holds of the front matter of the float model's README, whose text goes into the new folder."""
    from huggingface_hub import metadata_load

    if source is None or not (source / CARD).is_file():
        return {}
    shutil.copyfile(file_of(source, CARD), folder / BASE_CARD)
    try:
        found = metadata_load(folder / BASE_CARD)
    except Exception:  # noqa: BLE001 - of YAML, of UTF-8: a README that nobody checked, and that travels whole
        return {}
    return {key: found[key] for key in CARRIED if _is_plain(found.get(key))} if isinstance(found, dict) else {}


def _is_plain(value: Any) -> bool:
    """Whether it is text, or a list of texts: what else YAML can hold, also a list that holds itself, stays behind."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _model_type(model: Any) -> str:
    return str(getattr(model.config, "model_type", ""))


def _loading(model: Any, form: str) -> str:
    """The lines that load the folder."""
    kind = type(model).__name__
    if is_network(model):
        # Not from its module: the top of diffusers names all networks.
        lines = f"import quark  # pip install 'openquark[torch,diffusers]'\nfrom diffusers import {kind}\n\n"
        return f'{lines}model = {kind}.from_pretrained("FOLDER")'
    auto = "AutoModelForCausalLM" if kind.endswith("ForCausalLM") else kind
    needs = "  # needs: pip install 'openquark[torch]'" if form == "quark" else ""
    return f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER").eval(){needs}'


def _body(architecture: str, load: str, layers: Mapping[str, LayerSpec], form: str, base: str | None, size: int) -> str:
    counts = Counter(described(spec) for spec in layers.values())
    schemes = "".join(f"- {count} layers: {scheme}\n" for scheme, count in counts.most_common())
    name = base or "a float model"
    serve, offer = "", GOALS["vllm"].folder
    if offer is not None and architecture.endswith("ForCausalLM"):
        command = (offer.serve + offer.serve_options.get(form, "")).format(out="FOLDER")
        serve = f"\n## Serve\n\nRead by: {SERVED.get(form, form)}.\n\n```sh\n{command}\n```\n"
    return f"""# {name}, quantized

`{architecture}` of {name}, quantized by quark in the format `{form}`.
{size / 1e6:.2f} MB of weights.

{schemes}
## Load

```python
{load}
```
{serve}"""


def described(spec: LayerSpec) -> str:
    """What is quantized in a layer."""
    roles = {role: getattr(spec, role) for role in ROLES}
    return ", ".join(f"{role} {found}" for role, found in roles.items() if found is not None)
