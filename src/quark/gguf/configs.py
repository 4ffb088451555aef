"""The config of a transformers model that a GGUF file describes: the way back from `write_hyperparameters`.

Each key of the file is a field of the config, the first of several names that the class has. What a reader knows of an
architecture by heart is in `KNOWN`. The caller compares what the config would write with the file
(`hyperparameters.refuse_other_config`), and its tensors: what is not understood here is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.errors import FormatError, NotSupportedError
from quark.gguf.architectures.architecture import ACTIVATION_FIELDS, ACTIVATIONS, Architecture
from quark.gguf.architectures.metadata import EXPERTS
from quark.gguf.architectures.rope import rope_tensors
from quark.gguf.architectures.table import ARCHITECTURES
from quark.gguf.hyperparameters import shortest, with_scaled_rope
from quark.gguf.names import import_gguf
from quark.gguf.reader import hyperparameters

_EPSILONS = ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps")
FIELDS = {
    "context_length": ("max_position_embeddings", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim",),
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": EXPERTS,
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
}
"""Key of a file, without its architecture -> the names of its field, as `write_hyperparameters` looks for them."""
ATTENTION_BIASES, INNER_BIASES = ("attn_q.bias", "attn_qkv.bias"), ("ffn_up.bias",)
BIASES = {
    "attention_bias": ATTENTION_BIASES,
    "attention_out_bias": ("attn_output.bias",),
    "use_qkv_bias": ATTENTION_BIASES,
    "qkv_bias": ATTENTION_BIASES,
    "mlp_bias": INNER_BIASES,
    "use_bias": (*ATTENTION_BIASES, *INNER_BIASES),
}
"""Field of a config -> the tensors of a block of which one is there where it is set."""
_LLAMA3_LENGTHS = tuple(1 << power for power in range(3, 21))
"""Context lengths before scaling of type llama3; of a file nothing but the factors is known."""


@dataclass(frozen=True)
class FileFacts:
    """The statements of a file about its model.

    Attributes:
        arch: Its architecture.
        values: Key without the architecture -> value.
        shapes: Name of a tensor -> its sizes, rows first.
        layers: Blocks of the model itself.
        factors: Name of a tensor of factors of rotations -> its values.
    """

    arch: str
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    layers: int
    factors: Mapping[str, Any]

    def in_blocks(self, leaf: str) -> bool:
        """True where a block has a tensor of this name."""
        return any(name.endswith(f".{leaf}") for name in self.shapes)

    def size(self, key: str, usual: int = 0) -> int:
        """A whole number, of a list the largest. Raises FormatError for another value."""
        value = self.values.get(key, usual)
        value = max(value, default=usual) if isinstance(value, list) else value
        if not isinstance(value, (int, float)) or value != int(value) or not 0 <= value < 1 << 31:
            raise FormatError(f"{self.arch}.{key} is {value!r:.60}, which is no size.")
        return int(value)

    def share(self, key: str, of: int) -> int:
        """The size of one of `of` equal parts. Raises FormatError where it does not divide."""
        size = self.size(key)
        if of < 1 or size % of:
            raise FormatError(f"{self.arch}.{key} is {size}, in {of} parts.")
        return size // of

    @property
    def head_size(self) -> int:
        """Values in an attention head."""
        heads = self.size("attention.head_count")
        return self.size("attention.key_length") or (self.size("embedding_length") // heads if heads else 0)

    @property
    def attends(self) -> list[bool]:
        """For each layer, True where it has attention."""
        heads = self.values.get("attention.head_count_kv", [])
        return [bool(each) for each in heads] if isinstance(heads, list) else [bool(heads)] * self.layers


def facts_of(reader: Any) -> FileFacts:
    """Read metadata and shapes of a file. Raises FormatError where it names no architecture, or no number of blocks."""
    field = reader.get_field("general.architecture")
    arch = str(field.contents()) if field else ""
    values = {key.removeprefix(f"{arch}."): shortest(value) for key, value in hyperparameters(reader)}
    shapes = {t.name: tuple(int(size) for size in reversed(t.shape)) for t in reader.tensors}
    factors = {t.name: t.data for t in reader.tensors if t.name.startswith("rope_") and t.tensor_type.name == "F32"}
    facts = FileFacts(arch, values, shapes, 0, factors)
    layers = facts.size("block_count") - facts.size("nextn_predict_layers")
    if not arch or layers < 1:
        raise FormatError("it names no architecture, or no blocks")
    return FileFacts(arch, values, shapes, layers, factors)


def kinds_of(facts: FileFacts) -> list[str]:
    """The model types that a file may be of, most common first. Raises NotSupportedError, naming what is possible."""
    kinds = [kind for kind, row in ARCHITECTURES.items() if row.arch == facts.arch]
    if not kinds:
        possible = ", ".join(dict.fromkeys(row.arch for row in ARCHITECTURES.values()))
        raise NotSupportedError(
            f"GGUF files of the architecture {facts.arch!r} cannot be read yet. Possible: {possible}."
        )
    experts = bool(facts.size("expert_count"))
    return sorted(kinds, key=lambda kind: ARCHITECTURES[kind].mixture != experts)


def config_of(facts: FileFacts, kind: str, reader: Any) -> Any:
    """The config of a model type that a file describes. Raises FormatError for a size that is none."""
    from transformers import AutoConfig  # costs seconds: imported when a file is really read

    usual, architecture = AutoConfig.for_model(kind), ARCHITECTURES[kind]
    rows = facts.shapes.get("token_embd.weight", (0,))[0]
    fields: dict[str, Any] = {"num_hidden_layers": facts.layers, "vocab_size": rows}
    for key, names in FIELDS.items():
        name = next((name for name in names if _is_field(usual, name)), None)
        if name is not None and key in facts.values:
            fields[name] = facts.values[key] if isinstance(facts.values[key], float) else facts.size(key)
    for name, method in architecture.details.items():
        key = _key_of(architecture.arch, method)
        if key in facts.values:
            fields[name] = facts.values[key]
    fields |= {name: any(map(facts.in_blocks, leaves)) for name, leaves in BIASES.items() if _is_field(usual, name)}
    if _is_field(usual, "tie_word_embeddings"):
        fields["tie_word_embeddings"] = "output.weight" not in facts.shapes
    fields |= _activation(usual, architecture) | _special_tokens(reader)
    if rope := _rope(facts, usual):
        fields["rope_parameters"] = rope
    if kind in KNOWN:
        fields |= KNOWN[kind](facts)
    renamed = getattr(type(usual), "attribute_map", {})
    config = AutoConfig.for_model(kind, **{renamed.get(name, name): value for name, value in fields.items()})
    with_scaled_rope(reader, config)
    _scale_by_factors(facts, config)
    return config


def _is_field(config: Any, name: str) -> bool:
    """True for a field of a config, and not for a value that it computes."""
    return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)


def _key_of(arch: str, method: str) -> str:
    """The key, without the architecture, that a method of gguf's writer writes."""
    writer = import_gguf().GGUFWriter(None, arch)
    before = set(writer.kv_data[0])
    getattr(writer, method)(1)
    (key,) = set(writer.kv_data[0]) - before
    return str(key).removeprefix(f"{arch}.")


def _special_tokens(reader: Any) -> dict[str, int | None]:
    """The tokens that begin, end and fill up texts; None where a file names none."""
    ids: dict[str, int | None] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        ids[f"{name}_token_id"] = None if field is None else int(field.contents())
    return ids


def _activation(usual: Any, architecture: Architecture) -> dict[str, str]:
    """The activation of the reader, where the class has another one."""
    possible = ACTIVATIONS[architecture.activation]
    name = next((name for name in ACTIVATION_FIELDS if getattr(usual, name, None) is not None), None)
    return {} if name is None or getattr(usual, name) in possible else {name: possible[-1]}


def _rope(facts: FileFacts, usual: Any) -> dict[str, Any]:
    """The rotations, without their scaling; none of a model without them."""
    known = getattr(usual, "rope_parameters", None)
    if not known:
        return {}
    nested = "full_attention" in known
    full = dict(known["full_attention"] if nested else known)
    rope = {"rope_type": "default", "rope_theta": facts.values.get("rope.freq_base", 10000.0)}
    turned, size = facts.size("rope.dimension_count"), facts.head_size
    whole = turned in (0, size) and "partial_rotary_factor" not in full
    if turned and size and not whole and not hasattr(usual, "qk_rope_head_dim"):
        rope["partial_rotary_factor"] = turned / size
    if sections := facts.values.get("rope.dimension_sections"):
        rope["mrope_section"] = list(sections)[:3]
    if beta := facts.values.get("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = beta
    if not nested:
        return rope
    others = [name for name in known if name != "full_attention"]
    base = facts.values.get("rope.freq_base_swa")
    return {"full_attention": rope} | {
        name: known[name] | ({} if base is None else {"rope_theta": base}) for name in others
    }


def _scale_by_factors(facts: FileFacts, config: Any) -> None:
    """Give a config the scaling of rotations that lies in tensors of factors. Raises NotSupportedError."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for scaling in _scalings(facts, config) if rope else ():
        config.rope_parameters = {**rope, **scaling}
        tensors = [(facts.factors.get(name), make().numpy()) for name, make, _ in rope_tensors(config)]
        fits = (own is not None and own.shape == made.shape and np.allclose(own, made, 1e-4) for own, made in tensors)
        if len(tensors) == len(facts.factors) and all(fits):
            return
    if facts.factors:
        raise NotSupportedError(
            f"Its factors of rotations ({', '.join(facts.factors)}) are those of no scaling that is known. Possible: "
            "llama3 with low_freq_factor 1 and high_freq_factor 4, longrope."
        )


def _scalings(facts: FileFacts, config: Any) -> Iterator[dict[str, Any]]:
    """The scalings of rotations that tensors of factors may be of."""
    short, long, every = (
        facts.factors.get(f"rope_{name}.weight") for name in ("factors_short", "factors_long", "freqs")
    )
    if short is not None and long is not None:
        original = facts.size("rope.scaling.original_context_length") or config.max_position_embeddings
        config.original_max_position_embeddings = original
        attention = facts.values.get("rope.scaling.attn_factor")
        yield {
            "rope_type": "longrope",
            "short_factor": shortest([float(x) for x in short]),
            "long_factor": shortest([float(x) for x in long]),
            "original_max_position_embeddings": original,
            "factor": config.max_position_embeddings / max(1, original),
        } | ({} if attention is None else {"attention_factor": attention})
    for original in _LLAMA3_LENGTHS if every is not None and len(every) and every.max() > 1 else ():
        assert every is not None
        yield {
            "rope_type": "llama3",
            "factor": shortest(float(every.max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }


# What readers know by heart, or from several keys. ------------------------------------------------------------------


def _query_scale(largest: int) -> Callable[[FileFacts], dict[str, Any]]:
    """Of Gemma: the largest model, known by its layers, divides by another root."""

    def known(facts: FileFacts) -> dict[str, Any]:
        heads = facts.size("attention.head_count")
        whole = facts.size("embedding_length") // max(1, heads)
        return {"query_pre_attn_scalar": whole if facts.layers == largest else facts.head_size}

    return known


def _latent(facts: FileFacts) -> dict[str, Any]:
    """DeepSeek's attention: sizes of the two parts of a head."""
    turned = facts.size("rope.dimension_count")
    sizes: dict[str, Any] = {"qk_rope_head_dim": turned, "qk_nope_head_dim": facts.head_size - turned}
    sizes["head_dim"] = turned  # so transformers calls what is rotated
    return sizes | ({} if "attention.q_lora_rank" in facts.values else {"q_lora_rank": None})


def _leading(facts: FileFacts) -> dict[str, Any]:
    """Layers without experts come first."""
    dense = min(facts.size("leading_dense_block_count"), facts.layers)
    return {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (facts.layers - dense)}


def _delta(facts: FileFacts) -> dict[str, Any]:
    """Gated delta rules."""
    period, heads = facts.size("full_attention_interval"), facts.size("ssm.time_step_rank")
    size = facts.share("ssm.inner_size", heads)
    return {
        "linear_conv_kernel_dim": facts.size("ssm.conv_kernel"),
        "linear_key_head_dim": facts.size("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_num_key_heads": facts.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "layer_types": [
            "full_attention" if period and (layer + 1) % period == 0 else "linear_attention"
            for layer in range(facts.layers)
        ],
    }


def _convolutions(facts: FileFacts) -> dict[str, Any]:
    """LFM2: attention in some layers, and the length of inner vectors as it is."""
    kinds = ["full_attention" if attends else "conv" for attends in facts.attends]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _mamba(facts: FileFacts) -> dict[str, Any]:
    inner, hidden = facts.size("ssm.inner_size"), facts.size("embedding_length")
    return {
        "conv_kernel": facts.size("ssm.conv_kernel"),
        "intermediate_size": inner,
        "expand": facts.share("ssm.inner_size", hidden),
        "state_size": facts.size("ssm.state_size"),
        "time_step_rank": facts.size("ssm.time_step_rank"),
    }


def _mamba2(facts: FileFacts) -> dict[str, Any]:
    heads = facts.size("ssm.time_step_rank")
    return {
        "conv_kernel": facts.size("ssm.conv_kernel"),
        "expand": facts.share("ssm.inner_size", facts.size("embedding_length")),
        "state_size": facts.size("ssm.state_size"),
        "n_groups": facts.size("ssm.group_count"),
        "num_heads": heads,
        "head_dim": facts.share("ssm.inner_size", heads),
    }


def _mixers(facts: FileFacts) -> dict[str, Any]:
    """Layers of Mamba 2 between those with attention."""
    heads = facts.size("ssm.time_step_rank")
    experts = facts.size("expert_count")
    return {
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_d_state": facts.size("ssm.state_size"),
        "mamba_n_groups": facts.size("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_expand": facts.share("ssm.inner_size", facts.size("embedding_length")),
        "mamba_d_head": facts.share("ssm.inner_size", heads),
        "layer_types": ["attention" if attends else "mamba" for attends in facts.attends],
        "num_local_experts": experts,
        "num_experts_per_tok": facts.size("expert_used_count"),
        "position_embedding_type": "rope" if facts.values.get("rope.scaling.finetuned") else "nope",
    }


def _jamba(facts: FileFacts) -> dict[str, Any]:
    """Layers of Mamba, of which each n-th has attention, and each m-th experts."""
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in facts.shapes for layer in range(facts.layers)]
    attention, experts = _period(facts.attends), _period(routed)
    return {
        "attn_layer_period": attention[0], "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0], "expert_layer_offset": experts[1],
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_d_state": facts.size("ssm.state_size"),
        "mamba_dt_rank": facts.size("ssm.time_step_rank"),
        "mamba_expand": facts.share("ssm.inner_size", facts.size("embedding_length")),
    }  # fmt: skip


def _period(there: Sequence[bool]) -> tuple[int, int]:
    """Every which layer something is in, and in which first; as `layer % period == offset` has it."""
    first, *more = [layer for layer, one in enumerate(there) if one] or [len(there)]
    return (more[0] - first if more else len(there) + 1), first


def _falcon(facts: FileFacts) -> dict[str, Any]:
    """One head of keys for all, or groups of heads as the newer models have them."""
    heads, many = facts.size("attention.head_count_kv"), facts.size("attention.head_count")
    newer = heads not in (1, many) or facts.in_blocks("attn_norm_2.weight")
    norms = {"num_ln_in_parallel_attn": 2 if facts.in_blocks("attn_norm_2.weight") else 1} if newer else {}
    return {"new_decoder_architecture": newer, "multi_query": heads == 1, "parallel_attn": True, **norms}


KNOWN: Mapping[str, Callable[[FileFacts], dict[str, Any]]] = {
    "gemma2": _query_scale(46),
    "gemma3_text": _query_scale(62),
    "qwen3_moe": lambda facts: {"norm_topk_prob": True},
    "starcoder2": lambda facts: {"use_bias": True, "sliding_window": None},
    "falcon": _falcon,
    "deepseek_v2": lambda facts: {"norm_topk_prob": False, "topk_method": "greedy", **_latent(facts)},
    "deepseek_v3": _latent,
    "glm4_moe_lite": lambda facts: _latent(facts) | _leading(facts),
    "youtu": _latent,
    "exaone_moe": _leading,
    "exaone4": lambda facts: (
        {}
        if facts.size("attention.sliding_window")
        else {"sliding_window": None, "layer_types": ["full_attention"] * facts.layers}
    ),
    "internlm3": lambda facts: {"bias": facts.in_blocks("attn_output.bias")},
    "jamba": _jamba,
    "qwen3_next": lambda facts: {"norm_topk_prob": True, **_delta(facts)},
    "qwen3_5_text": _delta,
    "lfm2": _convolutions,
    "lfm2_moe": _convolutions,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "granitemoehybrid": _mixers,
}
"""`model_type` -> further fields of its config."""
