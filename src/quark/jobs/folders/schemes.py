"""The config of a scheme, or of a mix of block types, with what is said of some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quark.errors import ConfigError
from quark.jobs.request import FolderRequest
from quark.jobs.words import GGUF

if TYPE_CHECKING:
    from quark.jobs.folders.bit_budget import Budget
    from quark.torch.checkpoint.opened import OpenedFolder


def is_mix(scheme: str, form: str) -> bool:
    """Return True where a scheme is a mix of block types. Raises ConfigError for one of another format than GGUF."""
    from quark.gguf import MIXES

    if scheme in MIXES and form != GGUF:
        raise ConfigError(f"--scheme {scheme}: only GGUF files hold its block types. Possible: --export-format {GGUF}.")
    return scheme in MIXES


def in_file(scheme: str | None, budget: Budget | None, form: str) -> bool:
    """Return True where the layers get block types of a GGUF file, which are no schemes."""
    return is_mix(scheme, form) if scheme is not None else budget is not None and form == GGUF


def config_of(request: FolderRequest, folder: OpenedFolder, scheme: str, form: str) -> Any:
    """The config of a scheme or of a mix of block types, for the model of a folder, without algorithms."""
    return mix_config(request, folder, scheme) if is_mix(scheme, form) else scheme_config(request, folder, scheme)


def mix_config(
    request: FolderRequest, folder: OpenedFolder, mix: str | Mapping[str, str], algorithms: list[Any] | None = None
) -> Any:
    """The config of a mix of block types, or of a type for each layer, for the model of a folder."""
    from quark.jobs.folders.models import skeleton_of
    from quark.torch import gguf_config

    exclude = list(request.exclude or ())
    return gguf_config(skeleton_of(folder), mix, algorithms, exclude, layer_rules(request.layer), request.imatrix)


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
    request: FolderRequest,
    folder: OpenedFolder | None,
    scheme: str,
    algorithms: list[Any] | None = None,
    inside_attention: bool = False,
) -> Any:
    """The config of a scheme with what is said of some layers.

    Args:
        request: What was asked for.
        folder: Of the model; None: one whose cache and attention stay as they are.
        scheme: Of all other layers.
        algorithms: As `LLMTemplate.get_config` takes them.
        inside_attention: Whether the schemes of the KV cache and of attention are part of it.

    Raises:
        ConfigError: A wrong name or form.
    """
    from quark.torch import LLMTemplate
    from quark.torch.config.llm_template import default_exclusions

    cache, attention = (request.kv_cache, request.attention) if inside_attention else (None, None)
    kind = "auto"
    if folder is not None and (cache or attention):
        kind = folder.config.get("model_type", kind)
    return LLMTemplate.get(kind).get_config(
        scheme,
        algorithms,
        kv_cache_scheme=cache,
        attention_scheme=attention,
        layer_config=layer_rules(request.layer),
        exclude_layers=[*default_exclusions(kind), *(request.exclude or ())],
    )
