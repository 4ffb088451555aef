"""Recipes: what a command line says, as a file of YAML.

The keys are the options of a request, some of them in sections. What is
made of a recipe can be made again: `made_with` holds the version, and digests of the model and the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import Field, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

from quark.__version__ import __version__
from quark.base.files import atomic_file, check_apart, check_file, digest_of, require_regular
from quark.base.yaml_objects import write_yaml
from quark.errors import CalibrationError, ConfigError, FormatError
from quark.jobs.options import key_of, option_of
from quark.jobs.request import QUANTIZE, JobRequest, Kinds, is_pipeline, options_of
from quark.jobs.words import RECIPE, split_algorithm

FORMAT = 1
"""The version of the form of recipes, under the key `recipe`."""

WEIGHTS = (".json", ".safetensors", ".model", ".jinja", ".py")
"""Suffixes of the files of a model folder that decide what is made of it."""


@dataclass(frozen=True)
class Recipe:
    """A request as a file keeps it.

    Attributes:
        options: Name of a field of the request -> its value, of those that were given.
        read: Name of a field -> the file or folder that was read by it, where none was given.
        of_model: The digest of the model, where `read_beside` makes it.
    """

    options: Mapping[str, Any]
    read: Mapping[str, Path] = field(default_factory=dict)
    of_model: Callable[[], str] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, request: JobRequest, read: Mapping[str, Path] | None = None) -> Recipe:
        """Return the recipe of a request: the options that were given, and the paths read where none was given."""
        said = [name for name, each in options_of(type(request)).items() if name in request.said and key_of(each)]
        return cls({"model": request.model, **{name: getattr(request, name) for name in said}}, read or {})

    def text(self, in_folder: bool = False) -> str:
        """The file.

        Args:
            in_folder: Whether it goes into the folder that is made.

        Raises:
            CalibrationError, FormatError: The model or the data cannot be read.
        """
        content: dict[str, Any] = {"recipe": FORMAT}
        known = options_of()
        for name, value in self.options.items():
            if not in_folder or name == "model" or option_of(known[name]).changes_output:
                section, _, key = (key_of(known[name]) or "" if name in known else name).rpartition(".")
                (content.setdefault(section, {}) if section else content)[key] = _yaml_value(name, value)
        content["made_with"] = {"quark": __version__, **self.digests}
        first = f"# quark run {RECIPE} -o OUTPUT makes it again.\n" if in_folder else ""
        return first + write_yaml(content)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of what is read, by the names of parameters."""
        found = None
        if self.of_model is not None:
            with suppress(CancelledError):
                found = self.of_model()
        return {"model": found or model_digest(Path(self.options["model"])), **self.of_data}

    @cached_property
    def of_data(self) -> dict[str, str]:
        """Those of the data. Raises CalibrationError, FormatError."""
        inputs = {**self.options, **self.read}
        return {name: data_digest(Path(inputs[name])) for name in ("calib", "imatrix") if name in inputs}


@contextmanager
def read_beside(model: Path) -> Iterator[Callable[[], str]]:
    """The digest of a model, which a thread reads while the work inside runs: SHA-256 takes about a second a GB.

    Where the work is done first, or fails, the thread ends at once; who then asks for the digest waits for it.
    """
    ended = Event()
    with ThreadPoolExecutor(1, "digest") as pool:
        made = pool.submit(model_digest, model, ended)
        try:
            yield made.result
        finally:
            ended.set()


class RecipeInFolder(Mapping[str, str]):
    """The recipe as a file beside a model, name -> text, which is made when it is written.

    Args:
        recipe: Of the model.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __getitem__(self, name: str) -> str:
        if name != RECIPE:
            raise KeyError(name)
        return self._recipe.text(in_folder=True)

    def __iter__(self) -> Iterator[str]:
        return iter((RECIPE,))

    def __len__(self) -> int:
        return 1


def check_recipe(request: JobRequest) -> None:
    """Find what would stop the file of --write-recipe before any work. Raises as `check_file` does."""
    if request.write_recipe is not None:
        check_file(request.write_recipe, request.force)
        others = request.output, request.model, request.calib, request.report, request.log_file
        check_apart(request.write_recipe, *others)


def save_recipe(file: Path | None, recipe: Recipe) -> None:
    """Write the file of --write-recipe, if one is asked for; it replaces one that is there."""
    if file is not None:
        with atomic_file(file) as temporary:
            temporary.write_text(recipe.text(), encoding="utf-8")


def model_digest(model: Path, ended: Event | None = None) -> str:
    """The digest of an ONNX file and its external data, or of the files of a folder that decide what is made of it.

    Args:
        model: The file or folder.
        ended: As for `digest_of`.
    """
    if model.is_file():
        files = [model, *(model.with_name(model.name + end) for end in (".data", "_data"))]
    else:
        parts = [path.parent for path in sorted(model.glob("*/config.json"))] if is_pipeline(model) else []
        files = [path for folder in (model, *parts) for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS]
    return _of_lines(f"{file.name} {digest_of(file, ended)}" for file in files if file.is_file())


def data_digest(data: Path) -> str:
    """The digest of a file, of the names and contents of a folder, or of the texts of a dataset.

    Raises:
        CalibrationError: It is not there, or no file and no folder.
    """
    if str(data).startswith("datasets:") and not data.exists():
        # The flow imports torch: where a dataset is named.
        from quark.torch.llm.documents import documents

        parts = ([each.content, *filter(None, (each.answer, each.beside))] for each in documents(data))
        contents = [json.dumps(part[0] if len(part) == 1 else part, ensure_ascii=False, default=str) for part in parts]
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


def _yaml_value(name: str, value: Any) -> Any:
    if name == "algorithm":
        words = [split_algorithm(word) for word in value]
        return [{name: parameters} if parameters else name for name, parameters in words]
    if name == "layer":
        rules = [item.rpartition("=") for item in value]
        return {pattern: scheme for pattern, _, scheme in rules}
    if isinstance(value, (list, tuple)):
        return [_yaml_value("", item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def said_by(options: Mapping[str, Any], kinds: Kinds[Any, Any] = QUANTIZE) -> dict[str, Any]:
    """The values of a recipe as fields of a request: paths, and words of layers and of algorithms.

    Args:
        options: Name of a field -> its value in the recipe.
        kinds: Of which requests they are.

    Raises:
        ConfigError: Parameters of an algorithm that its word cannot say.
    """
    known = options_of(*kinds)
    return {name: _as_field(name, known[name], value) for name, value in options.items()}


def _as_field(name: str, each: Field[Any], value: Any) -> Any:
    if name == "layer":
        return tuple(f"{pattern}={scheme}" for pattern, scheme in value.items())
    if name == "algorithm":
        return tuple(map(_algorithm, value))
    if isinstance(value, list):
        return tuple(map(str, value))
    if "Path" in str(each.type):
        return Path(value)
    return str(value) if "str" in str(each.type) else value


def _algorithm(item: str | dict[str, dict[str, Any]]) -> str:
    """The word of --algorithm."""
    if isinstance(item, str):
        return item
    ((name, parameters),) = item.items()
    word = f"{name}:{','.join(f'{key}={json.dumps(value)}' for key, value in parameters.items())}"
    if split_algorithm(word) != (name, parameters):
        raise ConfigError(f"algorithms: the parameters of {name} cannot be told apart: {parameters}.")
    return word
