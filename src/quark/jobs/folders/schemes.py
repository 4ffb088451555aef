"""The config of a scheme, or of a mix of block types, with what is said of some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.errors import ConfigError
from quark.jobs.words import GGUF


def is_mix(scheme: str, form: str) -> bool:
    """Whether a scheme is a mix of block types. Raises ConfigError for one beside another format than GGUF."""
    from quark.gguf import MIXES

    if scheme in MIXES and form != GGUF:
        raise ConfigError(f"--scheme {scheme}: only GGUF files hold its block types. Possible: --export-format {GGUF}.")
    return scheme in MIXES


def config_of(
    model: Path,
    scheme: str,
    form: str,
    exclude: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    algorithms: list[Any] | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The config of a scheme or of a mix of block types, for the model of a folder."""
    if is_mix(scheme, form):
        return mix_config(model, scheme, exclude, layers, algorithms, trust_remote_code)
    return scheme_config(scheme, exclude, layers, algorithms=algorithms)


def mix_config(
    model: Path,
    scheme: str | Mapping[str, str],
    exclude: Sequence[str] | None,
    layers: Sequence[str] | None,
    algorithms: list[Any] | None,
    trust_remote_code: bool = False,
    imatrix: Path | None = None,
) -> Any:
    """The config of a mix of block types, or of a type for each layer, for the model of a folder."""
    from quark.jobs.folders.models import load_meta_model
    from quark.torch import gguf_config

    skeleton = load_meta_model(model, trust_remote_code)
    return gguf_config(skeleton, scheme, algorithms, list(exclude or ()), layer_rules(layers), imatrix)


def layer_rules(layers: Sequence[str] | None) -> dict[str, str]:
    """Pattern -> scheme of --layer. Raises ConfigError for another form."""
    rules = {}
    for item in layers or []:
        pattern, separator, name = item.rpartition("=")
        if not separator:
            raise ConfigError(f"--layer takes PATTERN=SCHEME, got {item!r}; for one: '*.down_proj=int8_wo'.")
        rules[pattern] = name
    return rules


def scheme_config(
    scheme: str,
    exclude: Sequence[str] | None,
    layers: Sequence[str] | None,
    kind: str = "auto",
    kv_cache: str | None = None,
    attention: str | None = None,
    algorithms: list[Any] | None = None,
) -> Any:
    """The config of a scheme with overrides. Raises ConfigError for a wrong name or form."""
    from quark.torch import LLMTemplate
    from quark.torch.config.llm_template import default_exclusions

    template = LLMTemplate.get(kind)
    return template.get_config(
        scheme,
        algorithms,
        kv_cache_scheme=kv_cache,
        attention_scheme=attention,
        layer_config=layer_rules(layers),
        exclude_layers=[*default_exclusions(kind), *(exclude or ())],
    )
