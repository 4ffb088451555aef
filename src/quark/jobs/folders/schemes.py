"""The config of a scheme, or of a mix of block types, with what is said of some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark.errors import ConfigError
from quark.jobs.request import FolderRequest
from quark.jobs.words import GGUF


def is_mix(scheme: str, form: str) -> bool:
    """Whether a scheme is a mix of block types. Raises ConfigError for one beside another format than GGUF."""
    from quark.gguf import MIXES

    if scheme in MIXES and form != GGUF:
        raise ConfigError(f"--scheme {scheme}: only GGUF files hold its block types. Possible: --export-format {GGUF}.")
    return scheme in MIXES


def config_of(request: FolderRequest, scheme: str, form: str) -> Any:
    """The config of a scheme or of a mix of block types, for the model of a folder, without algorithms."""
    return mix_config(request, scheme) if is_mix(scheme, form) else scheme_config(request, scheme)


def mix_config(request: FolderRequest, mix: str | Mapping[str, str], algorithms: list[Any] | None = None) -> Any:
    """The config of a mix of block types, or of a type for each layer, for the model of a folder."""
    from quark.jobs.folders.models import load_meta_model
    from quark.torch import gguf_config

    meta, exclude = load_meta_model(request.model, request.trust_remote_code), list(request.exclude or ())
    return gguf_config(meta, mix, algorithms, exclude, layer_rules(request.layer), request.imatrix)


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
    request: FolderRequest, scheme: str, algorithms: list[Any] | None = None, inside_attention: bool = False
) -> Any:
    """The config of a scheme with what is said of some layers.

    Args:
        request: What was asked for.
        scheme: Of all other layers.
        algorithms: As `LLMTemplate.get_config` takes them.
        inside_attention: Whether the schemes of the KV cache and of attention are part of it.

    Raises:
        ConfigError: A wrong name or form.
    """
    from quark.torch import LLMTemplate
    from quark.torch.config.llm_template import default_exclusions
    from quark.torch.model.model_folder import read_config

    cache, attention = (request.kv_cache, request.attention) if inside_attention else (None, None)
    kind = read_config(request.model).get("model_type", "auto") if cache or attention else "auto"
    return LLMTemplate.get(kind).get_config(
        scheme,
        algorithms,
        kv_cache_scheme=cache,
        attention_scheme=attention,
        layer_config=layer_rules(request.layer),
        exclude_layers=[*default_exclusions(kind), *(request.exclude or ())],
    )
