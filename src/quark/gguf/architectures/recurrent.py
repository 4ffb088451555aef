"""Recurrent architectures, whose layers keep a state: state spaces (Mamba), gated delta rules, short convolutions.

A = -exp(A_log)         ssm_a, in Mamba 2 a column, one value for each head
D                       ssm_d, a column likewise
conv (channels, 1, k)   (channels, k)
norm of y               (groups, channels / groups), which is normed group by group
dt_bias                 ssm_dt.bias
"""

from __future__ import annotations

import math
from typing import Any

from quark.gguf.architectures.architecture import Architecture, Change

BIAS = ("attention_bias",)
_DECAY = Change(lambda x, config: -x.exp(), lambda x: (-x).log(), exact=False)
_DECAYS = Change(lambda x, config: -x.exp().unsqueeze(-1), lambda x: (-x).log(), exact=False)
COLUMN = Change(lambda x, config: x.unsqueeze(-1))
CHANNELS = Change(lambda x, config: x.squeeze(1))


def _mamba2(mixer: str, groups: str) -> dict[str, Change]:
    return {
        ".A_log": _DECAYS,
        ".D": COLUMN,
        ".conv1d.weight": CHANNELS,
        f"{mixer}norm.weight": Change(lambda x, config: x.reshape(getattr(config, groups), -1)),
    }


def _attends(config: Any) -> list[bool]:
    return [kind in ("attention", "full_attention") for kind in config.layer_types]


def _limits(config: Any) -> str | None:
    return None if tuple(config.time_step_limit) == (0.0, math.inf) else "time_step_limit"


def _delta_sizes(config: Any) -> dict[str, Any]:
    """Those of gated delta rules, the states of which have a row for each value of a key."""
    return {
        "ssm_conv_kernel": config.linear_conv_kernel_dim,
        "ssm_state_size": config.linear_key_head_dim,
        "ssm_group_count": config.linear_num_key_heads,
        "ssm_time_step_rank": config.linear_num_value_heads,
        "ssm_inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }


def _delta(config: Any) -> str | None:
    period = _delta_sizes(config)["full_attention_interval"] if "full_attention" in config.layer_types else 0
    usual = [bool(period) and (layer + 1) % period == 0 for layer in range(config.num_hidden_layers)]
    if not period or _attends(config) != usual:
        return "full attention in other layers than each n-th"
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return "linear attention with values of another length than keys"
    return None


def _qwen3_next(config: Any) -> str | None:
    if not config.norm_topk_prob:
        return "weights of experts that do not sum to one"
    dense = config.mlp_only_layers or config.decoder_sparse_step != 1
    return "layers without experts" if dense else _delta(config)


def _qwen3_5(config: Any) -> str | None:
    # Readers hand each key to the values one after the other, and columns of blocks cannot be turned that way.
    if config.linear_num_key_heads != config.linear_num_value_heads:
        return "linear attention with fewer keys than values"
    return _delta(config)


def _split_shared(config: Any) -> dict[str, tuple[str, ...]]:
    suffix = "_shexp" if config.num_local_experts else ""
    return {
        "shared_mlp.input_linear.weight": (f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight"),
        "shared_mlp.output_linear.weight": (f"ffn_down{suffix}.weight",),
    }


def _granite_hybrid(config: Any) -> str | None:
    if config.mamba_proj_bias or not config.mamba_conv_bias:
        return "biases of other projections than the convolution"
    return _limits(config)


def _granite_inner(config: Any) -> int:
    return int(config.intermediate_size if config.num_local_experts else config.shared_intermediate_size)


def _lfm2_inner(config: Any) -> int:
    """As the model makes it of what the config says."""
    size = config.intermediate_size
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return int(size)
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple = config.block_multiple_of
    return int(multiple * math.ceil(int(config.block_ffn_dim_multiplier * size) / multiple))


def _mamba(config: Any) -> str | None:
    if config.use_bias or not config.use_conv_bias:
        return "biases of other projections than the convolution"
    # Norms of B, C and the time step have an epsilon of their own, and readers one for all.
    if getattr(config, "mixer_rms_eps", 0) > 1e-5 or config.layer_norm_epsilon > 1e-5:
        return "an epsilon of norms above 1e-5"
    return None


def _mamba_sizes(config: Any) -> dict[str, Any]:
    return {
        "ssm_conv_kernel": config.conv_kernel,
        "ssm_inner_size": config.intermediate_size,
        "ssm_state_size": config.state_size,
        "ssm_time_step_rank": config.time_step_rank,
        "ssm_dt_b_c_rms": config.model_type == "falcon_mamba",
    }


def _jamba(config: Any) -> str | None:
    other = config.mamba_proj_bias or not config.mamba_conv_bias
    return "biases of other projections than the convolution" if other else None


def _without_attention(config: Any) -> list[bool]:
    return [False] * int(config.num_hidden_layers)


DELTA: dict[str, Any] = {
    "unit_norms": True,
    "plain_norms": ("linear_attn.norm.weight",),
    "changes": {".A_log": _DECAY, ".conv1d.weight": CHANNELS},
    "without": BIAS,
}
_MROPE = (11, 11, 10)
"""The sections of rotary positions that transformers takes where a config says nothing."""
SHORT = {".conv.conv.weight": CHANNELS}
_GRANITE = {
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
}
RECURRENT = {
    "qwen3_next": Architecture(
        "qwen3next",
        mixture=True,
        details={
            "moe_intermediate_size": "add_expert_feed_forward_length",
            "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
        },
        derived=_delta_sizes,
        refuse=_qwen3_next,
        **DELTA,
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        pairs=True,
        mixture=True,
        without=BIAS,
        details=_GRANITE | {"shared_intermediate_size": "add_expert_shared_feed_forward_length"},
        derived=lambda c: {
            "rope_scaling_finetuned": c.position_embedding_type == "rope",
            "ssm_conv_kernel": c.mamba_d_conv,
            "ssm_state_size": c.mamba_d_state,
            "ssm_group_count": c.mamba_n_groups,
            "ssm_time_step_rank": c.mamba_n_heads,
            "ssm_inner_size": c.mamba_expand * c.hidden_size,
        },
        inner=_granite_inner,
        changes=_mamba2("mamba.", "mamba_n_groups"),
        splits=_split_shared,
        attention=_attends,
        refuse=_granite_hybrid,
    ),
    "granitemoeshared": Architecture(
        "granitemoe",
        pairs=True,
        mixture=True,
        details=_GRANITE | {"shared_intermediate_size": "add_expert_shared_feed_forward_length"},
        splits=_split_shared,
    ),
    "lfm2": Architecture(
        "lfm2",
        without=("conv_bias",),
        details={"conv_L_cache": "add_shortconv_l_cache"},
        inner=_lfm2_inner,
        changes=SHORT,
        attention=_attends,
    ),
    "lfm2_moe": Architecture(
        "lfm2moe",
        mixture=True,
        without=("conv_bias",),
        details={
            "conv_L_cache": "add_shortconv_l_cache",
            "moe_intermediate_size": "add_expert_feed_forward_length",
            "num_dense_layers": "add_leading_dense_block_count",
        },
        gating="SIGMOID",
        changes=SHORT,
        attention=_attends,
    ),
    "mamba": Architecture(
        "mamba",
        derived=_mamba_sizes,
        changes={".A_log": _DECAY, ".conv1d.weight": CHANNELS},
        attention=_without_attention,
        refuse=_mamba,
    ),
    "falcon_mamba": Architecture(
        "mamba",
        derived=_mamba_sizes,
        changes={".A_log": _DECAY, ".conv1d.weight": CHANNELS},
        attention=_without_attention,
        refuse=_mamba,
    ),
    "mamba2": Architecture(
        "mamba2",
        derived=lambda c: {
            "ssm_conv_kernel": c.conv_kernel,
            "ssm_state_size": c.state_size,
            "ssm_group_count": c.n_groups,
            "ssm_time_step_rank": c.num_heads,
            "ssm_inner_size": c.expand * c.hidden_size,
        },
        changes=_mamba2("mixer.", "n_groups"),
        attention=_without_attention,
        refuse=lambda c: _mamba(c) or _limits(c),
    ),
    "jamba": Architecture(
        "jamba",
        mixture=True,
        derived=lambda c: {
            "ssm_conv_kernel": c.mamba_d_conv,
            "ssm_inner_size": c.mamba_expand * c.hidden_size,
            "ssm_state_size": c.mamba_d_state,
            "ssm_time_step_rank": c.mamba_dt_rank,
        },
        changes={".A_log": _DECAY, ".conv1d.weight": CHANNELS},
        attention=_attends,
        refuse=_jamba,
    ),
    "qwen3_5_text": Architecture(
        "qwen35",
        # Of texts all sections have the same positions.
        derived=lambda c: (
            _delta_sizes(c) | {"rope_dimension_sections": [*c.rope_parameters.get("mrope_section", _MROPE), 0]}
        ),
        refuse=_qwen3_5,
        **DELTA,
    ),
}
"""`model_type` of a transformers config -> architecture."""
