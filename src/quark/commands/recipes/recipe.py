"""Recipes: what a command line says, as a file of YAML.

The keys are the options of `quark quantize`, some of them in sections; `NAMES` says which are called otherwise. What is
made of a recipe can be made again: `made_with` holds the version, and digests of the model and the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from quark.__version__ import __version__
from quark.commands.options.words import split_algorithm
from quark.errors import CalibrationError, ConfigError, FormatError
from quark.files import atomic_file, check_apart, check_file, digest_of, require_regular
from quark.yaml_objects import write_yaml

RECIPE = "quark_recipe.yaml"
"""The name of a recipe in the folder that was made of it."""
FORMAT = 1
"""The version of the form of recipes, under the key `recipe`."""

NAMES = {
    "goal": "for",
    "layer": "layers",
    "algorithm": "algorithms",
    "calib": "data.path",
    **{
        name: f"data.{name}"
        for name in ("samples", "length", "packing", "seed", "synthetic", "batch_size", "mean", "std")
    },
    "output": "output.path",
    "export_format": "output.format",
    **{name: f"output.{name}" for name in ("weight_format", "pack_method", "max_shard_size", "report", "save_imatrix")},
}
"""Option of `quark quantize` -> its key, with a point between a section and what is in it; others keep their names."""
NOT_IN_A_RECIPE = ("context", "force", "trust_remote_code", "write_recipe")
"""What a file may not ask for: to replace what is there, or to run code that came with a model."""
OUTSIDE = ("output", "report", "save_imatrix", "log_file", "stream")
"""Where something goes, and how memory is used: it changes no byte, and is left out of the recipe in the folder."""
WEIGHTS = (".json", ".safetensors", ".model", ".jinja", ".py")
"""Suffixes of the files of a model folder that decide what is made of it."""


@dataclass(frozen=True)
class Recipe:
    """What was asked for.

    Attributes:
        options: Name of a parameter of `quark quantize` -> its value, of those that were given.
        read: Name of a parameter -> the file or folder that was read by it, where none was given.
    """

    options: Mapping[str, Any]
    read: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def given(cls, context: typer.Context) -> Recipe:
        """The options that stand on a command line."""
        sources = {name: context.get_parameter_source(name) for name in context.params}
        named = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        # In the order of the help: that of a command line is lost.
        order = [param.name or "" for param in context.command.params]
        return cls({name: context.params[name] for name in order if name in named - {*NOT_IN_A_RECIPE}})

    def text(self, in_folder: bool = False) -> str:
        """The file.

        Args:
            in_folder: Whether it goes into the folder that is made.

        Raises:
            CalibrationError, FormatError: The model or the data cannot be read.
        """
        content: dict[str, Any] = {"recipe": FORMAT}
        for name, value in self.options.items():
            if not (in_folder and name in OUTSIDE):
                section, _, key = NAMES.get(name, name).rpartition(".")
                (content.setdefault(section, {}) if section else content)[key] = _plain(name, value)
        content["made_with"] = {"quark": __version__, **self.digests}
        first = f"# quark run {RECIPE} -o OUTPUT makes it again.\n" if in_folder else ""
        return first + write_yaml(content)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of what is read, by the names of parameters."""
        inputs = {**self.options, **self.read}
        found = {"model": model_digest(Path(inputs["model"]))}
        return found | {name: data_digest(Path(inputs[name])) for name in ("calib", "imatrix") if name in inputs}


def check_recipe(file: Path | None, output: str, force: bool, *inputs: Path | None) -> None:
    """Find what would stop the file of --write-recipe before any work. Raises as `check_file` does."""
    if file is not None:
        check_file(file, force)
        check_apart(file, output, *inputs)


def save_recipe(file: Path | None, recipe: Recipe | None) -> None:
    """Write the file of --write-recipe, if one is asked for; it replaces one that is there."""
    if file is not None and recipe is not None:
        with atomic_file(file) as temporary:
            temporary.write_text(recipe.text(), encoding="utf-8")


def model_digest(model: Path) -> str:
    """The digest of an ONNX file and its external data, or of the files of a folder that decide what is made of it."""
    if model.is_file():
        files = [model, *(model.with_name(model.name + end) for end in (".data", "_data"))]
    else:
        files = [path for path in sorted(model.iterdir()) if path.suffix in WEIGHTS]
    return _of_lines(f"{file.name} {digest_of(file)}" for file in files if file.is_file())


def data_digest(data: Path) -> str:
    """The digest of a file, of the names and contents of a folder, or of the texts of a dataset.

    Raises:
        CalibrationError: It is not there, or no file and no folder.
    """
    if str(data).startswith("datasets:") and not data.exists():
        # The flow imports torch: where a dataset is named.
        from quark.torch.llm.documents import documents

        contents = [json.dumps(document.content, ensure_ascii=False, default=str) for document in documents(data)]
    elif data.is_dir():
        files = sorted(path for path in data.rglob("*") if path.is_file())
        contents = [f"{path.relative_to(data).as_posix()} {digest_of(path)}" for path in files]
    else:
        try:
            require_regular(data)
        except FormatError as error:
            raise CalibrationError(f"{data} is not there." if not data.exists() else str(error)) from None
        return f"sha256:{digest_of(data)}"
    return _of_lines(contents)


def _of_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _plain(name: str, value: Any) -> Any:
    """The value of an option as YAML has it."""
    if name == "algorithm":
        words = [split_algorithm(word) for word in value]
        return [{name: parameters} if parameters else name for name, parameters in words]
    if name == "layer":
        rules = [item.rpartition("=") for item in value]
        return {pattern: scheme for pattern, _, scheme in rules}
    if isinstance(value, (list, tuple)):
        return [_plain("", item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def option_words(command: Any, options: Mapping[str, Any]) -> list[str]:
    """A recipe's options as words of a command line.

    Args:
        command: The command, of typer.
        options: Name of a parameter -> its value.

    Raises:
        ConfigError: Parameters of an algorithm that a command line cannot say.
    """
    words: list[str] = []
    for param in command.params:
        if param.param_type_name != "option" or options.get(param.name) is None:
            continue
        flag, value = max(param.opts, key=len), options[param.name]
        if isinstance(value, bool):
            words += [flag] if value else param.secondary_opts[:1]
        else:
            words += [f"{flag}={item}" for item in _items(param.name, value)]
    return words


def _items(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{pattern}={scheme}" for pattern, scheme in value.items()]
    if name == "algorithm":
        return [_algorithm(item) for item in value]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _algorithm(item: str | dict[str, dict[str, Any]]) -> str:
    """The word of --algorithm."""
    if isinstance(item, str):
        return item
    ((name, parameters),) = item.items()
    word = f"{name}:{','.join(f'{key}={json.dumps(value)}' for key, value in parameters.items())}"
    if split_algorithm(word) != (name, parameters):
        raise ConfigError(f"algorithms: the parameters of {name} cannot be told apart: {parameters}.")
    return word
