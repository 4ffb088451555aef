"""The model of a recipe: its keys and types, made of the options of the commands, and its JSON schema.

A recipe is read as YAML of plain values, however it was damaged, or meant to do harm.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from quark.base.files import require_regular
from quark.base.yaml_objects import plain_yaml
from quark.errors import ConfigError, FormatError, did_you_mean
from quark.jobs.evaluate import EVALUATE
from quark.jobs.options import key_of, option_of
from quark.jobs.recipes.recipe import FORMAT
from quark.jobs.request import QUANTIZE, Kinds, options_of

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_NUMBERS_TOO = ("mean", "std")
"""Texts of the command line that look like numbers in YAML."""
SECTIONS = {
    "data": "Calibration data, and how samples are taken.",
    "output": "What is written.",
    "evaluation": "What the model may cost; and what `quark evaluate` is told after it is made, where data are named.",
    "made_with": "What the recipe was written by: made again, model and data have to be the same.",
}


@cache
def recipe_model() -> type[BaseModel]:
    """The class of a recipe."""
    fields: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for place, each in _places(QUANTIZE).items():
        section, _, key = place.rpartition(".")
        fields[section][key] = each
    fields["evaluation"] |= _places(EVALUATE)
    fields["made_with"] = {
        key: (str | None, Field(None, description=text))
        for key, text in {
            "quark": "Version.", "model": "Fingerprint of the model.", "calib": "Digest of the calibration data.",
            "imatrix": "Digest of the importance matrix.",
        }.items()
    }  # fmt: skip
    top: dict[str, Any] = {"recipe": (Annotated[int, Field(ge=1, le=FORMAT)], Field(description="Form of recipes: 1."))}
    top |= fields[""]
    top["model"] = (str, Field(description="Folder of a Hugging Face model, or an ONNX file."))
    for section, text in SECTIONS.items():
        inner = create_model(section.title().replace("_", ""), __config__=_STRICT, **fields[section])
        top[section] = (inner | None, Field(None, description=text))
    return create_model("Recipe", __config__=_STRICT, **top)


def _places(kinds: Kinds[Any, Any]) -> dict[str, Any]:
    """Key of a recipe -> a field of pydantic, for each option of requests that a recipe may say."""
    of_folders, of_files = map(typing.get_type_hints, kinds)
    hints = of_files | of_folders
    return {
        key: (
            _in_yaml(name, hints[name]) | None,
            Field(None, description=" ".join(option_of(each).help.split()), ge=option_of(each).least),
        )
        for name, each in options_of(*kinds).items()
        if (key := key_of(each)) is not None
    }


def _in_yaml(name: str, kind: Any) -> Any:
    """The type of a value in YAML."""
    if name == "layer":
        return dict[str, str]
    if name == "algorithm":
        one = Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=1)]
        return list[str | one]
    if typing.get_origin(kind) in (types.UnionType, Union):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    text: Any = str | int | float if name in _NUMBERS_TOO else str
    if typing.get_origin(kind) in (list, tuple):
        return list[text]
    return text if kind in (str, Path) else kind


def checked_recipe(content: dict[str, Any], file: Path, model: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a recipe, without those that it leaves open.

    Raises:
        ConfigError: A key that there is not, or a value of another type; names the key, and the nearest ones.
    """
    try:
        return model.model_validate(content).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Other places are names of types in a union.
        types = ("str", "int", "float", "bool")
        keys = [part for part in first["loc"] if part in _keys(model) or ("[" not in str(part) and part not in types)]
        path = list(map(str, keys))
        where = ".".join(path) or "the recipe"
        if first["type"] == "extra_forbidden":
            section = model
            if above := list(map(str, first["loc"][:-1])):
                kinds = typing.get_args(model.model_fields[above[0]].annotation)
                section = next(kind for kind in kinds if kind is not type(None))
            hint = did_you_mean(path[-1], _keys(section))
            raise ConfigError(f"{file}: there is no key {where}. {hint}") from None
        more = len(error.errors()) - 1
        came = f", got {first['input']!r:.60}" if first["type"] != "missing" else ""
        also = f" (and {more} more)" if more and len({e["loc"][0] for e in error.errors()}) > 1 else ""
        raise ConfigError(f"{file}: {where}: {first['msg']}{came}{also}.") from None


def _keys(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


# The file -------------------------------------------------------------------------------------------------------------


LARGEST = 1 << 20
"""Bytes of a recipe."""


def read_recipe(file: Path) -> dict[str, Any]:
    """The content of a recipe, which is not checked yet.

    Raises:
        FormatError: It is no regular file, too large, or no YAML of plain values; says where.
    """
    require_regular(file)
    try:
        if file.stat().st_size > LARGEST:
            raise FormatError(f"{file} has {file.stat().st_size} bytes; a recipe has at most {LARGEST}.")
        content = plain_yaml(file.read_text(encoding="utf-8"))
    except FormatError:
        raise
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is no UTF-8 text: {error}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise FormatError(f"{file}{place}: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} is no YAML of a recipe: {error}.") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file} holds no recipe: keys with values are needed, as in `model: ./llama`.")
    return content
