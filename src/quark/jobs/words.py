"""Words on the command line, checked before torch or onnx is imported: wrong ones are answered at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quark.base.log import logger
from quark.core.names.scheme_families import family_of, named_in, suggestion
from quark.errors import ConfigError, UsageError, did_you_mean

if TYPE_CHECKING:
    from quark.torch.algorithms import Algorithm

FOLDER_FORMS = ("quark", "awq", "gptq", "fp8", "compressed-tensors")
GGUF, ONNX, COMFYUI = FILE_FORMS = ("gguf", "onnx", "comfyui")
"""Forms that are one file, not a folder of safetensors."""
RECIPE = "quark_recipe.yaml"
"""The name of a recipe in the folder that was made of it."""
DTYPES = ("auto", "float32", "float16", "bfloat16")


@contextmanager
def usage() -> Iterator[None]:
    """Within: what is wrong with a configuration is wrong with the command line; exit code 2."""
    try:
        yield
    except UsageError:
        raise
    except ConfigError as error:
        raise UsageError(str(error)) from error


def check_words(
    schemes: Iterable[str | None], form: str | None = None, algorithms: Sequence[str] | None = None, dtype: str = "auto"
) -> None:
    """Raise ConfigError for a scheme, format, algorithm or dtype that there is not, with the nearest names."""
    known = scheme_names()
    for scheme in schemes:
        if scheme is not None and scheme not in known:
            raise ConfigError(f"Unknown scheme {scheme!r}. {suggestion(scheme, known) or did_you_mean(scheme, known)}")
    forms = (*FOLDER_FORMS, *FILE_FORMS)
    if form is not None and form not in forms:
        raise ConfigError(f"--export-format {form!r} is unknown. {did_you_mean(form, forms)}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is unknown. {did_you_mean(dtype, DTYPES)}")
    torch_algorithms(algorithms)


def members(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names that words mean, each once: a name itself, or the usual member of a family, which the log says."""
    found = []
    for word in words:
        name = word if word in known else next((n for n in family_of(word) if n in known), named_in(word, known))
        if name is not None and name != word:
            logger.info("%s: here it is %s.", word, name)
        found.append(name or word)
    return list(dict.fromkeys(found))


def layer_schemes(layers: Sequence[str] | None) -> list[str]:
    """The schemes of --layer PATTERN=SCHEME."""
    return [item.rpartition("=")[2] for item in layers or [] if "=" in item]


def scheme_names() -> list[str]:
    """Every name that --scheme takes: schemes, mixes of block types, block types, and names of old versions."""
    from quark.core.blocks.block_types import BLOCK_TYPES
    from quark.core.schemes import OLD_SCHEMES, SCHEMES
    from quark.gguf import MIXES

    return list(dict.fromkeys([*SCHEMES, *MIXES, *BLOCK_TYPES, *OLD_SCHEMES]))


def torch_algorithms(words: Sequence[str] | None) -> list[Any]:
    """The configs of --algorithm for a model folder; a name alone stays one, which a template may know better."""
    from quark.torch.config.named_algorithms import ALGO_CONFIGS, fields_of_words

    configs: list[Any] = []
    for word in words or []:
        name, parameters = split_algorithm(word)
        kind = ALGO_CONFIGS[name]
        configs.append(_algorithm_config(kind, name, fields_of_words(name, parameters)) if parameters else name)
    return configs


def onnx_algorithms(words: Sequence[str] | None) -> list[Any]:
    """The configs of --algorithm for an ONNX file."""
    if not words:
        return []
    from quark.onnx.config.algo_configs import ALGO_CONFIGS

    return [_algorithm_config(ALGO_CONFIGS[name], name, parameters) for name, parameters in map(split_algorithm, words)]


def _algorithm_config(kind: Any, name: str, parameters: dict[str, Any]) -> Any:
    """A config with parameters. Raises ConfigError for one that it has not, or of another type."""
    from quark.base.checked import known_keys

    try:
        return kind(**known_keys(parameters, kind))
    except TypeError as error:  # a parameter that has no default, and is no word
        raise ConfigError(f"--algorithm {name}: {error}.") from None


def each_algorithm(words: list[str] | None) -> list[str] | None:
    """The words of --algorithm, one for each; "rotation,gptq" is two. Parameters have commas of their own."""
    if not words:
        return words
    listed = (word.split(",") if ":" not in word else [word] for word in words)
    return [name.strip() for names in listed for name in names if name.strip()]


def split_algorithm(word: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of "gptq:refine_passes=3,desc_act=false"; values are JSON, or text.

    Raises:
        ConfigError: A parameter without a value, or one that is given twice.
    """
    name, _, rest = word.partition(":")
    parameters: dict[str, Any] = {}
    # A comma within a list of JSON is no end of a value: a name and "=" follow one that is.
    for item in re.split(r",(?=\s*\w+\s*=)", rest) if rest.strip() else []:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key or not text:
            raise ConfigError(f"--algorithm {word!r}: {item!r} is no parameter. Possible: {name}:NAME=VALUE,...")
        if key in parameters:
            raise ConfigError(f"--algorithm {word!r} gives {key} twice.")
        try:
            parameters[key] = json.loads(text)
        except ValueError:
            parameters[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return name, parameters


def algorithms_in(config: Any) -> list[Algorithm]:
    """The algorithms of a `quark.torch.QConfig`; their room, half a second of imports, is read where there are some."""
    if not config.algo_config:
        return []
    from quark.torch.algorithms import algorithms_of

    return algorithms_of(config.algo_config)
